"""The adapters that an engine applies: whether it gets the policy's apart from its weights, and those of the user."""

from __future__ import annotations

import re
from typing import Any

POLICY, BASE = "policy", "base"  # what requests call the adapter that is trained, and the model without any
ENGINES_WITH_ADAPTERS = ("native", "vllm", "sglang")
_NAME = re.compile(r"[A-Za-z][\w.-]*")


def check_others(options: Any) -> None:
    """Raises ValueError for adapters of --lora.others that no engine could apply."""
    other_adapters(options)
    if not options.is_on:
        raise ValueError("--lora.others stand beside an adapter that is trained: give --lora.rank or --lora.path too.")
    if options.engine != "unmerged":
        raise ValueError(
            f"--lora.others {' '.join(options.others)} needs --lora.engine unmerged, not {options.engine}: merged "
            "weights hold one adapter."
        )


def other_adapters(options: Any) -> dict[str, str]:
    """Returns --lora.others as {name: folder}, in the order given; ValueError for a name that cannot be."""
    folders: dict[str, str] = {}
    for item in options.others:
        name, _, folder = item.partition("=")
        if not _NAME.fullmatch(name) or not folder:
            raise ValueError(
                f"--lora.others {item!r}: it must be NAME=FOLDER, such as opponent=runs/old/final/adapter. A name "
                "begins with a letter, and goes on with letters, digits, '_', '.' and '-'."
            )
        if name in (POLICY, BASE):
            raise ValueError(
                f"--lora.others {item!r}: {POLICY!r} is the adapter that is trained, and {BASE!r} the model without "
                "one. Choose another name."
            )
        if name in folders:
            raise ValueError(f"--lora.others: {name} is given twice.")
        folders[name] = folder
    return folders


def check_adapters(config: Any) -> None:
    """Raises ValueError for a run that cannot have the adapters that it asks for."""
    if config.tp_size > 1:
        raise ValueError(f"--tp_size {config.tp_size} cannot cut adapters. Use --tp_size 1, or leave --lora.* out.")
    if (config.lora.others or config.lora.engine != "auto") and not hasattr(config, "rollout_ranks"):
        raise ValueError(
            "--lora.engine and --lora.others need an engine, and this kind of run has none: leave them out."
        )
    sends_adapters(config)


def sends_adapters(config: Any) -> bool:
    """Returns whether the engine of a run applies adapters unmerged; ValueError if it must and cannot.

    In float32 merging loses nothing and decoding is faster. In bfloat16 it rounds most of a small update away.
    """
    if config.lora.engine == "merged" or not hasattr(config, "rollout_ranks"):
        return False
    reasons = (
        ("engine", config.engine not in ENGINES_WITH_ADAPTERS, "this engine takes whole weights alone"),
        ("exact", config.exact, "its engine has the trainer's bits with merged weights"),
        ("routing.replay", config.routing.replay, "the engine that records experts takes whole weights alone"),
        ("native.lookup", config.native.lookup > 0, "the engine that guesses takes whole weights alone"),
        ("rollout.keep_cache", config.rollout.keep_cache, "the engine that keeps rows takes whole weights alone"),
        (
            "top_k" if config.top_k else "top_p",
            config.is_truncated,
            "the engine that reports the tokens to draw from takes whole weights alone",
        ),
    )
    refused = next(((name, reason) for name, is_refused, reason in reasons if is_refused), None)
    if config.lora.engine == "auto":
        # Not with sglang, which has no place beside some layers: only the model tells.
        return refused is None and config.dtype == "bfloat16" and config.engine != "sglang"
    if refused:
        name, reason = refused
        value = getattr(config, name, True)
        others = f", or use --engine {' or '.join(ENGINES_WITH_ADAPTERS)}" if name == "engine" else ""
        raise ValueError(
            f"--lora.engine unmerged does not go with --{name} {value}: {reason}. Leave one of them out{others}."
        )
    return True
