"""A run with --share_prompts learns what the run without it learns, however it is spread and packed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from lightrl.builtin.model import tiny_model
from lightrl.config import AlgorithmConfig, EvalConfig, GRPOConfig, LoraConfig, OptimConfig, PPOConfig, RunConfig
from lightrl.config.strategy import CheckpointConfig
from lightrl.sharing.run import sharing
from lightrl.testing import run_spmd
from lightrl.trainers.fit import build_trainer
from lightrl.trainers.grpo import GRPOTrainer
from lightrl.trainers.ppo import PPOTrainer

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_grpo.py"
COMPARED = ("loss", "grad_norm", "entropy", "kl", "ratio/mean", "critic/loss", "critic/grad_norm")
EPS = 1e-4  # at Adam's own 1e-8 the rounding errors of gradients near 0 become whole steps
# Half a step of GRPO with a reference, cut in every way; the first is what the others are compared with.
GRPO: dict[str, dict[str, Any]] = {
    "whole": {"share_prompts": False},
    "by itself": {},
    "by itself, three samples at a time": {"micro_batch_size": 3},
    "shared": {"share_prompts": True},
    "three samples at a time": {"share_prompts": True, "micro_batch_size": 3},
    "few tokens at a time": {"share_prompts": True, "max_tokens_per_microbatch": 48},
}
REWARD = '''
def odd_digits(sample):
    """Learnable by a random model: the share of odd digits."""
    return sum(character in "13579" for character in sample.text) / 8
'''


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random model, three prompts and a reward."""
    folder = tmp_path_factory.mktemp("toy")
    for part in tiny_model():
        part.save_pretrained(folder / "model")
    prompts = ["1+2+3+4+5+6+7+8=", "12+34+56+78+90=", "5+5+5+5+5+5+5+5+5="]
    (folder / "train.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    (folder / "reward.py").write_text(REWARD)
    return folder


def options(toy: Path, folder: Path) -> dict[str, Any]:
    return {
        "model": str(toy / "model"),
        "train_data": str(toy / "train.jsonl"),
        "reward": (f"{toy / 'reward.py'}:odd_digits",),
        "output_dir": str(folder),
        "strategy": "single",
        "num_prompts": 2,
        "group_size": 6,
        "num_minibatches": 2,
        "lr": 1e-3,
        "optim": OptimConfig(eps=EPS),
        "checkpoint": CheckpointConfig(every=0),
        "eval": EvalConfig(every=0),
    }


def stepped(trainer_class: Any, config: RunConfig) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Takes a step; returns its metrics and what it made of the weights."""
    trainer: Any = build_trainer(trainer_class, config)
    metrics = trainer.step().metrics
    models = {"policy": trainer.policy, "critic": getattr(trainer, "critic", None)}
    weights = {
        f"{kind}.{name}": value.detach().clone()
        for kind, model in models.items()
        if model is not None
        for name, value in model.named_parameters()
    }
    trainer.close()
    return metrics, weights


def assert_alike(trainer_class: Any, config_class: Any, toy: Path, folder: Path, ways: dict[str, Any]) -> None:
    given = options(toy, folder)
    runs = {
        name: stepped(trainer_class, config_class(**{**given, "output_dir": str(folder / str(index)), **way}))
        for index, (name, way) in enumerate(ways.items())
    }
    whole_metrics, whole = runs.pop("whole")
    assert "tokens/computed_share" not in whole_metrics
    assert len(whole_metrics.keys() & set(COMPARED)) > 3
    for name, (metrics, weights) in runs.items():
        assert metrics["tokens/computed_share"] < 0.9, name
        for metric in whole_metrics.keys() & set(COMPARED):
            assert metrics[metric] == pytest.approx(whole_metrics[metric], abs=2e-6, rel=2e-6), (name, metric)
        for parameter, value in whole.items():
            assert_close(weights[parameter], value, atol=2e-6, rtol=0, msg=f"{name}: {parameter}")


def test_grpo_with_a_reference_learns_the_same_in_any_micro_batches(toy: Path, tmp_path: Path) -> None:
    ways = {name: way | {"algorithm": AlgorithmConfig(kl_coef=0.1)} for name, way in GRPO.items()}
    assert_alike(GRPOTrainer, GRPOConfig, toy, tmp_path, ways)


def test_adapters_and_their_reference_learn_the_same(toy: Path, tmp_path: Path) -> None:
    adapters = {"lora": LoraConfig(rank=2), "algorithm": AlgorithmConfig(kl_coef=0.1)}
    assert_alike(
        GRPOTrainer,
        GRPOConfig,
        toy,
        tmp_path,
        {name: GRPO[name] | adapters for name in ("whole", "by itself", "shared")},
    )


def test_ppo_with_a_critic_learns_the_same(toy: Path, tmp_path: Path) -> None:
    assert_alike(
        PPOTrainer,
        PPOConfig,
        toy,
        tmp_path,
        {name: GRPO[name] for name in ("whole", "by itself", "few tokens at a time")},
    )


@pytest.mark.parametrize(
    "sharing_flags", [("--share_prompts", "True", "--micro_batch_size", "3"), ()], ids=["asked for", "by itself"]
)
def test_ranks_that_split_a_group_learn_the_same(toy: Path, tmp_path: Path, sharing_flags: tuple[str, ...]) -> None:
    """There is one prompt for two ranks, so that its group is split."""
    given = options(toy, tmp_path / "whole") | {"num_prompts": 1, "num_minibatches": 1, "share_prompts": False}
    whole, _ = stepped(GRPOTrainer, GRPOConfig(**given, algorithm=AlgorithmConfig(kl_coef=0.1)))
    folder = tmp_path / "shared"
    flags = [
        *("--model", str(toy / "model"), "--train_data", str(toy / "train.jsonl"), "--lr", "1e-3"),
        *("--reward", f"{toy / 'reward.py'}:odd_digits", "--num_prompts", "1", "--group_size", "6"),
        *("--algorithm.kl_coef", "0.1", "--optim.eps", str(EPS), "--max_steps", "1", "--checkpoint.every", "0"),
        *(*sharing_flags, "--eval.every", "0", "--output_dir", str(folder)),
    ]
    output = run_spmd(SCRIPT, *flags, world_size=2, timeout_s=240)
    assert ("common prefixes are computed once" in output) == (not sharing_flags)
    (shared,) = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert shared["tokens/computed_share"] < 0.9
    assert shared["balance/max_over_mean"] < 1.3
    for metric in ("loss", "grad_norm", "entropy", "kl"):
        assert shared[metric] == pytest.approx(whole[metric], abs=2e-6, rel=2e-6), metric


def test_only_classes_of_trainers_can_share() -> None:
    with pytest.raises(TypeError, match="needs a subclass"):
        sharing(lambda config: None)  # type: ignore[arg-type, return-value]


def test_a_trainer_by_itself_takes_no_part(toy: Path, tmp_path: Path) -> None:
    config = GRPOConfig(**options(toy, tmp_path / "run"), share_prompts=True)
    with pytest.raises(ValueError, match=r"takes no part in --exact, in --share_prompts"):
        GRPOTrainer(config)


@pytest.mark.parametrize("make", ["by itself", "by a function"])
def test_only_a_class_that_build_trainer_makes_shares_by_itself(make: str, toy: Path, tmp_path: Path) -> None:
    config = GRPOConfig(**options(toy, tmp_path / "run"))
    trainer = GRPOTrainer(config) if make == "by itself" else build_trainer(lambda config: GRPOTrainer(config), config)
    assert "tokens/computed_share" not in trainer.step().metrics
    trainer.close()
