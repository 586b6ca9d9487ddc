"""Names of weights: what a sync must bring, and from transformers' names in memory to those of a checkpoint.

Since transformers 5 a model in memory may name its weights otherwise than its checkpoint does, or hold the weights of
several experts as one tensor. Engines that read checkpoints want the checkpoint's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

_LAYER = re.compile(r"^(.*?\.\d+)\.")


def skeleton(source: PreTrainedModel) -> PreTrainedModel:
    """The source's architecture without memory for its weights; the source itself may be sharded or wrapped."""
    plain = next(kind for kind in type(source).__mro__ if not kind.__name__.startswith("FSDP"))
    config = type(source.config).from_dict(source.config.to_dict())
    with torch.device("meta"):
        model: PreTrainedModel = plain(config)
    model.tie_weights()
    return model


class ExpectedWeights:
    """Checks that every parameter comes, once or under each of its tied names, and with its shape."""

    def __init__(self, model: PreTrainedModel) -> None:
        named = list(model.named_parameters(remove_duplicate=False))
        self._shapes = {name: parameter.shape for name, parameter in named}
        self._owner = {name: id(parameter) for name, parameter in named}
        self._received: set[int] = set()
        self._names: set[str] = set()
        self._problems: list[str] = []

    def accept(self, name: str, tensor: Tensor) -> bool:
        """Whether the pair fits; what does not is a problem."""
        problem = self._problem(name, tensor)
        if problem:
            self._problems.append(problem)
        self._names.add(name)
        self._received.add(self._owner.get(name, 0))
        return not problem

    def _problem(self, name: str, tensor: Tensor) -> str:
        if name not in self._shapes:
            return f"unknown {name}"
        if name in self._names:
            return f"{name} came twice"
        if tensor.shape != self._shapes[name]:
            return f"misshapen {name}: got {tuple(tensor.shape)}, the model has {tuple(self._shapes[name])}"
        return ""

    def problems(self) -> list[str]:
        """All that was wrong with the pairs, and what did not come."""
        missing: dict[int, str] = {}
        for name, owner in self._owner.items():
            if owner not in self._received:
                missing.setdefault(owner, name)
        return self._problems + [f"missing {name}" for name in missing.values()]


def checkpoint_pairs(model: PreTrainedModel, pairs: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The pairs under the names, and in the form, that the model's checkpoint has.

    One layer is held at a time, where the form changes: the pairs must come layer by layer, as sorted names do.
    """
    # Not those of from_pretrained: ranks that built the model from its config have none, and all must agree.
    conversions = [
        item for item in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(item, PrefixChange)
    ]
    if not conversions:
        yield from pairs
        return
    model._weight_conversions = conversions  # type: ignore[assignment]  # what revert_weight_conversion reads
    for _, layer in groupby(pairs, key=lambda pair: _layer(pair[0])):
        yield from sorted(revert_weight_conversion(model, dict(layer)).items())


def _layer(name: str) -> str:
    found = _LAYER.match(name)
    return found[1] if found else name
