"""Syncs through memory that all ranks map, on real ranks; sabotage_program.py corrupts them on their way."""

from pathlib import Path

import pytest

from lightrl.testing import run_spmd

PROGRAM = Path(__file__).parents[2] / "programs" / "host_memory_program.py"


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--dtype", "bfloat16")])
def test_ranks_share_the_weights_of_their_engines(options: tuple[str, ...]) -> None:
    assert run_spmd(PROGRAM, *options, world_size=2, timeout_s=180).count("all checked") == 2


@pytest.mark.slow
def test_shards_may_differ_in_size() -> None:
    assert run_spmd(PROGRAM, world_size=3, timeout_s=180).count("all checked") == 3


@pytest.mark.slow
def test_one_of_several_replicas_writes() -> None:
    output = run_spmd(PROGRAM, "--fsdp.replicate_size", "2", world_size=4, timeout_s=240)
    assert output.count("all checked") == 4
