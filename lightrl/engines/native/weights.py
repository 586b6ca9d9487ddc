"""Copies new weights into an engine's own parameters, in place, and refuses what does not fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn


def copy_weights(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
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
    problems, received = [], set()
    with torch.no_grad():
        for name, tensor in weights:
            if _check(own, name, tensor, problems, received):
                own[name].copy_(tensor)
    _raise(problems + _missing(own, received))


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
        raise ValueError(
            f"The weights do not fit the engine's model: {shown}. Send every parameter once, whole, under its HF name."
        )
