"""Runs on mixtures of experts: replay makes trainer and engine agree, and the losses do not depend on the spread."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_moe import CONFIGS

from lightrl.comm import Comm
from lightrl.config import AlgorithmConfig, CheckpointConfig, CriticConfig, GRPOConfig, PPOConfig, RoutingConfig
from lightrl.data.packing import dummy_batch
from lightrl.metrics import Statistics
from lightrl.records import RoutingScores, TokenScores
from lightrl.testing import run_program, run_spmd
from lightrl.trainers.grpo import GRPOTrainer
from lightrl.trainers.objective import PolicyLoss
from lightrl.trainers.ppo import PPOTrainer

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_grpo.py"
ReadMetrics = Callable[[Path], list[dict[str, Any]]]


def save_moe(name: str, toy: Path, folder: Path) -> str:
    """A folder with a random mixture of experts that has the toy's tokenizer."""
    config = CONFIGS[name]()
    small = json.loads((toy / "model" / "config.json").read_text())
    for token in ("vocab_size", "pad_token_id", "eos_token_id", "bos_token_id"):
        setattr(config, token, small[token])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    shutil.copytree(toy / "model", folder)
    model.save_pretrained(folder)
    return str(folder)


def options(model: str, toy: Path, folder: Path) -> dict[str, Any]:
    return {
        "model": model,
        "train_data": str(toy / "train.jsonl"),
        "reward": (f"{toy / 'reward.py'}:odd_digits",),
        "num_prompts": 4,
        "group_size": 4,
        "max_new_tokens": 8,
        "canary_every": 0,  # it would see that the engine's routers are not the trainer's
        "output_dir": str(folder),
        "checkpoint": CheckpointConfig(every=0),
    }


def disturb(trainer: GRPOTrainer | PPOTrainer) -> None:
    """Gives the engine's routers other favourites, without any change to how chosen experts are weighed."""
    assert trainer.strategy.engine is not None
    model: Any = trainer.strategy.engine.engine.model  # type: ignore[attr-defined]
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert biases
    for index, bias in enumerate(biases):
        bias.copy_(torch.randn(len(bias), generator=torch.Generator().manual_seed(index)))


def test_replay_makes_the_trainer_agree_with_an_engine_of_other_choices(toy: Path, tmp_path: Path) -> None:
    model = save_moe("deepseek_v3", toy, tmp_path / "model")
    metrics = {}
    for replay in (False, True):
        trainer = GRPOTrainer(
            GRPOConfig(**options(model, toy, tmp_path / f"run-{replay}"), routing=RoutingConfig(replay=replay))
        )
        disturb(trainer)
        metrics[replay] = trainer.step().metrics
        samples = trainer.collector.sample([(0, trainer.prompts.train[0])], step=1, group_size=2, temperature=1.0)
        assert all((sample.routing is not None) == replay for sample in samples)
        trainer.close()
    assert metrics[True]["mismatch/max_abs"] < 1e-5 < 0.05 < metrics[False]["mismatch/max_abs"]
    assert 0.2 < metrics[True]["routing/choices_differ"] <= metrics[True]["routing/tokens_differ"] <= 1
    assert "routing/tokens_differ" not in metrics[False]


def test_ppo_with_one_body_replays_too(toy: Path, tmp_path: Path) -> None:
    config = PPOConfig(
        **options(save_moe("deepseek_v3", toy, tmp_path / "model"), toy, tmp_path / "run"),
        critic=CriticConfig(shared_backbone=True),
        routing=RoutingConfig(replay=True, z_coef=1e-3),
    )
    trainer = PPOTrainer(config)
    disturb(trainer)
    metrics = trainer.step().metrics
    trainer.close()
    assert metrics["mismatch/max_abs"] < 1e-5
    assert metrics["routing/tokens_differ"] > 0.2
    assert metrics["routing/z_loss"] > 0


def test_metrics_of_routers_are_means_over_the_trained_tokens_of_all_micro_batches() -> None:
    objective = PolicyLoss(AlgorithmConfig(), routing=RoutingConfig(replay=True, balance_coef=0.1, z_coef=0.1))
    statistics = Statistics()
    # All choices fall on the first of two experts, with probabilities of 3/4 and 1/2: losses of 2 x 3/4 and 2 x 1/2.
    # The squares of the logarithms of 3 + 1 and of 1 + 1 are 1.921812 and 0.480453.
    for mask, logit, num_routed, num_differ in (([True, True, False], math.log(3.0), 3, 0), ([True, False], 0.0, 1, 1)):
        count = len(mask)
        batch = replace(
            dummy_batch(temperature=1.0),
            cu_seqlens=(0, count),
            loss_mask=torch.tensor(mask),
            sequence_index=torch.zeros(count, dtype=torch.int64),
            advantages=torch.zeros(count),
            old_logprobs=torch.zeros(count),
        )
        routing = RoutingScores(
            logits=(torch.tensor([[logit, 0.0]] * count),) * 2,
            experts=(torch.zeros(count, 1, dtype=torch.int64),) * 2,
            is_sigmoid=False,
            num_layers=2,
            num_routed=num_routed,
            num_tokens_differ=num_differ,
            num_choices_differ=num_differ,
        )
        scores = TokenScores(logprobs=torch.zeros(count), entropy=torch.zeros(count), routing=routing)
        objective.loss(scores, batch, statistics)
    found = statistics.reduce(Comm())
    assert found["routing/balance_loss"] == pytest.approx((1.5 + 1.5 + 1.0) / 3, abs=1e-6)
    assert found["routing/z_loss"] == pytest.approx((2 * 1.921812 + 0.480453) / 3, abs=1e-6)
    assert (found["routing/tokens_differ"], found["routing/choices_differ"]) == (1 / 4, 1 / 8)


@pytest.mark.slow
def test_losses_and_replay_do_not_depend_on_how_a_run_is_spread(
    toy: Path, tmp_path: Path, metrics_of: ReadMetrics
) -> None:
    model = save_moe("qwen3_moe", toy, tmp_path / "model")
    flags = [
        *("--model", model, "--train_data", str(toy / "train.jsonl"), "--reward", f"{toy / 'reward.py'}:odd_digits"),
        *("--num_prompts", "4", "--group_size", "4", "--max_steps", "2", "--lr", "1e-2", "--max_new_tokens", "8"),
        *("--num_minibatches", "2", "--checkpoint.every", "0", "--dynamic_sampling.enabled", "True"),
        *("--routing.replay", "True", "--routing.balance_coef", "0.05", "--routing.z_coef", "0.01"),
    ]
    one, two = tmp_path / "one", tmp_path / "two"
    run_program([sys.executable, str(SCRIPT), *flags, "--output_dir", str(one)], timeout_s=200)
    spread = ("--strategy", "fsdp", "--micro_batch_size", "3", "--gradient_checkpointing", "True")
    run_spmd(SCRIPT, *flags, *spread, "--output_dir", str(two), world_size=2, timeout_s=250)
    for ours, theirs in zip(metrics_of(one), metrics_of(two), strict=True):
        assert ours["mismatch/max_abs"] < 1e-5
        assert ours["routing/choices_differ"] > 0  # after the first update the trainer's routers have moved
        names = ("loss", "grad_norm", "routing/balance_loss", "routing/z_loss", "routing/choices_differ")
        for name in names:
            assert math.isclose(ours[name], theirs[name], rel_tol=1e-4), (name, ours[name], theirs[name])
    assert "routing" not in json.loads((one / "samples.jsonl").read_text().splitlines()[0])


def test_what_does_not_go_with_the_routers_is_refused() -> None:
    on = RoutingConfig(replay=True)
    with pytest.raises(ValueError, match="does not get from SGLang"):
        GRPOConfig(engine="sglang", routing=on)
    with pytest.raises(ValueError, match="--compile does not go with"):
        GRPOConfig(compile=True, routing=on)
    with pytest.raises(ValueError, match="--sp_size 2"):
        GRPOConfig(sp_size=2, strategy="fsdp", routing=replace(on, z_coef=0.1))
