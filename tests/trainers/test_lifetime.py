"""A run that is told to end saves first; a run whose torchrun was killed ends too; nothing is left behind."""

import os
import pty
import select
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

from lightrl.comm import Comm, RankError
from lightrl.config import GRPOConfig
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
    assert "error: the disk takes no more (No space left on device): what was written before is kept; the" in output
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


def test_a_rank_that_loses_another_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    folder = SimpleNamespace(root=tmp_path, checkpoints=tmp_path / "checkpoints")
    config = SimpleNamespace(checkpoint=SimpleNamespace(every=0), max_steps=3)
    run: Any = SimpleNamespace(folder=folder, config=config, step_index=1, strategy=SimpleNamespace(comm=Comm()))
    with pytest.raises(RankError), lifetime.ended_by_signals(run):
        raise RankError("rank 1 is gone")
    told = capfd.readouterr().err
    assert told.index("rank 1 is gone") < told.index("The run has ended; there is no checkpoint, since --checkpoint")
