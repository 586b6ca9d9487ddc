"""Loads an algorithm by name, or a user's own by module or file, and reads its traits.

There is one call signature per kind:

| kind | signature | module |
|---|---|---|
| advantage | `fn(samples: ScoredSamples, **parameters) -> Tensor`  [B], one per sample | advantages.py |
| returns | `fn(tokens: TokenRewards, **parameters) -> TokenReturns`  one per token | returns.py |
| loss | `fn(tokens: PolicyTokens, **parameters) -> TokenLoss`  a term per token | {,sequence_}losses.py, selection.py |
| aggregation | `fn(mask, sequence_index, num_sequences, **parameters) -> TokenWeights` | losses.py |
| correction | `fn(tokens: OffPolicyTokens, **parameters) -> Correction`  a weight per token | corrections.py |
| kl_estimator | `fn(policy: Tensor, reference: Tensor, **parameters) -> Tensor`  a KL per token's logprobs | kl.py |

Parameters are keyword-only. A parameter that the function does not have is an error, not ignored. What a function needs
from the trainer is a trait, which its decorator states (`@advantage(...)`, `@returns(...)`, `@loss(...)`). The trainer
reads traits and never names, so a user's function is treated exactly as a built-in one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import Any, Literal, TypeVar, cast

from lightrl.algorithms.ranges import check_values
from lightrl.imports import load_object

Kind = Literal["advantage", "returns", "loss", "aggregation", "correction", "kl_estimator"]
Need = Literal["greedy_baseline", "signal_share", "components"]
Parameters = Mapping[str, float | int | str | bool | None]
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def _named(module: str, *names: str, **renamed: str) -> dict[str, str]:
    paths = {name: f"lightrl.algorithms.{module}:{name}" for name in names}
    return paths | {name: f"lightrl.algorithms.{module}:{function}" for name, function in renamed.items()}


BUILTIN: dict[Kind, dict[str, str]] = {
    "advantage": _named(
        "advantages",
        "grpo",
        "dr_grpo",
        "rloo",
        "reinforce",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "remax",
        "opo",
        "gpg",
        "cpgd",
        "pass_at_k",
        "gdpo",
    ),
    "returns": _named("returns", "gae", "returns_to_go", "turn_returns"),
    "loss": _named(
        "losses",
        "policy_gradient",
        "ppo_clip",
        "cispo",
        "sapo",
        "cpgd",
        "dppo_tv",
        "dppo_kl",
    )
    | _named("sequence_losses", "gspo", "gspo_token", "gmpo", "vespo")
    | _named("selection", "clip_cov", "kl_cov"),
    "aggregation": _named(
        "losses", "token_mean", "sequence_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm"
    ),
    "correction": _named("corrections", "icepop", tis="truncated", mis="masked", reject="rejected"),
    "kl_estimator": _named("kl", k1="k1_of", k2="k2_of", k3="k3_of"),
}


class Traits:
    """Traits of a function, and the decorator that states them."""

    def __call__(self, function: FunctionT) -> FunctionT:
        """Marks the function; an unmarked one has the defaults."""
        function.traits = self  # type: ignore[attr-defined]
        return function


@dataclass(kw_only=True)
class AdvantageTraits(Traits):
    """What an estimator of one advantage per sample asks of the trainer: `@advantage(...)`."""

    whiten: bool = False
    """Whiten the advantages over all trained tokens of the update, on all ranks (`advantages.whiten`)."""
    needs: Need | tuple[Need, ...] = ()
    """Optional fields of ScoredSamples to fill in. `greedy_baseline` samples a greedy response to each prompt and gives
    its reward as `baselines`; `signal_share` is the share of the update's samples, over all ranks, whose group has
    unequal rewards; `components` are the values of each reward by itself."""
    min_group: int | str = 1
    """Smallest number of samples per prompt with which the estimator can compare them: a number, or the name of the
    parameter that holds it. A parameter counts as at least 2."""

    def __post_init__(self) -> None:
        if isinstance(self.needs, str):
            self.needs = (self.needs,)


@dataclass(kw_only=True)
class ReturnsTraits(Traits):
    """What an estimator of one advantage per token asks of the trainer: `@returns(...)`."""

    uses_critic: bool = True
    """Whether the estimator reads a critic's values. If not, the trainer subtracts them from its advantages."""


@dataclass(kw_only=True)
class LossTraits(Traits):
    """What a policy loss asks of the trainer: `@loss(...)`."""

    selects_tokens: Callable[..., Any] | None = None
    """A function `fn(tokens: UpdateTokens, **parameters) -> Tensor` ([N] bool, see selection.py) that chooses tokens
    over the whole update. The loss gets the choice as `PolicyTokens.selected`."""


advantage, returns, loss = AdvantageTraits, ReturnsTraits, LossTraits


TraitsT = TypeVar("TraitsT", AdvantageTraits, ReturnsTraits, LossTraits)


def traits_of(function: Callable[..., Any], kind: type[TraitsT]) -> TraitsT:
    """Returns the traits that a function, or a partial of it, is marked with; an unmarked one has the defaults."""
    while isinstance(function, partial):
        function = function.func
    traits = getattr(function, "traits", None)
    return traits if isinstance(traits, kind) else kind()


def load(kind: Kind, name: str, parameters: Parameters | None = None) -> Callable[..., Any]:
    """Loads a function by name or path and binds its parameters; the result has the call signature of its kind."""
    return bind(find(kind, name), parameters or {}, f"The {kind} {name!r}")


def find(kind: Kind, name: str) -> Callable[..., Any]:
    """Loads a function by name or path, without binding parameters."""
    if name in BUILTIN[kind]:
        return cast(Callable[..., Any], resolve_name(BUILTIN[kind][name]))
    return _load_own(kind, name)


def _load_own(kind: Kind, name: str) -> Callable[..., Any]:
    function: Any = load_object(name, builtin=BUILTIN[kind], what=kind, example=f"my_{kind}")
    if not callable(function):
        raise ValueError(f"The {kind} {name!r} is a {type(function).__name__}: it must be a function.")
    return cast(Callable[..., Any], function)


def bind(function: Callable[..., Any], given: Parameters, label: str) -> Callable[..., Any]:
    """Returns the function with its parameters bound; raises ValueError for unknown, missing and unusable ones."""
    known = parameters_of(function)
    missing = sorted(key for key, default in known.items() if default is inspect.Parameter.empty and key not in given)
    if missing or not given.keys() <= known.keys():
        raise _wrong_parameters(label, known, given, missing)
    if given:
        check_values(function, given, label)
    return partial(function, **given)


def _wrong_parameters(label: str, known: Mapping[str, Any], given: Parameters, missing: list[str]) -> ValueError:
    unknown = sorted(set(given) - set(known))
    if unknown:
        allowed = f"It has {', '.join(sorted(known))}." if known else "It has none."
        return ValueError(f"{label} has no parameter {', '.join(unknown)}. {allowed}")
    return ValueError(f"{label} needs a value for {', '.join(missing)}.")


def parameters_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the keyword-only parameters with their values; inspect.Parameter.empty marks one that must be given."""
    parameters = inspect.signature(function).parameters.values()
    return {item.name: item.default for item in parameters if item.kind is inspect.Parameter.KEYWORD_ONLY}
