"""The memory of the engine beside the trainer: awake, asleep, and while it receives new weights."""

from __future__ import annotations

from dataclasses import dataclass

from lightrl.config import RolloutConfig
from lightrl.plan.adapters import EngineAdapters
from lightrl.plan.batches import Batches, kv_bytes_of_token
from lightrl.plan.models import FLOAT, Model
from lightrl.plan.spread import strategy_name

_CHUNK = 1 << 24  # elements that a fingerprint reads at a time, as float64 and its product
_LOGITS_COPIES = 3  # with a row per sequence: logits, probabilities, running sums
_STEP = 16  # the native engine's cache grows by this many positions


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The bytes of the engine on a rank."""

    weights: float
    adapters: float  # beside the weights
    cache: float  # keys and values, while it is awake
    work: float  # logits, while it is awake
    asleep: float
    sync: float  # whole weights in transit, and the sums that prove their arrival
    cached_tokens: float  # tokens for which the cache has room


def engine_of(
    config: RolloutConfig,
    policy: Model,
    batches: Batches,
    adapters: EngineAdapters | None = None,
    *,
    ranks: int,
    memory: float,
    trainers: int | None = None,
    is_accelerator: bool = True,
) -> Engine:
    """Returns the bytes of a rank's engine.

    Args:
        ranks: Number of ranks that generate.
        memory: Bytes of the device, a share of which vllm and sglang take.
        trainers: Number of ranks that train; None: the same ones.
    """
    size = 2 if config.dtype == "bfloat16" else FLOAT
    plain = [weight for weight in policy.weights if ".lora_" not in weight.name and "value_head" not in weight.name]
    numel = sum(weight.numel for weight in plain)
    largest = max(weight.numel for weight in plain)
    per_token = kv_bytes_of_token(policy.hf_config, size)
    sync = _sync(config, numel, largest, size, trainers or ranks)
    if config.engine == "native":
        rows = min(config.native.max_num_seqs, -(-batches.sequences // ranks))
        positions = -(-batches.length // _STEP) * _STEP
        logits = _LOGITS_COPIES * FLOAT * rows * policy.hf_config.get_text_config().vocab_size
        tokens = rows * positions
        own = 0 if config.native.share_weights else size * numel  # its weights, unless it reads the trainer's
        beside = float(size * adapters.native_numel()) if adapters is not None else 0.0
        return Engine(
            weights=own, adapters=beside, cache=tokens * per_token, work=logits, asleep=own + beside, sync=sync,
            cached_tokens=tokens,
        )  # fmt: skip
    weights, beside = size * numel / config.engine_tp_size, 0.0
    if adapters is not None and config.engine == "vllm":
        beside = size * adapters.vllm_numel(config, is_accelerator=is_accelerator)
    elif adapters is not None and config.engine == "sglang":
        beside = size * adapters.sglang_numel(config)
    share = config.engine_mem_fraction * memory
    cache = max(0.0, share - weights - beside)
    asleep = share if config.engine_sleep_level == 0 else 0.0
    room = cache * config.engine_tp_size / per_token
    return Engine(
        weights=weights, adapters=beside, cache=cache, work=0, asleep=asleep, sync=sync, cached_tokens=room
    )  # fmt: skip


def _sync(config: RolloutConfig, numel: float, largest: float, size: int, ranks: int) -> float:
    """Returns the bytes that a weight sync adds: gathered tensors, a copy of one, and its fingerprint."""
    fingerprint = 16 * min(largest, _CHUNK)
    copy = 2 * size * largest if size < FLOAT else 0
    name, limit = strategy_name(config, ranks), config.sync_bucket_mb << 20
    if name == "fsdp":
        bucket = min(size * numel, max(limit / 2, size * largest))
        shards = ranks // config.fsdp.replicate_size
        return fingerprint + bucket * (1 + 1 / shards) + 2 * size * largest
    if name == "megatron":
        return fingerprint + copy + min(FLOAT * numel, max(limit / 2, FLOAT * largest))
    if name == "deepspeed" and config.deepspeed.zero_stage == 3:
        return fingerprint + copy + min(FLOAT * numel, max(limit, FLOAT * largest))
    return fingerprint + copy
