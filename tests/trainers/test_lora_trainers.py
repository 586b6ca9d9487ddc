"""Adapters in the trainers beside GRPO: what trains, what they start from, and what is exported."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import other_adapters
import pytest
import torch
from offline_program import KINDS
from torch import nn
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lightrl.config import CheckpointConfig, ExampleEvalConfig, GRPOConfig, LoraConfig, PPOConfig, parse_config
from lightrl.models.critic import load_critic
from lightrl.models.lora import adapters_of
from lightrl.testing.tiny_training import tiny_policy
from lightrl.trainers import run
from lightrl.trainers.grpo import GRPOTrainer
from lightrl.trainers.ppo import PPOTrainer

peft = pytest.importorskip("peft")

Options = Callable[[str], dict[str, Any]]
ReadMetrics = Callable[[Path], list[dict[str, Any]]]
IDS = torch.tensor([[3, 4, 5, 6]])


def trained_names(model: nn.Module) -> set[str]:
    """Without those of the adapters."""
    named = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert any(".lora_A." in name for name in named)
    return {name for name in named if ".lora_" not in name}


@pytest.mark.parametrize("kind", KINDS)
def test_training_on_answers(
    kind: str, toy: Path, offline_flags: Options, metrics_of: ReadMetrics, tmp_path: Path
) -> None:
    small: dict[str, Any] = {
        "eval": ExampleEvalConfig(every=0),
        "checkpoint": CheckpointConfig(every=0),
        "lora": LoraConfig(rank=4),
    }
    config_class, trainer_class = KINDS[kind]
    trainer = trainer_class(config_class(**offline_flags(kind), **small, output_dir=str(tmp_path / "run")))
    trainer.fit()
    assert trained_names(trainer.model) == ({"hf.score.weight"} if kind == "rm" else set())
    rows = metrics_of(tmp_path / "run")
    assert rows[-1]["loss"] < rows[0]["loss"]
    if kind == "dpo":
        assert rows[0]["loss"] == pytest.approx(math.log(2), rel=1e-6)  # the reference has no adapters, ours add 0 yet
        assert rows[-1]["margin"] > 0
    loader: Any = AutoModelForSequenceClassification if kind == "rm" else AutoModelForCausalLM
    final = tmp_path / "run" / "final"
    merged = loader.from_pretrained(final)
    base = loader.from_pretrained(toy / "model", **({"num_labels": 1, "pad_token_id": 0} if kind == "rm" else {}))
    adapted = peft.PeftModel.from_pretrained(base, str(final / "adapter"))
    assert_close(adapted(IDS).logits, merged(IDS).logits, atol=1e-5, rtol=0)


def ppo(toy_flags: list[str], folder: Path, *flags: str) -> PPOTrainer:
    flags = ("--max_steps", "2", "--critic_lr", "1e-3", "--critic.head_init_std", "0.1", *flags)
    trainer = PPOTrainer(parse_config(PPOConfig, [*toy_flags, *flags, "--output_dir", str(folder)]))
    trainer.fit()
    return trainer


def test_ppo_adapts_its_critic_too(toy: Path, toy_flags: list[str], metrics_of: ReadMetrics, tmp_path: Path) -> None:
    flags = ("--algorithm.kl_coef", "0.1")
    trainer = ppo(toy_flags, tmp_path / "run", "--lora.rank", "4", *flags)
    assert trained_names(trainer.policy) == set()
    assert isinstance(trainer.critic, nn.Module)
    assert trained_names(trainer.critic) == {"value_head.weight", "value_head.bias"}
    rows = metrics_of(tmp_path / "run")
    assert all(row["critic/grad_norm"] > 0 and row["mismatch/max_abs"] < 1e-5 for row in rows)
    final = tmp_path / "run" / "final_critic"
    merged = load_critic(str(final), materialize=True, init_std=0.0, seed=0)
    base = load_critic(str(toy / "model"), materialize=True, init_std=1.0, seed=0)
    assert_close(merged.value_head.weight, trainer.critic.value_head.weight, atol=0, rtol=0)
    adapted = peft.PeftModel.from_pretrained(base.body, str(final / "adapter"))
    for model in (adapted, merged.body):
        model.set_attn_implementation("eager")
    assert_close(adapted(IDS)[0], merged.body(IDS)[0], atol=1e-5, rtol=0)
    # From the policy's adapter; the critic, whose modules have other names, gets a new one of that rank.
    adapter = str(tmp_path / "run" / "final" / "adapter")
    again = ppo(toy_flags, tmp_path / "again", "--lora.path", adapter, "--max_steps", "1", *flags)
    assert again.critic is not None
    assert {item.down.shape[0] for item in adapters_of(again.critic).values()} == {4}
    assert metrics_of(tmp_path / "again")[0]["kl"] > 0


def test_a_head_on_the_policy_trains_whole(toy_flags: list[str], metrics_of: ReadMetrics, tmp_path: Path) -> None:
    trainer = ppo(toy_flags, tmp_path / "run", "--lora.rank", "4", "--critic.shared_backbone", "True")
    assert trained_names(trainer.policy) == {"value_head.weight", "value_head.bias"}
    assert all(row["mismatch/max_abs"] < 1e-5 for row in metrics_of(tmp_path / "run"))


def test_an_adapter_that_does_not_fit_ends_a_run_before_weights_are_loaded(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = other_adapters.save_adapter(tiny_policy().hf, tmp_path / "adapter", rank=2)
    lora = LoraConfig(rank=4, engine="unmerged", others=(f"rival={folder}",))
    config = GRPOConfig(model=str(toy / "model"), lora=lora, output_dir=str(tmp_path / "run"))
    monkeypatch.setattr(run, "load_policy", None)  # which reads the weights
    with pytest.raises(ValueError, match=rf"--lora\.others rival={folder} does not fit the model: "):
        GRPOTrainer(config)


def test_a_run_without_adapters_is_not_continued_with_them(toy_flags: list[str], tmp_path: Path) -> None:
    flags = [
        *toy_flags,
        "--max_steps",
        "1",
        "--eval.every",
        "0",
        "--log.tensorboard",
        "False",
        "--checkpoint.every",
        "1",
    ]
    lora = ["--lora.rank", "2"]
    for name, adapters in (("whole", []), ("adapters", lora)):
        GRPOTrainer(parse_config(GRPOConfig, [*flags, *adapters, "--output_dir", str(tmp_path / name)])).fit()
    for start, adapters, ranks, told in (
        ("whole", lora, (0, 2), r"holds all weights, and this run trains adapters \(--lora"),
        ("adapters", [], (2, 0), "holds adapters, and this run trains all weights"),
    ):
        branch = ["--resume", str(tmp_path / start), "--output_dir", str(tmp_path / f"from-{start}")]
        config = parse_config(GRPOConfig, [*flags, *adapters, *branch])
        with pytest.raises(
            ValueError, match="with --lora.rank {}, and this run has {}: .* Give the --lora".format(*ranks)
        ):
            GRPOTrainer(config)
        (tmp_path / start / "config.yaml").unlink()  # as in a copy of the checkpoint alone
        with pytest.raises(ValueError, match=rf"step-000001 {told}.* Give the --lora"):
            GRPOTrainer(config).fit()
