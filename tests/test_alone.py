"""A world of one waits for nobody: on two ranks, one alone calls every collective."""

from pathlib import Path

from lightrl.testing import run_spmd

PROGRAM = """
import torch.distributed as dist

from lightrl.alone import Alone

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    comm = Alone()
    assert (comm.rank, comm.world, comm.is_main) == (0, 1, True)
    assert comm.any(True) and not comm.agree(False) and comm.max_int(3) == 3
    assert comm.all_reduce(2, "sum") == 2
    assert comm.all_gather_object("mine") == ["mine"] and comm.broadcast_object("mine") == "mine"
    assert comm.exchange([["mine"]]) == ["mine"]
    comm.barrier()
    with comm.phase("scoring", local=True):
        print("alone")
"""


def test_its_collectives_wait_for_nobody(tmp_path: Path) -> None:
    program = tmp_path / "alone.py"
    program.write_text(PROGRAM)
    assert "alone" in run_spmd(program, world_size=2, timeout_s=60)
