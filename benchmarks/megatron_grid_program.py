"""One rank of benchmarks/megatron_grid.py: trains or reads a checkpoint, and writes it, leg after leg.

    megatron_grid_program.py FOLDER LEG...

A leg is "family name <- source: flags"; without "<- source" it starts from random weights and takes two steps. Each leg
saves a checkpoint in FOLDER/name and then takes two more steps; rank 0 writes FOLDER/name.json.
"""

from __future__ import annotations

import json
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from lightrl.config import GRPOConfig, parse_config
from lightrl.models.policy import Policy
from lightrl.models.reward_model import RewardModel
from lightrl.models.routing_replay import attach_replay
from lightrl.records import Experience, PackedBatch
from lightrl.strategy import StrategyBase, create_strategy
from lightrl.testing.tiny_training import VOCAB, adamw, loss_fn, make_batch, num_tokens, samples, trainable

STEPS = 2  # before a checkpoint, and after it
DECAY = 0.5  # of the average of the weights
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


def family_config(family: str) -> Any:
    """Returns the config of a small model of four layers."""
    experts = {"num_experts_per_tok": 2, "tie_word_embeddings": False}
    if family in ("qwen3_moe", "replayed"):
        return Qwen3MoeConfig(**_SIZES, **experts, num_experts=4, moe_intermediate_size=16, norm_topk_prob=True)
    if family in ("deepseek_v3", "deepseek_v3_groups"):
        return deepseek_config(has_groups=family.endswith("groups"))
    if family == "mixtral":
        return MixtralConfig(**_SIZES, **experts, num_local_experts=4, sliding_window=None)
    if family == "qwen2":
        return Qwen2Config(**{**_SIZES, "hidden_size": 32, "head_dim": None}, tie_word_embeddings=False)
    if family == "llama":
        return LlamaConfig(**_SIZES)
    if family == "mistral":
        return MistralConfig(**_SIZES, sliding_window=None)
    return Qwen3Config(**_SIZES, tie_word_embeddings=True)


def deepseek_config(*, has_groups: bool) -> DeepseekV3Config:
    """Returns a DeepSeek-V3 whose first layer is dense: with latent queries and groups of experts, or with neither."""
    sizes = {**_SIZES, "num_key_value_heads": 4, "head_dim": 4}
    groups = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "q_lora_rank": 12}
    plain = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "q_lora_rank": None}
    rotary = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7}
    rotary |= {"original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}
    return DeepseekV3Config(
        **sizes,
        **(groups if has_groups else plain),
        moe_intermediate_size=16,
        n_shared_experts=1 + has_groups,
        first_k_dense_replace=1,
        kv_lora_rank=10,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        rope_interleave=has_groups,
        **({"rope_parameters": rotary} if has_groups else {}),
    )


def build(family: str, seed: int) -> nn.Module:
    """Builds a model with random weights: a reward model of Qwen3, a Qwen3-MoE that replays experts, or a policy."""
    torch.manual_seed(seed)
    config = family_config(family)
    if family == "reward":
        config.num_labels, config.pad_token_id = 1, VOCAB - 1
        return RewardModel(AutoModelForSequenceClassification.from_config(config))
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.02)  # transformers starts them at 0
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.1)
    policy = Policy(model)
    if family == "replayed":
        attach_replay(policy, keeps_logits=False)
    return policy


def with_experts(experience: Experience) -> Experience:
    """Gives a sample random experts, two in each of four layers; its last token has none, as from an engine."""
    draw = torch.Generator().manual_seed(experience.sample.position)
    experts = torch.rand(experience.num_tokens - 1, 4, 4, generator=draw).argsort(-1)[..., :2]
    return replace(experience, sample=replace(experience.sample, routing=experts.to(torch.int16).numpy()))


def squares(scores: Tensor, batch: PackedBatch) -> Tensor:
    """The loss of a reward model: the mean square of scores that differ from 0, 1, 2."""
    return (scores - torch.tensor([float(key[0] % 3) for key in batch.keys]).to(scores)).square().mean()


def train(strategy: StrategyBase, model: nn.Module, family: str, step: int) -> tuple[float, ...]:
    """Takes one step on this rank's samples; returns the loss and the norm, and what was counted of the replay."""
    drawn = [with_experts(item) if family == "replayed" else item for item in samples(step)]
    mine = drawn[strategy.comm.rank :: strategy.comm.world]
    batches = [make_batch(mine[start : start + 2]) for start in range(0, len(mine), 2)] or [make_batch([])]
    rewards = isinstance(model, RewardModel)
    counts = [0, 0, 0]

    def counted_loss(scores: Any, batch: PackedBatch) -> Tensor:
        if scores.routing is not None and num_tokens(batch):
            found = scores.routing
            for index, count in enumerate((found.num_routed, found.num_tokens_differ, found.num_choices_differ)):
                counts[index] += count
        return loss_fn(scores, batch)

    result = strategy.train_batch(
        [batch.to(strategy.device) for batch in batches],
        squares if rewards else counted_loss,
        (lambda batch: len(batch.keys) if num_tokens(batch) else 0.0) if rewards else num_tokens,
        model=model,
    )
    return result.loss, result.grad_norm, *(strategy.comm.all_reduce(float(count), "sum") for count in counts)


def whole(strategy: StrategyBase, model: nn.Module) -> dict[str, Tensor]:
    """Returns copies of all weights."""
    return {name: tensor.detach().cpu().clone() for name, tensor in strategy.full_parameters(model)}


def run_leg(folder: Path, leg: str) -> None:
    """Runs one leg to its report."""
    head, _, flags = leg.partition(": ")
    family, name, *arrow = head.split()
    source = arrow[-1] if arrow else ""
    strategy = create_strategy(parse_config(GRPOConfig, flags.split()))
    strategy.setup_distributed()
    strategy.max_norm = 1.0
    model = strategy.prepare_model(build(family, 7 if source else 0))
    strategy.register(model, adamw(trainable(model)))
    strategy.keep_average(model, DECAY)
    report: dict[str, Any] = {}
    if source:
        strategy.load_ckpt(model, str(folder / source))
    else:
        average = whole(strategy, model)
        for step in range(STEPS):
            train(strategy, model, family, step)
            weights = whole(strategy, model)
            average = {key: DECAY * average[key] + (1 - DECAY) * value for key, value in weights.items()}
        with strategy.averaged_weights(model):
            found = whole(strategy, model)
        report["average"] = max(float((found[key] - value).abs().max()) for key, value in average.items())
        strategy.set_global_step(STEPS)
    strategy.save_ckpt(model, str(folder / name), max_mem=0)
    report["next"] = [train(strategy, model, family, strategy.global_step + step) for step in range(STEPS)]
    if strategy.comm.is_main:
        (folder / f"{name}.json").write_text(json.dumps(report))
    strategy.comm.barrier()


def main() -> None:
    folder, *legs = sys.argv[1:]
    for leg in legs:
        run_leg(Path(folder), leg)


if __name__ == "__main__":
    try:
        main()
    except Exception:
        sys.stderr.write(f"{traceback.format_exc()}\n")
        sys.stderr.flush()
        raise SystemExit(1) from None
