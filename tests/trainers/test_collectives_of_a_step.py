"""What ranks wait for in a step of GRPO: each collective costs the time of the slowest rank, and a round trip."""

import json
from pathlib import Path

import pytest

from lightrl.testing import run_spmd

PROGRAM = Path(__file__).parents[1] / "programs" / "collectives_program.py"
# Of a step with one micro-batch and one update, without an evaluation, a checkpoint or the canary. A longer list is
# time lost on every run: have what is new travel with one of these, as comm.phase(...) lets a number do.
BEFORE_THE_UPDATE = [
    "generate: a decision of all ranks",  # has a rank failed?
    "reward exact_match: a decision of all ranks",  # has a rank failed, or a reward?
    "learn: all_gather_object",  # the lengths of the samples, to balance them
    "micro-batches: a decision of all ranks",  # their number
    "packing: a decision of all ranks",  # has a rank failed?
    "learn: all_gather_object",  # the trained tokens, and the number of micro-batches
    "learn: all_reduce",  # the loss
]
GRADIENTS = "learn: all_reduce"
AFTER_IT = [
    "learn: a decision of all ranks",  # is the norm finite?
    "weight sync: all_reduce",  # fingerprints
    "weight sync: a decision of all ranks",  # did the weights arrive?
    "between two phases: all_gather_object",  # metrics
    "between two phases: all_gather_object",  # logged samples
    "between two phases: a decision of all ranks",  # has a rank got a signal?
]
SYNC = AFTER_IT.index("weight sync: all_reduce")
AFTER_IT_ON_ONE_HOST = [
    *AFTER_IT[:SYNC],
    "weight sync: a decision of all ranks",  # do all engines have their weights in common memory?
    "weight sync: all_reduce",  # fingerprints
    "weight sync: all_reduce",  # fingerprints of what was written
    *AFTER_IT[SYNC + 1 :],
]
BY_FSDP = 9  # gathers of 3 units forward and of 2 backward, 3 sums of gradients, 1 of the norm


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "of_comm", "of_others"),
    [
        ("ddp", [*BEFORE_THE_UPDATE, GRADIENTS, *AFTER_IT], 0),
        ("fsdp", [*BEFORE_THE_UPDATE, *AFTER_IT_ON_ONE_HOST], BY_FSDP),
    ],
)
def test_a_steady_step_takes_no_more_collectives(
    strategy: str, of_comm: list[str], of_others: int, tmp_path: Path
) -> None:
    output = run_spmd(PROGRAM, strategy, str(tmp_path / "run"), world_size=2, timeout_s=200)
    (line,) = (line for line in output.splitlines() if line.startswith("collectives "))
    found = json.loads(line.removeprefix("collectives "))
    assert found["of_comm"] == of_comm
    assert found["all"] == len(of_comm) + of_others
