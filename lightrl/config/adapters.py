"""Whether an engine gets a policy's LoRA adapters apart from its weights: `--lora.engine`."""

from __future__ import annotations

from typing import Any

ENGINES_WITH_ADAPTERS = ("native", "vllm", "sglang")


def sends_adapters(config: Any) -> bool:
    """Returns whether the engine of a run applies adapters unmerged; ValueError if it must and cannot.

    In float32 merging loses nothing and decoding is faster. In bfloat16 it rounds most of a small update away.
    """
    if config.lora.engine == "merged" or not hasattr(config, "rollout_ranks"):
        return False
    reasons = (
        ("engine", config.engine not in ENGINES_WITH_ADAPTERS, "this engine takes whole weights alone"),
        ("exact", config.exact, "its engine has the trainer's bits with merged weights"),
        ("rollout_ranks", config.rollout_ranks > 0, "the ranks that generate take whole weights alone"),
        ("routing.replay", config.routing.replay, "the engine that records experts takes whole weights alone"),
        ("native.lookup", config.native.lookup > 0, "the engine that guesses takes whole weights alone"),
        ("rollout.keep_cache", config.rollout.keep_cache, "the engine that keeps rows takes whole weights alone"),
        ("top_p", config.is_truncated, "the engine that reports the tokens to draw from takes whole weights alone"),
    )
    refused = next(((name, reason) for name, is_refused, reason in reasons if is_refused), None)
    if config.lora.engine == "auto":
        # Not with sglang, which has no place beside some layers: only the model tells.
        return refused is None and config.dtype == "bfloat16" and config.engine != "sglang"
    if refused:
        name, reason = refused
        value = getattr(config, name, True)
        raise ValueError(
            f"--lora.engine unmerged does not go with --{name} {value}: {reason}. Leave one of them out, or use "
            f"--engine {' or '.join(ENGINES_WITH_ADAPTERS)}."
        )
    return True
