"""A run with an observer of its own, which writes each moment that it is told of: give a folder and flags."""

import json
import sys
from contextlib import contextmanager
from pathlib import Path

from lightrl.config import GRPOConfig, parse_config
from lightrl.trainers.fit import run_program
from lightrl.trainers.grpo import GRPOTrainer
from lightrl.trainers.observer import Observer


class Moments(Observer):
    def __init__(self, trainer):
        self._trainer, self._comm = trainer, trainer.strategy.comm
        self.seen = []

    def note(self, *moment):
        self.seen.append(moment)
        others = self._comm.all_gather_object(moment)
        assert others == [moment] * self._comm.world, others  # the ranks are at the same moment

    @contextmanager
    def around_step(self, step):
        self.note("begin", step, self._trainer.step_index)
        with super().around_step(step):
            yield
        self.note("end", step)

    def after_rollouts(self, groups):
        assert all(len(group.rewards) == 2 for group in groups)
        self.note("rollouts", sum(self._comm.all_gather_object(len(groups))))

    def after_forward(self, scores, batch):
        assert len(scores.logprobs) == len(batch.loss_mask)
        self.seen.append(("forward",))

    def after_step(self, step):
        self.note("step", step, self._trainer.step_index)

    def sample_columns(self, item):
        self.seen.append(("columns", item.sample.position))
        return {"rank": self._comm.rank}

    def after_metrics(self, step, metrics):
        assert "reward/mean" in metrics
        self.note("metrics", step)

    def after_export(self, folder):
        assert not self._comm.is_main or (folder / "config.json").is_file()
        self.note("export", folder.name)

    def close(self):
        self.note("close")
        Path(output, f"moments-{self._comm.rank}.json").write_text(json.dumps(self.seen))


def build(config):
    trainer = GRPOTrainer(config)
    trainer.observers.append(Moments(trainer))
    return trainer


output, *flags = sys.argv[1:]
run_program(build, parse_config(GRPOConfig, flags))
