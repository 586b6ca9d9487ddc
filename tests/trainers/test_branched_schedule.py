"""Runs that branch off with another number of updates per step, and where their schedules end."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from lightrl.config import CheckpointConfig, CriticConfig, GRPOConfig, OptimConfig, PPOConfig
from lightrl.trainers.grpo import GRPOTrainer
from lightrl.trainers.ppo import PPOTrainer

LINEAR = OptimConfig(schedule="linear")
EACH_STEP = CheckpointConfig(every=1, keep=9)


def options(toy: dict[str, Any], folder: Path, **others: Any) -> dict[str, Any]:
    return {**toy, "max_steps": 4, "output_dir": str(folder), "optim": LINEAR, "checkpoint": EACH_STEP, **others}


def position(trainer: Any, model: Any = None) -> tuple[int, int, float]:
    """Returns the updates done, the length of the schedule, and the rate as a share of the peak."""
    scheduler = trainer.strategy.trained.entry(model or trainer.model).scheduler
    (rate, *_), (peak, *_) = scheduler.get_last_lr(), scheduler.base_lrs
    return scheduler.last_epoch, scheduler.lr_lambdas[0].keywords["total_steps"], rate / peak


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_the_schedule_ends_with_the_run(before: int, after: int, toy_options: dict[str, Any], tmp_path: Path) -> None:
    first = GRPOTrainer(GRPOConfig(**options(toy_options, tmp_path / "run", num_minibatches=before)))
    first.fit()
    first.close()
    length = 2 * before + 2 * after
    branch = options(toy_options, tmp_path / "branch", num_minibatches=after)
    config = GRPOConfig(**branch, resume=str(tmp_path / "run/checkpoints/step-000002"))
    trainer = GRPOTrainer(config)
    assert position(trainer) == (2 * before, length, pytest.approx(1 - 2 * before / length))
    trainer.fit()
    assert position(trainer) == (length, length, 0)
    trainer.close()
    shutil.rmtree(tmp_path / "run")  # the branch goes on by itself
    shutil.rmtree(tmp_path / "branch/checkpoints/step-000004")
    again = GRPOTrainer(dataclasses.replace(config, resume="auto"))
    assert position(again) == (length - after, length, pytest.approx(after / length))
    again.close()


def test_the_policy_of_ppo_counts_no_updates_of_frozen_steps(toy_options: dict[str, Any], tmp_path: Path) -> None:
    frozen = {"critic": CriticConfig(policy_frozen_steps=1)}
    first = PPOTrainer(PPOConfig(**options(toy_options, tmp_path / "run", num_minibatches=2, **frozen)))
    first.fit()
    first.close()
    branch = options(toy_options, tmp_path / "branch", num_minibatches=1, **frozen)
    trainer = PPOTrainer(PPOConfig(**branch, resume=str(tmp_path / "run/checkpoints/step-000002")))
    assert position(trainer)[:2] == (2, 4)  # one step of two updates, then two of one
    assert position(trainer, trainer.critic)[:2] == (4, 6)
    trainer.close()
