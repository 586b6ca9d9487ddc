"""Sampling parameters in the forms of other trainers: dicts or objects, shared by prompts, without a seed.

lightrl's own trainers give each prompt a SamplingParams with its seed, and never run this code.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

from lightrl.engines.base import SamplingParams
from lightrl.seeding import mix_seed

_GATHERED_STREAM, _LOCAL_STREAM = 0x67617468, 0x6C6F6361  # separate these draws from each other and from seeded ones

SeedOf = Callable[[int], int]  # index of a prompt -> its seed, for parameters that have none


def gathered_seeds(run_seed: int, call: int, first_position: int) -> SeedOf:
    """Returns seeds by the prompt's position among those of all ranks, which no world size changes."""
    return lambda index: mix_seed(_GATHERED_STREAM, run_seed, call, first_position + index)


def local_seeds(run_seed: int, call: int, engine_index: int) -> SeedOf:
    """Returns seeds for a call that each engine answers on its own."""
    return lambda index: mix_seed(_LOCAL_STREAM, run_seed, call, engine_index, index)


def params_for_each(given: Any, num_prompts: int, first_position: int, seed_of: SeedOf) -> list[SamplingParams]:
    """Returns one SamplingParams per prompt. A shared seed is mixed with the prompt's position over all ranks."""
    if isinstance(given, Sequence) and not isinstance(given, str):
        if len(given) != num_prompts:
            raise ValueError(f"{len(given)} sampling parameters for {num_prompts} prompts on this rank.")
        own = [as_params(item) for item in given]
        return [replace(item, seed=seed_of(index)) if item.seed is None else item for index, item in enumerate(own)]
    shared = as_params(given)
    if shared.seed is None:
        return [replace(shared, seed=seed_of(index)) for index in range(num_prompts)]
    return [replace(shared, seed=mix_seed(shared.seed, first_position + index)) for index in range(num_prompts)]


# Names that vLLM, SGLang and other trainers give to our settings.
_RENAMED = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "n_samples": "n",
    "sampling_seed": "seed",
}
# Settings without a use in lightrl: they say what to print or return.
_IGNORED = {
    "detokenize",
    "flat_logprobs",
    "include_stop_str_in_output",
    "logprobs",
    "no_stop_trim",
    "output_kind",
    "output_text_buffer_length",
    "skip_clone",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stream_interval",
}
# Settings that lightrl does not have, with the values at which they change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {"min_p": (0,), "best_of": (1,), "length_penalty": (1,)}
_EVERYTHING = 10_000_000  # a top_k that means no limit: more tokens than any vocabulary has
# What the fields of SamplingParams take, by their annotation. NumPy's numbers are among these.
_TAKEN: dict[str, tuple[type, str]] = {
    "int": (Integral, "a whole number"),
    "int | None": (Integral, "a whole number"),
    "float": (Real, "a number"),
    "bool": (bool, "True or False"),
    "str": (str, "a text"),
    "tuple[int, ...]": (Integral, "a list of whole numbers"),
    "tuple[str, ...]": (str, "a text or a list of texts"),
}


def as_params(given: Any) -> SamplingParams:
    """Returns lightrl's parameters for a dict, or for an object such as vLLM's own SamplingParams.

    Raises TypeError for a value of another type, and ValueError for one out of range or a setting without a use here.
    """
    if isinstance(given, SamplingParams):
        for name in given.__dataclass_fields__:
            _require_type(name, name, getattr(given, name))
        return given
    settings = dict(given) if isinstance(given, Mapping) else _settings_of(given)
    greedy = settings.pop("greedy", False) or settings.pop("do_sample", None) is False  # in transformers
    known, unknown = {}, []
    for name, value in settings.items():
        own = _RENAMED.get(name, name)
        if own in SamplingParams.__dataclass_fields__:
            _require_type(name, own, value)
            known[own] = value
        elif name not in _IGNORED and value not in (None, False, [], {}, (), *_NEUTRAL.get(name, ())):
            unknown.append(f"{name}={value!r}")
    if unknown:
        names = ", ".join(SamplingParams.__dataclass_fields__)
        raise ValueError(f"Sampling parameters that lightrl does not have: {', '.join(unknown)}. It has: {names}.")
    if greedy:
        known["temperature"] = 0.0
    return SamplingParams(**_in_our_form(known))


def read_setting(given: Any, name: str) -> Any:
    """Returns a setting from a dict or an object, or from the first of several; None if missing."""
    if isinstance(given, Sequence) and not isinstance(given, str):
        return read_setting(given[0], name) if given else None
    return given.get(name) if isinstance(given, Mapping) else getattr(given, name, None)


def _settings_of(given: Any) -> dict[str, Any]:
    """Returns the public settings of an object that differ from those of a new one of its kind."""
    names = getattr(given, "__struct_fields__", None) or getattr(given, "__dataclass_fields__", None)
    if not names or isinstance(given, type):
        kind = type(given).__name__
        raise TypeError(f"sampling_params must be SamplingParams, vLLM's, a dict, or one per prompt, not {kind}.")
    fresh = type(given)()
    kept = ("max_tokens", "max_new_tokens")  # defaults of other classes are not ours
    return {
        name: getattr(given, name)
        for name in names
        if not name.startswith("_") and (name in kept or getattr(given, name) != getattr(fresh, name))
    }


def _require_type(name: str, own: str, value: Any) -> None:
    """Raises TypeError for a setting of a type with which an engine would fail or draw by other settings.

    `own` is lightrl's word for `name`. None stands for the default.
    """
    annotation = str(SamplingParams.__dataclass_fields__[own].type)
    kind, words = _TAKEN[annotation]
    if annotation.startswith("tuple") and not isinstance(value, str):
        is_right = isinstance(value, Collection) and all(_is_of(kind, item) for item in value)
    else:
        is_right = _is_of(kind, value)
    if value is not None and not is_right:
        raise TypeError(f"{name} is {value!r}: it must be {words}.")


def _is_of(kind: type, value: Any) -> bool:
    """Returns whether a value is of a kind; True and False are no numbers."""
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _in_our_form(known: dict[str, Any]) -> dict[str, Any]:
    if known.get("max_new_tokens", 0) is None:
        raise ValueError("max_tokens is None: say how many new tokens a sample may have.")
    settings = {name: value for name, value in known.items() if value is not None}
    if "top_k" in settings and (settings["top_k"] == -1 or settings["top_k"] >= _EVERYTHING):
        settings["top_k"] = 0
    if isinstance(settings.get("stop"), str):
        settings["stop"] = (settings["stop"],)
    for name in ("stop", "stop_token_ids"):
        if name in settings:
            settings[name] = tuple(settings[name])
    return settings
