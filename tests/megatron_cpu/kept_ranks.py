"""What a layer keeps for its backward on a rank of Megatron is what `lightrl plan` says, to the byte.

kept_ranks.py dense|experts FLAG...
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from lightrl.config import GRPOConfig, parse_config
from lightrl.models.policy import Policy
from lightrl.plan.activations import PackShape, paper_batch
from lightrl.plan.meter import StorageMeter
from lightrl.plan.models import policy_of
from lightrl.plan.stages import _of_stage
from lightrl.strategy import create_strategy
from lightrl.strategy.megatron.placing import placed_of

PACK = PackShape(num_sequences=6, length=16, num_scored=12)  # 16 and 96 need no padding in any layout
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def config_with(family: str, num_layers: int) -> Any:
    if family == "dense":
        return Qwen3Config(**SIZES, num_hidden_layers=num_layers)
    return Qwen3MoeConfig(**SIZES, **EXPERTS, num_hidden_layers=num_layers, norm_topk_prob=True)


def kept(strategy: Any, family: str, num_layers: int) -> int:
    """Returns the bytes that wait for the backward of a model of so many layers."""
    torch.manual_seed(0)
    policy = strategy.prepare_model(Policy(AutoModelForCausalLM.from_config(config_with(family, num_layers))))
    (stage,) = placed_of(policy).stages
    batch = paper_batch(PACK)
    if family == "experts":  # tokens that are alike all go to the same experts, so that a tie decides
        draw = torch.Generator().manual_seed(strategy.comm.rank)
        batch.input_ids.copy_(torch.randint(SIZES["vocab_size"], batch.input_ids.shape, generator=draw))
    batch.position_ids.copy_(torch.arange(PACK.length).repeat(PACK.num_sequences))
    meter = StorageMeter([*stage.parameters(), *stage.buffers()])
    with meter:
        states = stage(batch, stage.pack(batch))
        time.sleep(0.5)  # gloo's own thread lets go of what it sent a little later
        live = meter.live
    assert states.requires_grad
    return live


def main() -> None:
    family, *flags = sys.argv[1:]
    config = parse_config(GRPOConfig, flags)
    strategy = create_strategy(config)
    strategy.setup_distributed()
    one, two = (kept(strategy, family, num_layers) for num_layers in (1, 2))
    model = policy_of(config_with(family, 2), config)
    planned = _of_stage(model, PACK, config, 0, trains=True, on_accelerator=False).layer
    # A router sends each rank another number of tokens, and keeps a few small tables.
    allowed = 0 if family == "dense" else 0.1 * planned
    everywhere = strategy.comm.all_gather_object(two - one)
    mean = sum(everywhere) / len(everywhere)
    assert abs(mean - planned) <= allowed, (planned, everywhere)
    strategy.close()


if __name__ == "__main__":
    main()
