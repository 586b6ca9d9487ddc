"""Adapters of a user's, which peft makes and saves, and what peft's own model of each gives."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightrl.engines.base import Completion, SamplingParams
from lightrl.models.lora import adapters_of

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14]]
ATTENTION = ("q_proj", "v_proj")
ROWS = "model.layers.0.mlp.gate_proj.lora_B.weight"  # cut by rows, beside those of up_proj
COLUMNS = "model.layers.1.self_attn.o_proj.lora_A.weight"  # cut by columns
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_adapter(model: Any, folder: Path, *, rank: int, seed: int = 0, targets: Any = LINEAR, **settings: Any) -> str:
    """Has peft save a large random adapter of the model in a folder, which it returns."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    chosen = targets if isinstance(targets, str) else list(targets)
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(r=rank, target_modules=chosen, **settings))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.3)
    adapted.save_pretrained(folder)
    return str(folder)


def user_adapters(model: Any, folder: Path) -> dict[str, str]:
    """Saves two, of different ranks, scales and layers."""
    settings: dict[str, Any] = {"lora_alpha": 5, "use_rslora": True}
    return {
        "opponent": save_adapter(model, folder / "opponent", rank=2, seed=1, targets=ATTENTION, **settings),
        "judge": save_adapter(model, folder / "judge", rank=7, seed=2, lora_alpha=3, rank_pattern={"k_proj": 3}),
    }


def with_adapter(model: Any, folder: str | None) -> Any:
    """Returns a copy of the model with an adapter that peft reads, active; None: without any."""
    from peft import PeftModel

    own = copy.deepcopy(model).eval()
    return own if folder is None else PeftModel.from_pretrained(own, folder).eval()


@torch.no_grad()
def logprobs(model: Any, item: Completion) -> Tensor:
    """Returns those of the tokens that an engine generated, by a plain forward."""
    ids = torch.tensor([[*item.prompt_token_ids, *item.output_token_ids]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(item.prompt_token_ids) - 1 : -1]
    return logits.float().log_softmax(-1).gather(1, ids[0, len(item.prompt_token_ids) :, None])[:, 0]


def largest_difference(items: Sequence[Completion], asked: Sequence[str], models: Mapping[str, Any]) -> float:
    """Returns the largest difference of any logprob, engine against the model of the adapter that was asked for."""
    gaps = [
        (logprobs(models[name], item) - torch.tensor(item.logprobs)).abs().max()
        for item, name in zip(items, asked, strict=True)
    ]
    return float(torch.stack(gaps).max())


def mixed(names: Sequence[str], **settings: Any) -> tuple[list[list[int]], list[SamplingParams], list[str]]:
    """Returns each prompt for each adapter: the prompts, their parameters, and the adapter of each sample."""
    settings = {"max_new_tokens": 12, "ignore_eos": True, "n": 2, **settings}
    asked = [(prompt, name) for prompt in PROMPTS for name in names]
    params = [SamplingParams(adapter=name, seed=i, **settings) for i, (_, name) in enumerate(asked)]
    return [prompt for prompt, _ in asked], params, [name for _, name in asked for _ in range(settings["n"])]


def move(policy: Any, seed: int) -> None:
    """Takes the same step on every rank, wherever its shards lie."""
    with torch.no_grad():
        for i, adapter in enumerate(adapters_of(policy.hf).values()):
            up: Any = adapter.up
            shard, draw = up.to_local(), torch.Generator().manual_seed(100 * seed + i)
            shard.add_(torch.randn(shard.shape, generator=draw) * 0.05)
