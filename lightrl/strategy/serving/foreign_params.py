"""Sampling parameters as code for other trainers writes them: dicts or objects, shared by the prompts, without a seed.

lightrl's own trainers give each prompt a SamplingParams with its seed, and enter none of this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightrl.engines.base import SamplingParams
from lightrl.seeding import mix_seed

_GATHERED_STREAM, _LOCAL_STREAM = 0x67617468, 0x6C6F6361  # keep these draws apart from each other and from seeded ones

SeedOf = Callable[[int], int]  # the seed of the prompt at an index, for parameters that have none


def gathered_seeds(run_seed: int, call: int, first_position: int) -> SeedOf:
    """Returns seeds by the prompt's position among those of all ranks, so they do not depend on the world size."""
    return lambda index: mix_seed(_GATHERED_STREAM, run_seed, call, first_position + index)


def local_seeds(run_seed: int, call: int, engine_index: int) -> SeedOf:
    """Returns seeds of a call that each engine answers by itself."""
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


def as_params(given: Any) -> SamplingParams:
    """Returns lightrl's parameters for a dict."""
    if isinstance(given, SamplingParams):
        return given
    if isinstance(given, Mapping):
        renamed = {"max_new_tokens" if key == "max_tokens" else key: value for key, value in given.items()}
        try:
            return SamplingParams(**renamed)
        except TypeError as error:
            known = ", ".join(SamplingParams.__dataclass_fields__)
            raise ValueError(f"Sampling parameters {sorted(given)} are not all known. Known: {known}.") from error
    raise TypeError(f"sampling_params must be SamplingParams, a dict, or one per prompt, not {type(given).__name__}.")
