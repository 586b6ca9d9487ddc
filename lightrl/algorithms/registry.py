"""Chooses an algorithm by name, or a user's own as package.module:function. One call signature per kind:

| kind | signature | documented in |
|---|---|---|
| advantage | `fn(samples: ScoredSamples, **parameters) -> Tensor`  [B], one per sample | advantages.py |
| returns | `fn(tokens: TokenRewards, **parameters) -> TokenReturns`  one per token | returns.py |
| loss | `fn(tokens: PolicyTokens, **parameters) -> TokenLoss`  a term per token | losses.py |
| aggregation | `fn(mask, sequence_index, num_sequences, **parameters) -> TokenWeights` | aggregation.py |
| correction | `fn(tokens: OffPolicyTokens, **parameters) -> Correction`  a weight per token | corrections.py |

Parameters are keyword-only. A parameter that the function does not have is an error, not ignored.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, cast

from torch import Tensor

from lightrl.algorithms.advantages import ScoredSamples
from lightrl.algorithms.aggregation import TokenWeights
from lightrl.algorithms.corrections import Correction, OffPolicyTokens
from lightrl.algorithms.returns import TokenReturns, TokenRewards
from lightrl.algorithms.tokens import PolicyTokens, TokenLoss
from lightrl.imports import load_object

Kind = Literal["advantage", "returns", "loss", "aggregation", "correction"]
Parameters = Mapping[str, float | int | str | bool | None]

_PACKAGE = "lightrl.algorithms"
BUILTIN: dict[Kind, dict[str, str]] = {
    "advantage": {
        "grpo": f"{_PACKAGE}.advantages:grpo",
        "dr_grpo": f"{_PACKAGE}.advantages:dr_grpo",
        "rloo": f"{_PACKAGE}.advantages:rloo",
        "reinforce": f"{_PACKAGE}.advantages:reinforce",
        "reinforce_plus_plus": f"{_PACKAGE}.advantages:reinforce",
        "reinforce_plus_plus_baseline": f"{_PACKAGE}.advantages:reinforce_plus_plus_baseline",
        "remax": f"{_PACKAGE}.advantages:remax",
        "opo": f"{_PACKAGE}.advantages:opo",
        "gpg": f"{_PACKAGE}.advantages:gpg",
        "cpgd": f"{_PACKAGE}.advantages:cpgd",
        "pass_at_k": f"{_PACKAGE}.advantages:pass_at_k",
    },
    "returns": {
        "gae": f"{_PACKAGE}.returns:gae",
        "returns_to_go": f"{_PACKAGE}.returns:returns_to_go",
        "turn_returns": f"{_PACKAGE}.returns:turn_returns",
    },
    "loss": {
        "policy_gradient": f"{_PACKAGE}.losses:policy_gradient",
        "ppo_clip": f"{_PACKAGE}.losses:ppo_clip",
        "cispo": f"{_PACKAGE}.losses:cispo",
        "sapo": f"{_PACKAGE}.losses:sapo",
        "cpgd": f"{_PACKAGE}.losses:cpgd",
        "gspo": f"{_PACKAGE}.sequence_losses:gspo",
        "gspo_token": f"{_PACKAGE}.sequence_losses:gspo_token",
        "gmpo": f"{_PACKAGE}.sequence_losses:gmpo",
        "clip_cov": f"{_PACKAGE}.selective_losses:clip_cov",
        "kl_cov": f"{_PACKAGE}.selective_losses:kl_cov",
        "dppo_tv": f"{_PACKAGE}.selective_losses:dppo_tv",
        "dppo_kl": f"{_PACKAGE}.selective_losses:dppo_kl",
    },
    "aggregation": {
        "token_mean": f"{_PACKAGE}.aggregation:token_mean",
        "sequence_mean": f"{_PACKAGE}.aggregation:sequence_mean",
        "sequence_mean_token_sum": f"{_PACKAGE}.aggregation:sequence_mean_token_sum",
        "sequence_mean_token_sum_norm": f"{_PACKAGE}.aggregation:sequence_mean_token_sum_norm",
    },
    "correction": {
        "tis": f"{_PACKAGE}.corrections:truncated",
        "mis": f"{_PACKAGE}.corrections:masked",
        "icepop": f"{_PACKAGE}.corrections:icepop",
        "reject": f"{_PACKAGE}.corrections:rejected",
    },
}

WHITENED = frozenset({"reinforce_plus_plus", "reinforce_plus_plus_baseline"})
"""Advantages to be whitened over all trained tokens of the update, on all ranks (moments.py)."""

SELECTING = frozenset({"clip_cov", "kl_cov"})
"""Losses that need PolicyTokens.selected, made over the whole batch (selection.py)."""

_EXAMPLES = {
    "advantage": "my_advantages",
    "returns": "my_returns",
    "loss": "my_loss",
    "aggregation": "my_aggregation",
    "correction": "my_correction",
}


def load_advantage(name: str, parameters: Parameters | None = None) -> Callable[[ScoredSamples], Tensor]:
    """The estimator of one advantage per sample, with its parameters given."""
    return cast(Callable[[ScoredSamples], Tensor], _load("advantage", name, parameters))


def load_returns(name: str, parameters: Parameters | None = None) -> Callable[[TokenRewards], TokenReturns]:
    """The estimator of one advantage per token, with its parameters given."""
    return cast(Callable[[TokenRewards], TokenReturns], _load("returns", name, parameters))


def load_loss(name: str, parameters: Parameters | None = None) -> Callable[[PolicyTokens], TokenLoss]:
    """The policy loss, with its parameters given."""
    return cast(Callable[[PolicyTokens], TokenLoss], _load("loss", name, parameters))


def load_aggregation(name: str, parameters: Parameters | None = None) -> Callable[[Tensor, Tensor, int], TokenWeights]:
    """The aggregation, with its parameters given."""
    return cast(Callable[[Tensor, Tensor, int], TokenWeights], _load("aggregation", name, parameters))


def load_correction(name: str, parameters: Parameters | None = None) -> Callable[[OffPolicyTokens], Correction]:
    """The correction, with its parameters given."""
    return cast(Callable[[OffPolicyTokens], Correction], _load("correction", name, parameters))


def parameters_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The keyword-only parameters and their defaults; inspect.Parameter.empty marks one that must be given."""
    found = inspect.signature(function).parameters.values()
    return {item.name: item.default for item in found if item.kind is inspect.Parameter.KEYWORD_ONLY}


def _load(kind: Kind, name: str, parameters: Parameters | None) -> Callable[..., Any]:
    function = load_object(name, builtin=BUILTIN[kind], what=kind, example=_EXAMPLES[kind])
    if not callable(function):
        raise ValueError(f"The {kind} {name!r} is a {type(function).__name__}: it must be a function.")
    known, given = parameters_of(function), dict(parameters or {})
    unknown = sorted(set(given) - set(known))
    if unknown:
        allowed = f"It has {', '.join(sorted(known))}." if known else "It has none."
        raise ValueError(f"The {kind} {name!r} has no parameter {', '.join(unknown)}. {allowed}")
    missing = sorted(key for key, default in known.items() if default is inspect.Parameter.empty and key not in given)
    if missing:
        raise ValueError(f"The {kind} {name!r} needs a value for {', '.join(missing)}.")
    return partial(function, **given)
