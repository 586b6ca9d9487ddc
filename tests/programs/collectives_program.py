"""Trains on the built-in task and prints, as JSON, the collectives of a steady step: phase and kind of those of Comm.

usage: collectives_program.py STRATEGY OUTPUT_FOLDER
"""

import json
import sys

import torch.distributed as dist

from lightrl.comm import RankComm
from lightrl.config import CheckpointConfig, EvalConfig, GRPOConfig
from lightrl.trainers.grpo import GRPOTrainer

STEADY = 2  # the step that is looked at, counted from 0


def num_collectives():
    """Counts what every process group has done, whoever asked for it."""
    return sum(group._get_sequence_number_for_group() for group in dist.distributed_c10d._world.pg_map)


def main(strategy, folder):
    of_comm, starts = [], []
    explained = RankComm._explained

    def recorded(comm, what):
        of_comm.append(f"{comm.phase_name}: {what}")
        return explained(comm, what)

    RankComm._explained = recorded

    class Observed(GRPOTrainer):
        def step(self):
            starts.append((len(of_comm), num_collectives()))
            return super().step()

    config = GRPOConfig(
        strategy=strategy,
        max_steps=STEADY + 2,
        max_new_tokens=8,
        share_prompts=False,
        eval=EvalConfig(every=0),
        checkpoint=CheckpointConfig(every=0),
        output_dir=folder,
    )
    trainer = Observed(config)
    trainer.fit()
    (first, before), (last, after) = starts[STEADY : STEADY + 2]
    if trainer.strategy.comm.is_main:
        print("collectives", json.dumps({"of_comm": of_comm[first:last], "all": after - before}))
    trainer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
