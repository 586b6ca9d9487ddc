"""The options that `--native.share_weights` does not go with; adapters.py has those of LoRA."""

from __future__ import annotations

from typing import Any

_SHARDS = ("fsdp", "deepspeed", "megatron")  # a strategy of your own is asked when it has prepared its model


def check_share_weights(config: Any) -> None:
    """Raises ValueError for an option with which trainer and engine do not have the same weights in one memory."""
    lora = getattr(config, "lora", None)
    rollout = getattr(config, "rollout", None)
    reasons = (
        (f"engine {config.engine}", config.engine != "native", "only the native engine reads the trainer's weights"),
        (f"strategy {config.strategy}", config.strategy in _SHARDS, "its ranks hold shards of the weights"),
        (f"dtype {config.dtype}", config.dtype != "float32", "the engine's weights are rounded to it"),
        (f"engine_sleep_level {config.engine_sleep_level}", config.engine_sleep_level == 2, "it drops the weights"),
        ("offload_while_generating", config.offload_while_generating, "it moves the weights away from the engine"),
        ("lora", lora is not None and lora.is_on, "the engine's weights have the adapters merged into them"),
        ("native.lookup", config.native.lookup > 0, "the engine that guesses keeps weights of its own"),
        ("exact", config.exact, "its engine keeps weights of its own"),
        ("routing.replay", config.routing.replay, "the engine that records experts keeps weights of its own"),
        ("rollout_ranks", getattr(config, "rollout_ranks", 0) > 0, "the ranks that generate have no trainer"),
        ("rollout.keep_cache", getattr(rollout, "keep_cache", False), "that engine keeps weights of its own"),
        ("top_p and --top_k", getattr(config, "is_truncated", False), "that engine keeps weights of its own"),
    )
    for name, is_refused, reason in reasons:
        if is_refused:
            raise ValueError(f"--native.share_weights does not go with --{name}: {reason}. Leave one of them out.")
