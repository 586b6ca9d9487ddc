"""Runs that branch off with another number of updates per step, and where their schedules end."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR

from lightrl.comm import Comm
from lightrl.config import CheckpointConfig, CriticConfig, GRPOConfig, OptimConfig, PPOConfig
from lightrl.strategy.optim.optimizers import build_lr_scheduler
from lightrl.trainers.branched_schedule import _num_planned, end_schedules_with_run
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


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)


def branched(
    folder: Path, *, before: str = "", extra: int = 0, critic_extra: int = 0, others: Any = (), **optim: Any
) -> list[Any]:
    """Ends the schedules of a run of 10 steps of 2 x 2 updates that continues after step 4 of a checkpoint.

    Returns the policy's and the critic's.
    """
    config = GRPOConfig(
        max_steps=10, num_epochs=2, num_minibatches=2, optim=OptimConfig(**{"schedule": "linear", **optim})
    )
    checkpoint = folder / "checkpoints" / "step-000004"
    models, schedulers = [nn.Linear(1, 1), nn.Linear(1, 1)], []
    for name, num_extra in (("", extra), ("critic", critic_extra)):
        (checkpoint / name).mkdir(parents=True, exist_ok=True)
        torch.save({"scheduler": {"extra_updates": num_extra}}, checkpoint / name / "state.pt")
        schedulers.append(build_lr_scheduler(sgd(), config.optim, config.schedule_length))
    if before:
        (folder / "config.yaml").write_text(before)
    pairs = [*zip(models, schedulers, strict=True), *((models[0], other) for other in others)]
    entries = [SimpleNamespace(model=model, scheduler=scheduler) for model, scheduler in pairs]
    strategy = SimpleNamespace(comm=Comm(), trained=SimpleNamespace(entries=entries))
    parts = {"model": models[0], "companions": {"critic": models[1]}, "step_index": 4}
    end_schedules_with_run(SimpleNamespace(config=config, strategy=strategy, **parts), checkpoint)
    return schedulers


def lengths(schedulers: list[Any]) -> list[tuple[int, int]]:
    """Returns the length of each schedule, and that of its warm-up."""
    return [
        (item.lr_lambdas[0].keywords["total_steps"], item.lr_lambdas[0].keywords["warmup_steps"]) for item in schedulers
    ]


def test_lengths_and_warm_ups_by_hand(tmp_path: Path) -> None:
    before = "num_epochs: 1\nnum_minibatches: 19\n"
    # 40 updates are planned now. 4 steps of 19 were done, which would be 4 x 4 now: 40 + 76 - 16 = 100.
    # A warm-up of 0.57 x 100 is 57, though floats make it 56.99...; the critic's run was a branch itself.
    made = branched(tmp_path / "ratio", before=before, critic_extra=5, warmup_ratio=0.57)
    assert lengths(made) == [(100, 57), (105, 59)]
    assert [item.state_dict()["extra_updates"] for item in made] == [60, 65]
    assert [item.get_last_lr() for item in made] == [[1 / 57], [1 / 59]]
    assert lengths(branched(tmp_path / "steps", before=before, warmup_steps=7)) == [(100, 7)] * 2


@pytest.mark.parametrize("before", ["", "no options", "num_epochs: 1\nnum_minibatches: 4\n"])
def test_a_run_of_as_many_updates_keeps_its_length(tmp_path: Path, before: str) -> None:
    """So does one that begins from a copy of a checkpoint alone."""
    made = branched(tmp_path, before=before)
    assert lengths(made) == [(40, 0)] * 2
    assert not any("extra_updates" in item.state_dict() for item in made)


def test_schedules_that_count_steps_or_are_not_of_the_options_are_left_alone(tmp_path: Path) -> None:
    before = "num_epochs: 1\nnum_minibatches: 19\n"
    assert lengths(branched(tmp_path / "unit", before=before, schedule_unit="rl_step")) == [(10, 0)] * 2
    shorter = build_lr_scheduler(sgd(), LINEAR, 33)
    others = [shorter, LambdaLR(sgd(), lambda step: 0.5), StepLR(sgd(), 1), None]
    assert lengths(branched(tmp_path / "own", before=before, others=others)) == [(100, 0)] * 2
    assert lengths([shorter]) == [(33, 0)]


def test_steps_without_the_policy_have_none_of_its_updates() -> None:
    planned = {"critic.policy_frozen_steps": 2, "num_epochs": 3, "num_minibatches": 4}
    # (5 - 2) x 3 x 4 = 36, and 5 x 3 x 4 = 60 of the critic
    found = [
        _num_planned(planned, steps, is_policy=is_policy) for steps, is_policy in ((5, True), (1, True), (5, False))
    ]
    assert found == [36, 0, 60]
