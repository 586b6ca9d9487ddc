"""Observers of a user's own hear of the moments of a run in their order, on every rank at the same time."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lightrl.config import EvalConfig, GRPOConfig, RolloutLogConfig
from lightrl.testing import run_spmd
from lightrl.trainers.fit import StepReport
from lightrl.trainers.grpo import GRPOTrainer
from lightrl.trainers.observer import Observer

PROGRAM = Path(__file__).parents[1] / "programs" / "observed_program.py"


@pytest.mark.slow
def test_the_moments_of_a_run_come_in_order_on_two_ranks(toy: Path, tmp_path: Path) -> None:
    options = {
        "model": toy / "model", "train_data": toy / "train.jsonl", "reward": f"{toy / 'reward.py'}:odd_digits",
        "num_prompts": 4, "group_size": 2, "num_minibatches": 2, "max_steps": 2, "checkpoint.every": 0,
        "log.tensorboard": False, "log.samples_per_step": 1, "export.every": 1, "strategy": "ddp",
        "output_dir": tmp_path / "run",
    }  # fmt: skip
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    run_spmd(PROGRAM, str(tmp_path), *flags, world_size=2)
    main, other = (
        [tuple(moment) for moment in json.loads((tmp_path / f"moments-{rank}.json").read_text())] for rank in range(2)
    )
    assert main == [
        ("begin", 1, 0), ("rollouts", 4), ("forward",), ("forward",), ("step", 1, 1), ("end", 1),
        ("export", ".step-1"), ("columns", 0), ("metrics", 1),
        ("begin", 2, 1), ("rollouts", 4), ("forward",), ("forward",), ("step", 2, 2), ("end", 2),
        ("columns", 0), ("metrics", 2), ("export", "final"), ("close",),
    ]  # fmt: skip
    assert other == [moment for moment in main if moment[0] != "columns"]
    rows = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert [row["rank"] for row in rows] == [0, 0]


class Noted(Observer):
    """Writes what it is told of into a list that others share."""

    def __init__(self, name: str, seen: list[str]) -> None:
        self._name, self._seen = name, seen

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        try:
            with super().around_step(step):
                yield
        except ArithmeticError as error:
            self._seen.append(f"{self._name} sees {error}")
            raise

    def after_step(self, step: int) -> None:
        self._seen.append(f"{self._name} after {step}")


def test_the_first_observer_hears_first_and_a_step_that_fails_has_no_end(
    toy_options: dict[str, Any], tmp_path: Path
) -> None:
    class FailingTrainer(GRPOTrainer):
        def step(self) -> StepReport:
            if self.step_index == 1:
                raise ArithmeticError("the second step")
            return super().step()

    config = GRPOConfig(
        **toy_options,
        num_prompts=2,
        max_steps=3,
        output_dir=str(tmp_path / "run"),
        eval=EvalConfig(every=0),
        log=RolloutLogConfig(tensorboard=False),
    )
    seen: list[str] = []
    trainer = FailingTrainer(config)
    trainer.observers += [Noted("a", seen), Noted("b", seen)]
    with pytest.raises(ArithmeticError):
        trainer.fit()
    trainer.close()
    assert seen == ["a after 1", "b after 1", "a sees the second step", "b sees the second step"]
