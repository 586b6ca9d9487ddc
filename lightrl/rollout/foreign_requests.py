"""Requests and responses under the names that AReaL's workflows use, so that such a workflow runs unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightrl.rollout.episode import Turn

_FIXED = {  # the only values that a run supports; the last of top_k is AReaL's default
    "n_samples": (1,),
    "top_p": (1, 1.0),
    "top_k": (-1, 0, 10**8),
    "min_new_tokens": (0,),
    "frequency_penalty": (0, 0.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationHyperparameters:
    """The sampling settings of a request; None stands for the run's setting."""

    max_new_tokens: int | None = None
    temperature: float | None = None
    greedy: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    n_samples: int = 1

    def new(self, **changes: Any) -> GenerationHyperparameters:
        """Returns a copy of the settings with some of them changed."""
        return replace(self, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMRequest:
    """A request for a continuation of tokens. rid is a name for logs, and need not be unique."""

    input_ids: Sequence[int]
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    rid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMResponse:
    """The answer to a request."""

    input_tokens: list[int]
    output_tokens: list[int]
    output_logprobs: list[float]
    output_versions: list[int]
    stop_reason: str

    @property
    def input_len(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        """Number of generated tokens."""
        return len(self.output_tokens)


async def answer_request(engine: Any, request: Any) -> LLMResponse:
    """Answers a request with an EngineClient. It is an LLMRequest, or any object with input_ids and gconfig."""
    settings = request.gconfig
    for name, allowed in _FIXED.items():
        if getattr(settings, name, allowed[0]) not in (None, *allowed):
            raise _fixed(name, getattr(settings, name), allowed[0])
    stop = getattr(settings, "stop", None)
    turn: Turn = await engine.generate(
        list(request.input_ids),
        max_new_tokens=getattr(settings, "max_new_tokens", None),
        temperature=0.0 if getattr(settings, "greedy", False) else getattr(settings, "temperature", None),
        stop_token_ids=tuple(getattr(settings, "stop_token_ids", None) or ()),
        stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
    )
    return LLMResponse(
        input_tokens=list(request.input_ids),
        output_tokens=list(turn.token_ids),
        output_logprobs=list(turn.logprobs),
        output_versions=list(turn.versions),
        stop_reason=turn.finish_reason,
    )


def _fixed(name: str, given: Any, allowed: Any) -> ValueError:
    reason = (
        "each call makes one; --group_size says how many samples a prompt has"
        if name == "n_samples"
        else ("the trainer's logprobs are of the whole distribution")
    )
    return ValueError(f"A request has {name} {given!r}, and it must be {allowed}: {reason}.")
