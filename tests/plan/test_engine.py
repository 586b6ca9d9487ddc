"""The engine on paper."""

from typing import Any

from lightrl.config import GRPOConfig
from lightrl.plan.batches import batches_of
from lightrl.plan.engine import engine_of
from lightrl.plan.models import policy_of


def test_native_and_vllm(small_config: Any) -> None:
    config = GRPOConfig(num_prompts=2, group_size=4, max_new_tokens=24, engine="native")
    model = policy_of(small_config, config)
    numel = sum(weight.numel for weight in model.weights)
    batches = batches_of(config, ranks=1, prompt_tokens=6, response_tokens=0)
    native = engine_of(config, model, batches, ranks=1, memory=1e9)
    per_token = 2 * 3 * 2 * 8 * 4
    assert (native.weights, native.cache) == (4 * numel, 8 * 32 * per_token)  # 30 positions in steps of 16
    assert native.work == 3 * 4 * 8 * 64
    config.native.share_weights = True
    lent = engine_of(config, model, batches, ranks=1, memory=1e9)
    assert (lent.weights, lent.asleep, lent.cache) == (0, 0, native.cache)
    config.engine, config.engine_mem_fraction = "vllm", 0.5
    vllm = engine_of(config, model, batches, ranks=1, memory=1e6)
    assert (vllm.weights + vllm.cache, vllm.work, vllm.asleep) == (5e5, 0, 0)
    assert vllm.cached_tokens == (5e5 - 4 * numel) / per_token
    assert vllm.sync == 16 * 64 * 32  # two float64 of each element of the largest weight
    config.engine_mem_fraction = 0.01
    assert engine_of(config, model, batches, ranks=1, memory=1e6).cache == 0  # the weights alone have more
    sharded, replicated = (
        engine_of(config, model, batches, ranks=ranks, memory=1e6).sync
        for ranks, config.strategy, config.fsdp.replicate_size in ((2, "fsdp", 1), (4, "fsdp", 2))
    )
    assert sharded == replicated > vllm.sync  # a bucket and a rank's share of it, which is one half
