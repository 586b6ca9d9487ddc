"""Copies new weights into an engine's own parameters, in place, and refuses what does not fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from lightrl.engines.base import WeightSyncError

_SAMPLED_VALUES = 16  # of each parameter, evenly spread


class Landed:
    """A few values of every tensor that came, to compare with what the model holds once all have come."""

    def __init__(self, own: dict[str, nn.Parameter]) -> None:
        self._own = own
        self._given: dict[str, Tensor] = {}

    def note(self, name: str, tensor: Tensor) -> None:
        self._given[name] = _sampled(tensor).to(device=self._own[name].device, dtype=self._own[name].dtype)

    def check(self) -> None:
        wrong = [name for name, given in self._given.items() if not _is_equal(_sampled(self._own[name]), given)]
        if wrong:
            raise WeightSyncError(f"The engine does not hold what it was given of: {', '.join(wrong)}.")


def _is_equal(held: Tensor, given: Tensor) -> bool:
    """To the bit; a NaN that came is told by whoever meets it, with its request."""
    return torch.allclose(held, given, rtol=0, atol=0, equal_nan=True)


def _sampled(tensor: Tensor) -> Tensor:
    """Copies of values spread over the tensor; by index, since flattening a transposed view would copy it whole."""
    places = torch.arange(0, tensor.numel(), max(1, tensor.numel() // _SAMPLED_VALUES), device=tensor.device)
    return tensor.detach()[torch.unravel_index(places, tensor.shape)]


def copy_weights(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Landed:
    """Consumes (HF name, full tensor) pairs; tied parameters may come under one of their names or under each.

    A list or tuple is checked whole before anything is written. A generator is consumed to its end even when a pair
    does not fit, because on other ranks its tensors may come out of collectives; what fits has then been written.
    """
    own = dict(model.named_parameters(remove_duplicate=False))
    problems: list[str] = []
    received: set[int] = set()
    if isinstance(weights, Sequence):
        for name, tensor in weights:
            _check(own, name, tensor, problems, received)
        problems += _missing(own, received)
        _raise(problems)
    problems, received, landed = [], set(), Landed(own)
    with torch.no_grad():
        for name, tensor in weights:
            if _check(own, name, tensor, problems, received):
                own[name].copy_(tensor)
                landed.note(name, tensor)
    _raise(problems + _missing(own, received))
    return landed


def drop_weights(model: nn.Module) -> list[tuple[torch.UntypedStorage, int]]:
    """Frees the memory of all parameters; resizing each storage to its bytes again gives room for new values."""
    storages = {item.untyped_storage().data_ptr(): item.untyped_storage() for item in model.parameters()}
    dropped = [(storage, storage.nbytes()) for storage in storages.values()]
    for storage, _ in dropped:
        storage.resize_(0)
    return dropped


def _check(own: dict[str, nn.Parameter], name: str, tensor: Tensor, problems: list[str], received: set[int]) -> bool:
    if name not in own:
        problems.append(f"unknown {name}")
        return False
    received.add(id(own[name]))
    if own[name].shape != tensor.shape:
        problems.append(f"misshapen {name}: got {tuple(tensor.shape)}, the engine has {tuple(own[name].shape)}")
        return False
    return True


def _missing(own: dict[str, nn.Parameter], received: set[int]) -> list[str]:
    missing: dict[int, str] = {}
    for name, parameter in own.items():
        if id(parameter) not in received:
            missing.setdefault(id(parameter), name)
    return [f"missing {name}" for name in missing.values()]


def _raise(problems: list[str]) -> None:
    if problems:
        shown = "; ".join(problems[:20]) + (f"; and {len(problems) - 20} more" if len(problems) > 20 else "")
        raise WeightSyncError(
            f"The weights do not fit the engine's model: {shown}. Send every parameter once, whole, under its HF name."
        )
