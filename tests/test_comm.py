import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from lightrl.comm import Comm, RankComm, RankError, connect
from lightrl.testing import run_spmd

PROGRAM = Path(__file__).parent / "programs" / "comm_program.py"


@pytest.mark.parametrize("which", ["collectives", "timeout", "error", "again"])
def test_two_ranks(which: str) -> None:
    assert "all checked" in run_spmd(PROGRAM, which, world_size=2, timeout_s=90, torchrun=True)


def test_mistakes_of_two_ranks_in_three() -> None:
    assert "all checked" in run_spmd(PROGRAM, "mistakes", world_size=3, timeout_s=90)


def test_a_world_of_one_needs_no_process_group() -> None:
    comm = Comm()
    tensor = torch.tensor([1.0, 2.0])
    reduced = comm.all_reduce({"x": tensor, "n": 3}, "mean")
    assert_close(reduced["x"], tensor)
    assert reduced["n"] == 3
    assert comm.all_gather(torch.tensor(4)).tolist() == [4]
    assert comm.all_gather_object("a") == ["a"]
    assert comm.exchange([[1, 2]]) == [1, 2]
    assert comm.any(True)
    assert not comm.agree(False)
    with comm.phase("x", local=True) as agreed:
        agreed.largest = 2
    assert agreed.largest == 2
    with pytest.raises(ZeroDivisionError), comm.phase("x", local=True):
        raise ZeroDivisionError


class TwoAlike(Comm):
    """A rank beside another with the same values."""

    def __init__(self) -> None:
        super().__init__()
        self.world = 2

    def _reduce_in_place(self, flat: torch.Tensor, op: str) -> None:
        if op == "sum":
            flat.mul_(2)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_sums_and_means_of_small_integers_do_not_wrap_around(dtype: torch.dtype) -> None:
    most = torch.iinfo(dtype).max
    values = torch.tensor([most, 1], dtype=dtype)
    assert TwoAlike().all_reduce(values, "sum").tolist() == [2 * most, 2]
    assert TwoAlike().all_reduce({"x": values}, "mean")["x"].tolist() == [float(torch.tensor(most).float()), 1.0]
    assert TwoAlike().all_reduce(values, "max").dtype == dtype


def test_what_takes_time_under_a_name_is_told_to_a_profiler() -> None:
    comm, spans = Comm(), []

    @contextmanager
    def listen(name: str) -> Iterator[None]:
        spans.append(name)
        yield
        spans.append(f"after {name}")

    comm.on_span = listen
    with comm.phase("learn") as agreed, comm.span("time/update"):
        spans.append("inside")
    assert agreed.largest == 0
    assert spans == ["learn", "time/update", "inside", "after time/update", "after learn"]


def test_variables_of_a_half_made_launch_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="missing for a distributed run: RANK, MASTER_ADDR, MASTER_PORT"):
        connect(torch.device("cpu"), timedelta(seconds=5))


def test_rank_error_is_no_value_error() -> None:
    """A failure of another rank must not look like a mistake of the user's."""
    assert not issubclass(RankError, ValueError)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_memory_that_a_step_frees_is_there_for_the_next() -> None:
    """32 MB that are written and freed come from the system, in pages of at least 4 kB, in the first steps only."""
    script = """
import resource, torch
from lightrl.comm import pick_device

def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    parts = [torch.ones(1 << 20) for _ in range(8)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

pick_device("cpu", 1)
step()
print(min(step() for _ in range(5)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 50  # 8,160 without


@pytest.mark.parametrize(
    ("cause", "told"),
    [
        ("[/gloo/pair.cc:537] Read error: Connection reset by peer", "in all_reduce during phase 'start': "),
        ("[/gloo/buffer.cc:81] Timed out waiting 9000ms", "in all_reduce during phase 'start' (time-out 1800 s): "),
    ],
)
def test_only_a_time_out_is_called_one(cause: str, told: str) -> None:
    comm = RankComm.__new__(RankComm)  # without the ranks
    Comm.__init__(comm)
    with pytest.raises(RankError, match=re.escape(told)), comm._explained("all_reduce"):
        raise RuntimeError(cause)
