"""A reference that follows the policy: exact, resumed to the last bit, and absent from any other run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightrl.config import (
    AlgorithmConfig,
    CheckpointConfig,
    CriticConfig,
    DPOConfig,
    ExampleEvalConfig,
    GRPOConfig,
    PPOAlgorithmConfig,
    PPOConfig,
)
from lightrl.config.reference_section import ReferenceConfig
from lightrl.models.policy import load_policy
from lightrl.trainers.dpo import DPOTrainer
from lightrl.trainers.fit import Trainer
from lightrl.trainers.grpo import GRPOTrainer
from lightrl.trainers.ppo import PPOTrainer

Rows = list[dict[str, Any]]
ReadMetrics = Callable[[Path], Rows]
Fit = Callable[..., Trainer]
NUMBERS = ("step", "loss", "grad_norm", "kl", "margin", "critic/loss")


@pytest.fixture
def fit(
    toy_options: dict[str, Any], offline_flags: Callable[[str], dict[str, Any]], tmp_path: Path
) -> Callable[..., Trainer]:
    """Runs a trainer to a step; a second call with the same folder continues the run."""

    def grpo(options: dict[str, Any]) -> Trainer:
        return GRPOTrainer(GRPOConfig(**toy_options, num_prompts=2, algorithm=AlgorithmConfig(kl_coef=0.1), **options))

    def ppo(options: dict[str, Any]) -> Trainer:
        algorithm = PPOAlgorithmConfig(kl_coef=0.1, kl_in_reward="k1")
        critic = CriticConfig(shared_backbone=True, value_coef=0.1)
        return PPOTrainer(PPOConfig(**toy_options, num_prompts=2, algorithm=algorithm, critic=critic, **options))

    def dpo(options: dict[str, Any]) -> Trainer:
        data = {name: offline_flags("dpo")[name] for name in ("model", "train_data", "batch_size")}
        return DPOTrainer(DPOConfig(**data, eval=ExampleEvalConfig(every=0), **options))

    def run(kind: str, folder: str, steps: int, reference: ReferenceConfig, **others: Any) -> Trainer:
        options = {"max_steps": steps, "lr": 1e-2, "reference": reference, "checkpoint": CheckpointConfig(every=1)}
        trainer = {"grpo": grpo, "ppo": ppo, "dpo": dpo}[kind](
            {**options, "output_dir": str(tmp_path / folder), **others}
        )
        trainer.fit()
        return trainer

    return run


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def numbers(rows: Rows) -> Rows:
    return [{name: row[name] for name in NUMBERS if name in row} for row in rows]


def test_the_kl_is_0_after_a_copy(
    fit: Fit, metrics_of: ReadMetrics, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit("grpo", "run", 5, ReferenceConfig(sync_every=2))
    rows = metrics_of(tmp_path / "run")
    assert [row["kl"] == 0 for row in rows if "kl" in row] == [True, False, True, False, True]
    assert [row["step"] for row in rows if "time/reference_sync" in row] == [2, 4]
    assert capsys.readouterr().out.count("the reference is now a copy of the policy") == 2


def test_a_mixture_by_hand(fit: Fit, toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One step: 0.25 x policy + 0.75 x the model that the run starts from."""
    trainer: Any = fit("dpo", "run", 1, ReferenceConfig(sync_every=1, mixup=0.25))
    start = weights(load_policy(str(toy / "model"), materialize=True))
    policy, reference = weights(trainer.model), weights(trainer.reference)
    assert any(not torch.equal(policy[name], value) for name, value in start.items())
    for name, value in reference.items():
        torch.testing.assert_close(value, 0.25 * policy[name] + 0.75 * start[name], atol=1e-6, rtol=0)
    assert "copy of the policy" not in capsys.readouterr().out
    assert not trainer.reference.training
    assert not any(parameter.requires_grad for parameter in trainer.reference.parameters())


@pytest.mark.parametrize("kind", ["grpo", "ppo", "dpo"])
def test_a_resumed_run_is_the_same_to_the_last_bit(
    kind: str, fit: Fit, metrics_of: ReadMetrics, tmp_path: Path
) -> None:
    """It stops after step 3, when the reference is neither the policy nor the model that the run began with."""
    mixed = ReferenceConfig(sync_every=2, mixup=0.5)
    whole: Any = fit(kind, "whole", 5, mixed)
    fit(kind, "parts", 3, mixed)
    parts: Any = fit(kind, "parts", 5, mixed)
    found, wanted = numbers(metrics_of(tmp_path / "parts")), numbers(metrics_of(tmp_path / "whole"))
    assert found == wanted
    assert len({row["grad_norm"] for row in wanted if "grad_norm" in row}) == 5
    for name, value in weights(whole.reference).items():
        assert torch.equal(value, weights(parts.reference)[name]), name
    fit(kind, "still", 5, ReferenceConfig())
    assert numbers(metrics_of(tmp_path / "still")) != wanted


def test_another_run_has_none_of_it(fit: Fit, tmp_path: Path) -> None:
    trainer: Any = fit("grpo", "run", 1, ReferenceConfig())
    assert trainer.reference is not None
    assert (trainer.observers, trainer.companions) == ([], {})
    assert not (tmp_path / "run" / "checkpoints" / "step-000001" / "reference").exists()


# ---- Runs that branch off --------------------------------------------------------------------------------------------


def test_a_run_that_had_a_fixed_reference_goes_on_with_syncs(
    fit: Fit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fixed: Any = fit("dpo", "fixed", 2, ReferenceConfig())
    branch: Any = fit("dpo", "branch", 3, ReferenceConfig(sync_every=4), resume=str(tmp_path / "fixed"))
    assert "step-000002 holds no reference: it starts as --model " in capsys.readouterr().out
    for name, value in weights(branch.reference).items():
        assert torch.equal(value, weights(fixed.reference)[name])
    fit("dpo", "branch", 4, ReferenceConfig(sync_every=4), resume=str(tmp_path / "fixed"))
    assert "holds no reference" not in capsys.readouterr().out  # it continues from its own checkpoint, which has one


def test_a_run_without_syncs_keeps_the_reference_that_it_finds(
    fit: Fit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    synced: Any = fit("dpo", "synced", 2, ReferenceConfig(sync_every=2))
    settings: dict[str, Any] = {"reference": ReferenceConfig(), "resume": str(tmp_path / "synced")}
    fit("dpo", "branch", 3, **settings)
    assert "The reference stays that of " in capsys.readouterr().out
    branch: Any = fit("dpo", "branch", 4, **settings)  # from its own checkpoint
    for name, value in weights(branch.reference).items():
        assert torch.equal(value, weights(synced.model)[name])
    assert any(not torch.equal(value, weights(branch.model)[name]) for name, value in weights(synced.model).items())
