"""A run that is told to end saves first; a run whose torchrun was killed ends too; nothing is left behind."""

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from torch.distributed import HashStore

from lightrl.comm import Comm, RankError
from lightrl.config import GRPOConfig, LateMistakeError
from lightrl.rank_board import RankBoard
from lightrl.rewards import load_reward
from lightrl.testing import free_port, run_spmd
from lightrl.testing.preloaded import Program, start
from lightrl.trainers import lifetime
from lightrl.trainers.fit import run_program

PROGRAM = Path(__file__).parents[1] / "programs" / "signalled_program.py"
Rows = list[dict[str, Any]]
ENDLESS = ["--max_steps", "100000", "--checkpoint.every", "100000", "--eval.every", "0"]


def run_to_its_end(flags: list[str], folder: Path, timeout_s: float = 60, **environment: str) -> tuple[int, str]:
    """Returns exit code and output of the program on one rank."""
    with tempfile.TemporaryFile("w+") as output:
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        program = Program(str(PROGRAM), [*flags, "--output_dir", str(folder)], variables, str(folder.parent))
        running = start(program, output)
        try:
            assert select.select([running], [], [], timeout_s)[0], "no end"
        finally:
            running.kill_all()
            running.read_exit_code()
        output.seek(0)
        assert running.exit_code is not None
        return running.exit_code, output.read()


@pytest.mark.slow
def test_a_signal_to_one_rank_saves_on_all_and_the_run_goes_on_with_the_same_numbers(
    toy_flags: list[str], metrics_of: Callable[[Path], Rows], tmp_path: Path
) -> None:
    flags = [*toy_flags, "--max_steps", "4", "--checkpoint.every", "3", "--strategy", "fsdp", "--eval.every", "0"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run_spmd(PROGRAM, *flags, "--output_dir", str(whole), world_size=2, timeout_s=150)
    command = [*flags, "--output_dir", str(stopped)]
    told = {"SIGNALLED": "1 2 SIGUSR1 0"}
    output = run_spmd(PROGRAM, *command, world_size=2, timeout_s=150, env=told, expect_failure=True)
    assert "[rank 1] SIGUSR1: the run ends after this step, for which it has 300 s (--checkpoint.grace_s)" in output
    assert "[rank 0] SIGUSR1: the run ends after step 2; the same command with --output_dir" in output
    assert "continues from step-000002" in output
    assert "Traceback" not in output
    assert "continuing after step 2" in run_spmd(PROGRAM, *command, world_size=2, timeout_s=150)
    wanted, found = metrics_of(whole), metrics_of(stopped)
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    for mine, yours in zip(wanted, found, strict=True):
        for name in ("loss", "grad_norm", "entropy", "reward/mean", "tokens/response"):
            assert mine[name] == yours[name], name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("told", "flags", "code", "text"),
    [
        ("SIGTERM 0", [], 75, "SIGTERM: the run ends after step 1; the same command with --output_dir"),
        ("SIGHUP 0", ["--checkpoint.asynchronous", "True"], 75, "SIGHUP: the run ends after step 1; the same command"),
        ("SIGINT 9", [], 130, "interrupted; there is no checkpoint: the same command starts from the beginning"),
        ("SIGTERM 0", ["--checkpoint.every", "0"], 143, "there is no checkpoint, since --checkpoint.every is 0"),
        ("SIGTERM 9", ["--checkpoint.grace_s", "0"], 143, "SIGTERM: step and checkpoint took too long"),
        ("SIGUSR1 30", ["--checkpoint.grace_s", "1"], 138, "SIGUSR1: step and checkpoint took too long"),
    ],
)
def test_every_signal_has_its_exit_code(
    told: str, flags: list[str], code: int, text: str, toy_flags: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    found, output = run_to_its_end([*toy_flags, *ENDLESS, *flags], folder, SIGNALLED=f"0 1 {told}")
    assert (found, "Traceback" in output) == (code, False), output
    assert text in output
    assert (folder / "checkpoints" / "step-000001" / "COMPLETE").exists() == (code == 75)


@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_what_was_written_stays(toy_flags: list[str], tmp_path: Path) -> None:
    flags = [*toy_flags, *ENDLESS, "--checkpoint.every", "1"]
    code, output = run_to_its_end(flags, tmp_path / "run", SIGNALLED="0 2 FULL 0")
    assert (code, "Traceback" in output) == (1, False), output
    full = f"error: the disk takes no more (No space left on device) for {tmp_path / 'run' / 'metrics.jsonl'}: what was"
    assert full in output, output
    assert "continues from step-000001" in output


@pytest.mark.slow
def test_ranks_end_with_a_killed_torchrun_and_leave_no_folder(toy_flags: list[str], tmp_path: Path) -> None:
    run, temporary = tmp_path / "run", tmp_path / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["--master_addr", "127.0.0.1", "--master_port", str(free_port()), str(PROGRAM), *toy_flags, *ENDLESS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
    with (tmp_path / "output").open("w") as output:
        launcher = subprocess.Popen(
            [*command, "--output_dir", str(run)], stdout=output, stderr=output, env=environment, start_new_session=True
        )
        ranks = [tmp_path / "run.pid0", tmp_path / "run.pid1"]
        try:
            wait_for(lambda: (run / "metrics.jsonl").exists(), 90)
            assert list(temporary.glob("torchelastic_*"))
            launcher.kill()
            launcher.wait()
            wait_for(lambda: not any(is_alive(path) for path in ranks), 15)
        finally:
            for path in ranks:
                if path.exists() and is_alive(path):
                    os.kill(int(path.read_text()), signal.SIGKILL)
            launcher.kill()
    assert "is gone, and so this rank ends; there is no checkpoint" in (tmp_path / "output").read_text()
    assert list(temporary.glob("torchelastic_*")) == []


def is_alive(pid_file: Path) -> bool:
    """Returns whether the process runs; one that has ended and that nobody waits for does not."""
    found = subprocess.run(["ps", "-o", "stat=", "-p", pid_file.read_text()], capture_output=True, text=True)
    return bool(found.stdout.strip()) and not found.stdout.startswith("Z")


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "too late"
        time.sleep(0.05)


def test_output_to_a_closed_terminal_goes_nowhere() -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        time.sleep(1)  # until the terminal is closed
        lifetime._drop_lost_terminal()
        os.write(1, b"still here")
        os._exit(5)
    time.sleep(0.3)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5


def test_files_in_the_folder_of_torchrun_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [tmp_path / "torchelastic_x" / "none_y" / "attempt_0" / str(rank) for rank in range(2)]
    for folder in ranks:
        folder.mkdir(parents=True)
    (ranks[1] / "stdout.log").write_text("asked for")
    for folder in ranks:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
        lifetime._remove_torchrun_folder()
    assert [folder.exists() for folder in ranks] == [False, True]
    (ranks[1] / "stdout.log").unlink()
    lifetime._remove_torchrun_folder()
    assert not list(tmp_path.iterdir())
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    lifetime._remove_torchrun_folder()


def test_another_rank_may_remove_the_folder_of_torchrun_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "torchelastic_x" / "none_y" / "attempt_0" / "0"
    folder.mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
    scandir = os.scandir

    def late(path: Any) -> Any:
        if "attempt_0" in str(path):
            shutil.rmtree(tmp_path / "torchelastic_x", ignore_errors=True)
        return scandir(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", late)
        lifetime._remove_torchrun_folder()
    assert not list(tmp_path.iterdir())


def test_a_failure_elsewhere_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    error = RankError("rank 1 failed in phase 'reward'")
    lifetime.tell(error)
    lifetime.tell(error)
    assert capsys.readouterr().err.count("rank 1 failed") == 1


def test_code_that_calls_exit_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def leave(_config: Any) -> Any:
        raise SystemExit(0)

    def end(code: int) -> NoReturn:
        raise RuntimeError(f"ended with {code}")

    monkeypatch.setattr(lifetime, "end_process", end)
    with pytest.raises(RuntimeError, match="ended with 1"):
        run_program(leave, GRPOConfig())
    assert "in leave" in capfd.readouterr().err


class OwnError(BaseException):
    """What a user's library may raise, as asyncio and pytest do."""


class TextlessError(ValueError):
    def __str__(self) -> str:
        raise RuntimeError("there is no text")


@pytest.mark.parametrize("kind", [OwnError, TextlessError])
def test_an_error_of_any_kind_ends_the_process_at_once(
    kind: type[BaseException], watch: lifetime.SignalWatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The end of the interpreter would wait for threads, such as those of a reward, while other ranks wait for it."""

    def fail(_config: Any) -> Any:
        raise kind

    with pytest.raises(EndedError, match="^1$"):
        run_program(fail, GRPOConfig())
    told = capsys.readouterr().err
    assert kind.__name__ in told
    assert "in fail" in told


def test_a_module_that_changes_settings_of_torch_ends_the_start_with_a_sentence(
    watch: lifetime.SignalWatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "careless.py"
    path.write_text("import torch\ntorch.set_grad_enabled(False)\ndef mine(sample): ...\n")

    def load(_config: Any) -> Any:
        try:
            return load_reward(f"{path}:mine")
        finally:
            torch.set_grad_enabled(True)

    with pytest.raises(EndedError, match="^2$"):
        run_program(load, GRPOConfig())
    told = " ".join(capsys.readouterr().err.split())
    assert f"The import of {path} has changed settings of torch" in told
    assert "Traceback" not in told


def stoppable(folder: Path, *, step: int = 1, every: int = 0, max_steps: int = 3) -> Any:
    """A run of one process that counts its saves."""
    saved: list[int] = []
    run = SimpleNamespace(
        folder=SimpleNamespace(root=folder, checkpoints=folder / "checkpoints"),
        config=SimpleNamespace(checkpoint=SimpleNamespace(every=every, grace_s=300.0), max_steps=max_steps),
        strategy=SimpleNamespace(comm=Comm(), saver=SimpleNamespace(finish=lambda: None)),
        step_index=step,
        saved=saved,
    )
    run.save = lambda: saved.append(run.step_index)
    return run


def test_a_rank_that_loses_another_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(RankError), lifetime.ended_by_signals(stoppable(tmp_path)):
        raise RankError("rank 1 is gone")
    told = capfd.readouterr().err
    assert told.index("rank 1 is gone") < told.index("The run has ended; there is no checkpoint, since --checkpoint")


def test_the_full_disk_of_another_rank_is_one_sentence_to_people_and_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("RUN_ID", "none"), ("ERROR_FILE", f"{tmp_path}/error")):
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    error = RankError("Traceback (most recent call last)")
    error.mistake = "rank 1: [Errno 28] No space left on device: '/runs/a'"
    with pytest.raises(RankError), lifetime.ended_by_signals(run := stoppable(tmp_path)):
        raise error
    assert lifetime._explain(error, run) == 1
    for told in (capfd.readouterr().err, (tmp_path / "error").read_text()):
        assert (told.count("no more (No space left on device) for /runs/a:"), "Traceback" in told) == (1, False)


@pytest.mark.parametrize(
    ("step", "every", "code", "saved"),
    [
        (3, 2, 75, [3]),
        (4, 2, 75, []),  # it was saved after this step
        (0, 2, 75, []),  # nothing was trained yet
        (3, 0, 128 + signal.SIGUSR1, []),
        (5, 2, None, []),  # the last step is done, so the run ends as without a signal
    ],
)
def test_a_signal_saves_what_is_not_saved_yet(
    step: int, every: int, code: int | None, saved: list[int], tmp_path: Path
) -> None:
    run = stoppable(tmp_path, step=step, every=every, max_steps=5)
    with lifetime.ended_by_signals(run) as goes_on:
        assert goes_on() is (step < 5)
        os.kill(os.getpid(), signal.SIGUSR1)
        if code is None:
            assert not goes_on()
        else:
            with pytest.raises(lifetime.StoppedBySignal) as stopped:
                goes_on()
            assert stopped.value.code == code
    assert run.saved == saved
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


class EndedError(Exception):
    """Raised where the process would end."""


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> lifetime.SignalWatch:
    """A watch under torchrun, without its thread."""

    def end(code: int) -> NoReturn:
        raise EndedError(code)

    monkeypatch.setattr(lifetime, "end_process", end)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    made = lifetime.SignalWatch(stoppable(tmp_path))
    made._former = {signal.SIGTERM: signal.SIG_DFL, signal.SIGUSR1: signal.SIG_DFL}
    return made


def test_only_the_first_signal_sets_the_time_that_is_left(watch: lifetime.SignalWatch) -> None:
    watch._react(bytes([signal.SIGHUP]))  # somebody else handles it
    assert (watch.received, watch._deadline) == (0, None)
    watch._react(bytes([signal.SIGUSR1]))
    deadline = watch._deadline
    assert deadline is not None
    assert 290 < deadline - time.monotonic() <= 300
    watch._react(bytes([signal.SIGTERM]))
    assert (watch.received, watch._deadline) == (signal.SIGUSR1, deadline)
    watch._deadline = time.monotonic() - 1
    with pytest.raises(EndedError, match=str(128 + signal.SIGUSR1)):
        watch._react(b"")


def test_a_signal_ends_a_child_of_a_users_code_and_is_not_heard_by_the_rank(watch: lifetime.SignalWatch) -> None:
    """Such as terminate() of a pool of multiprocessing, which waits for the end of its workers."""
    watch.start()
    try:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        watch._heard.settimeout(0.5)
        assert watch._next_signals() == b""
        os.kill(os.getpid(), signal.SIGTERM)
        assert watch.received == signal.SIGTERM
    finally:
        watch.stop()


def test_a_child_that_lives_on_does_not_hold_up_the_end(watch: lifetime.SignalWatch) -> None:
    """Such as the worker of a pool that a reward keeps for the whole run."""
    watch.start()
    said, heard = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(heard, b"here")
        time.sleep(60)
        os._exit(0)
    try:
        assert os.read(said, 4) == b"here"
        watch.written.close()
        watch._thread.join(10)
        assert not watch._thread.is_alive()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        watch.stop()


def test_after_ctrl_c_a_call_into_c_has_a_few_seconds(watch: lifetime.SignalWatch) -> None:
    watch._react(bytes([signal.SIGINT]))
    assert watch.received == 0  # Python raises KeyboardInterrupt
    assert watch._deadline is not None
    assert 0 < watch._deadline - time.monotonic() <= 5
    watch._deadline = time.monotonic() - 1
    with pytest.raises(EndedError, match="130"):
        watch._react(b"")


def test_an_orphan_ends_unless_it_still_saves(watch: lifetime.SignalWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    watch._react(b"")
    monkeypatch.setattr(watch, "_parent", os.getppid() + 1)
    watch._react(b"")  # a signal to the whole job may be on its way
    monkeypatch.setattr(lifetime, "_LAG_S", 0.0)
    with pytest.raises(EndedError, match="1"):
        watch._react(b"")
    watch.received = signal.SIGTERM
    watch._react(b"")


@pytest.mark.parametrize(
    ("error", "has_trainer", "code"),
    [
        (ValueError("a wrong option"), False, 2),
        (ValueError("in a step"), True, 1),
        (LateMistakeError("a hub that takes no upload"), True, 2),
        (RankError("rank 1 failed"), False, 1),
        (KeyboardInterrupt(), False, 130),
    ],
)
def test_every_error_has_its_exit_code(
    error: BaseException, has_trainer: bool, code: int, tmp_path: Path, watch: lifetime.SignalWatch
) -> None:
    with pytest.raises(EndedError, match=f"^{code}$"):
        lifetime.end_failed(error, stoppable(tmp_path) if has_trainer else None)


@pytest.mark.parametrize("what_fails", ["nothing", "an observer", "a service"])
def test_observers_are_told_of_an_error_and_cannot_hide_it(
    what_fails: str,
    tmp_path: Path,
    watch: lifetime.SignalWatch,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(lifetime, "_LAST_WORD_S", 0.5)
    told: list[BaseException] = []

    def wrong(_: BaseException) -> None:
        if what_fails == "a service":
            time.sleep(60)
        raise OSError("out of reach")

    run, error = stoppable(tmp_path), ZeroDivisionError("in a step")
    failing = [SimpleNamespace(after_failure=wrong)] if what_fails != "nothing" else []
    run.observers = [*failing, SimpleNamespace(after_failure=told.append)]
    with pytest.raises(EndedError, match="^1$"):
        lifetime.end_failed(error, run)
    assert told == ([] if what_fails == "a service" else [error])
    assert "ZeroDivisionError: in a step" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt(), SystemExit(0), ValueError("an option")])
def test_other_ranks_read_why_a_rank_has_ended_outside_a_phase(
    error: BaseException,
    watch: lifetime.SignalWatch,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = HashStore()
    boards = [RankBoard(store, rank, 2) for rank in range(2)]
    monkeypatch.setattr(lifetime, "current", lambda: SimpleNamespace(board=boards[1], process=os.getpid()))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(EndedError):
        lifetime.end_failed(error, None)
    assert capsys.readouterr().err.startswith("[rank 1] ")
    assert type(error).__name__ in boards[0].errors_now()[1]
    with pytest.raises(EndedError):
        lifetime.end_failed(RankError("rank 0 failed"), None)
    assert "rank 0 failed" not in boards[0].errors_now()[1]  # it has said so itself


def test_ctrl_c_that_comes_while_others_are_told_hides_no_error(
    watch: lifetime.SignalWatch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun passes Ctrl-C on to one rank after the other, and the first one's end is an error of the second."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lifetime.threading.Thread, "join", interrupted)
    with pytest.raises(EndedError, match="^1$"):
        lifetime.end_failed(RankError("rank 1 failed with KeyboardInterrupt: Ctrl-C"), None)
    assert capsys.readouterr().err.count("\n") == 1


def test_a_mistake_in_a_users_code_is_told_with_its_line(
    tmp_path: Path, watch: lifetime.SignalWatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error without a traceback, such as that of int("x") in a strategy of one's own, could not be found."""
    namespace: dict[str, Any] = {}
    exec(compile("\ndef prepare():\n    int('x')\n", str(tmp_path / "own.py"), "exec"), namespace)
    with pytest.raises(ValueError, match="invalid literal") as caught:
        namespace["prepare"]()
    with pytest.raises(EndedError, match="^2$"):
        lifetime.end_failed(caught.value, None)
    told = capsys.readouterr().err
    assert f"error: invalid literal for int() with base 10: 'x' (ValueError at line 3 of {tmp_path}/own.py" in told


def test_a_mistake_on_another_rank_is_a_mistake(watch: lifetime.SignalWatch) -> None:
    error = RankError("rank 1 failed")
    error.mistake = "rank 1: there is no such file"
    with pytest.raises(EndedError, match="^2$"):
        lifetime.end_failed(error, None)
