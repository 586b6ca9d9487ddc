"""Texts about what an engine returned, which may be the user's, and a trainer cannot use."""

from __future__ import annotations

from collections.abc import Collection

from lightrl.engines.base import Completion

FINISH_REASONS = ("stop", "length", "abort")  # of a request; the others end an episode


def describe_unusable(item: Completion, running: Collection[int], vocab_size: int) -> str:
    """Describes a completion that colocated.py refuses; running: the requests that still lack a sample."""
    if not isinstance(item, Completion) or item.request_id not in running:
        return f"{item!r:.100}, which is no Completion of a running request (those are {list(running)!s:.50})"
    named = f"a Completion of request {item.request_id}, sample {item.sample_index}"
    if item.finish_reason not in FINISH_REASONS:
        return f"{named} with the finish_reason {item.finish_reason!r:.100}, which is none of {FINISH_REASONS}"
    parts = {name: getattr(item, name) for name in ("output_token_ids", "logprobs", "versions")}
    shown = ", ".join(f"{name}={value!r:.60}" for name, value in parts.items())
    lengths = " and ".join(str(len(value)) if hasattr(value, "__len__") else "no" for value in parts.values())
    return (
        f"{named} with {shown} ({lengths} entries). Each must be a tuple with one entry per token: ids from 0 to "
        f"{vocab_size - 1}, finite log-probabilities of the sampled tokens, and weight versions"
    )


def wrong_number(engine: str, num_done: int, wanted: int) -> str:
    """Describes that an engine's has_unfinished() was false too early, or that it returned a sample twice."""
    return (
        f"{engine} gave {num_done} completions for {wanted} samples. Its has_unfinished() must return True until "
        "step() has returned every sample, each of them once."
    )
