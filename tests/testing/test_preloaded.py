"""Ranks that are forked see what torchrun's do, and none outlives the call that started it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightrl.testing import SpmdError, run_program, run_spmd, spmd

SEEN = """
import json, os, random, sys
import numpy, torch

class Own:
    pass

if __name__ == "__main__":
    start = "forked" if "preloaded" in str(sys.orig_argv) else "fresh"
    seen = {name: os.environ[name] for name in os.environ if "RANK" in name or "WORLD" in name or "MASTER" in name}
    seen |= {"argv": sys.argv, "folder": os.getcwd(), "path": sys.path[0], "threads": torch.get_num_threads()}
    seen |= {"draws": [random.random(), numpy.random.rand(), torch.rand(()).item()], "hash": hash("a"), "start": start}
    seen["splits_lines"] = sys.stdout.write_through or sys.stderr.write_through
    seen["elastic"] = sorted(name for name in os.environ if "ELASTIC" in name)
    assert sys.modules["__main__"].Own is Own  # so that a process of its own finds it, too
    print("on stderr", file=sys.stderr)
    torch.distributed.init_process_group("gloo")
    everyone = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, seen)
    if seen["RANK"] == "0":
        print("seen " + json.dumps(everyone))
    torch.distributed.destroy_process_group()
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "program.py"
    path.write_text(text)
    return path


def seen(printed: str) -> list[dict]:
    (line,) = (line for line in printed.splitlines() if line.startswith("seen "))
    return json.loads(line[5:])


def test_a_process_that_forks_programs_leaves_nothing_behind(tmp_path: Path) -> None:
    call = f"run_spmd({str(write(tmp_path, ''))!r}, world_size=1)"
    code = f"import gc; from lightrl.testing import run_spmd; {call}; gc.collect()"
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ResourceWarning" not in done.stderr


@pytest.mark.slow
def test_a_forked_rank_sees_what_torchrun_sets(tmp_path: Path) -> None:
    program = write(tmp_path, SEEN)
    both = []
    for options in ({}, {"torchrun": True}):
        printed = run_spmd(program, "--an", "option", world_size=2, cwd=tmp_path, timeout_s=90, **options)
        assert printed.count("on stderr") == 2
        both.append(seen(printed))
    for forked, real in zip(*both, strict=True):
        assert (forked["start"], real["start"]) == ("forked", "fresh")
        assert not forked["splits_lines"]  # else lines of several ranks mix where PYTHONUNBUFFERED is set
        own = ("MASTER_PORT", "draws", "hash", "start", "elastic", "splits_lines")
        assert {name: forked[name] for name in forked if name not in own} == {
            name: real[name] for name in real if name not in own
        }
        assert set(forked["elastic"]) <= set(real["elastic"])
    first, second = both[0]
    assert first["hash"] != second["hash"]  # so that what hangs on the order of a set differs
    assert not set(first["draws"]) & set(second["draws"])


def test_a_program_alone(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'found'")
    text = "import beside, os, sys\nprint(beside.WORD, os.environ.get('GIVEN'), 'RANK' in os.environ, sys.orig_argv)"
    command = [sys.executable, str(write(tmp_path, text)), "x"]
    assert "found yes False" in run_program(command, timeout_s=60, env={"GIVEN": "yes"})
    assert "preloaded" in run_program(command, timeout_s=60)
    assert "preloaded" in run_program(command, timeout_s=60, env={"OMP_NUM_THREADS": "1"})
    assert "preloaded" not in run_program(command, timeout_s=60, env={"OMP_NUM_THREADS": "2"})  # read at an import


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("raise KeyError('no such thing')", 1, "KeyError: 'no such thing'"),
        ("import sys; print('to say'); sys.exit(5)", 5, "to say"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import sys; sys.exit('a reason')", 1, "a reason"),
    ],
)
def test_failures_are_told(tmp_path: Path, text: str, code: int, said: str) -> None:
    program = write(tmp_path, f"import atexit; atexit.register(print, 'the end')\n{text}")
    with pytest.raises(SpmdError, match=f"Exit code {code}: ") as caught:
        run_program([sys.executable, str(program)], timeout_s=60)
    assert said in str(caught.value)
    assert ("the end" in str(caught.value)) == (code > 0)


def test_a_failure_is_wanted(tmp_path: Path) -> None:
    program = write(tmp_path, "print('fine')")
    assert run_spmd(program, world_size=1, timeout_s=60) == "fine\n"
    with pytest.raises(SpmdError, match="Exit code 0: "):
        run_spmd(program, world_size=1, timeout_s=60, expect_failure=True)


STUBBORN = """
import os, signal, subprocess, sys, time
from pathlib import Path

signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"])
Path(sys.argv[1] + os.environ["RANK"]).write_text(f"{os.getpid()} {child.pid}")
print("started", flush=True)
if sys.argv[2] == "fail" and os.environ["RANK"] == "1":
    sys.exit(3)
time.sleep(600)
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("how", "message"), [("fail", "Exit code -9, 3: "), ("hang", "No end after 3 s: ")])
def test_nothing_outlives_a_failure_or_the_time_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, message: str
) -> None:
    monkeypatch.setattr(spmd, "_GRACE_S", 1)
    program = write(tmp_path, STUBBORN)
    with pytest.raises(SpmdError, match=message) as caught:
        run_spmd(program, str(tmp_path / "pids"), how, world_size=2, timeout_s=3 if how == "hang" else 60)
    assert str(caught.value).count("started") == 2
    for rank in range(2):
        own, child = map(int, (tmp_path / f"pids{rank}").read_text().split())
        assert not is_alive(own)
        if (how, rank) != ("fail", 1):  # the children of a rank that ends by itself are its own affair
            time.sleep(0.1)
            assert not is_alive(child)
        else:
            os.kill(child, 9)
