"""Rollouts that are recorded, and trainings from a record."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrl.config import AlgorithmConfig, EvalConfig, GRPOConfig, PPOConfig, WorkflowConfig
from lightrl.testing import run_spmd
from lightrl.trainers.fit import Trainer
from lightrl.trainers.grpo import GRPOTrainer
from lightrl.trainers.ppo import PPOTrainer
from lightrl.trainers.recorded import recorded

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_grpo.py"
COMPARED = ("reward/mean", "loss", "grad_norm", "entropy", "ratio/mean", "ratio/max")
Kept = Callable[..., Any]


@pytest.fixture
def train(toy_options: dict[str, Any], tmp_path: Path) -> Kept:
    """From options to the metrics of three steps and the weights after them."""

    def run(name: str, kind: Any = GRPOConfig, **options: Any) -> Any:
        config = kind(
            **toy_options,
            num_prompts=4,
            num_minibatches=2,
            max_steps=3,
            lr=1e-2,
            eval=EvalConfig(every=0),
            output_dir=str(tmp_path / name),
            **options,
        )
        trainer: Any = recorded(PPOTrainer if kind is PPOConfig else GRPOTrainer)(config)
        trainer.fit()
        weights = {name: value.clone() for name, value in trainer.policy.state_dict().items()}
        trainer.close()
        return [{name: row[name] for name in COMPARED if name in row} for row in trainer.folder.metrics()], weights

    return run


@pytest.mark.parametrize("kind", [GRPOConfig, PPOConfig])
def test_a_training_from_a_record_is_the_live_one_to_the_last_bit(kind: Any, train: Kept, tmp_path: Path) -> None:
    record = str(tmp_path / "record")
    live, weights = train("live", kind, rollout=WorkflowConfig(record=record))
    again, same = train("again", kind, rollout=WorkflowConfig(from_=record))
    assert again == live
    assert len({row["loss"] for row in live}) == 3
    assert all(torch.equal(value, same[name]) for name, value in weights.items())


@pytest.mark.slow
def test_other_ranks_learn_the_same_without_an_engine(
    train: Kept, toy: Path, tmp_path: Path, metrics_of: Callable[[Path], list[dict[str, Any]]]
) -> None:
    record = str(tmp_path / "record")
    live, _ = train("live", rollout=WorkflowConfig(record=record))
    flags = [
        *("--model", str(toy / "model"), "--train_data", str(toy / "train.jsonl"), "--num_prompts", "4"),
        *("--reward", f"{toy / 'reward.py'}:odd_digits", "--group_size", "3", "--num_minibatches", "2", "--lr", "1e-2"),
        *("--max_steps", "3", "--rollout.from", record, "--checkpoint.every", "0", "--output_dir"),
    ]
    run_spmd(SCRIPT, *flags, str(tmp_path / "two"), world_size=2, timeout_s=240)
    for row, wanted in zip(metrics_of(tmp_path / "two"), live, strict=True):
        assert {name: row[name] for name in COMPARED} == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def test_a_record_without_training_is_learned_from_as_what_it_is(train: Kept, tmp_path: Path) -> None:
    """All steps were sampled by the first weights, so that the later ones are older than what learns from them."""
    record = str(tmp_path / "record")
    rows, weights = train("only", rollout=WorkflowConfig(record=record, record_only=True))
    assert all("loss" not in row and not math.isnan(row["reward/mean"]) for row in rows)
    decoupled = AlgorithmConfig(proximal="recompute")
    learned, after = train("from", rollout=WorkflowConfig(from_=record), algorithm=decoupled)
    assert any(not torch.equal(value, after[name]) for name, value in weights.items())
    assert [row["reward/mean"] for row in learned] == [row["reward/mean"] for row in rows]
    metrics = [json.loads(line) for line in (tmp_path / "from" / "metrics.jsonl").read_text().splitlines()]
    assert metrics[0]["correction/ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics[2]["correction/ratio_max"] > 1.01


def test_what_cannot_be_replayed_is_told_before_anything_is_loaded(toy: Path, tmp_path: Path) -> None:
    config = GRPOConfig(rollout=WorkflowConfig(from_=str(tmp_path)))
    with pytest.raises(ValueError, match="holds no record"):
        recorded(GRPOTrainer)(config)
    (tmp_path / "step-000001").mkdir()
    with pytest.raises(ValueError, match="holds 1 step, and --max_steps is 200: give at most 1"):
        recorded(GRPOTrainer)(config)
    with pytest.raises(ValueError, match="need a trainer that has learn_from"):
        recorded(Trainer)(config)
