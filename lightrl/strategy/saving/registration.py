"""Finds the optimizer of a module that is to be saved but is not the very module that was prepared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from torch import nn

from lightrl.strategy.results import TrainedModel


def owner_of(model: nn.Module, entries: Sequence[TrainedModel], *, must_train: bool) -> TrainedModel | None:
    """Returns the entry of a module inside or around a prepared model; None if the module has nothing to train.

    Raises ValueError if a checkpoint of the module would leave out something that trains. With must_train=False the
    caller wants only the weights, and this returns None instead.
    """
    own = _trainable(model)
    sharing = [entry for entry in entries if _trainable(entry.model) & own]
    if len(sharing) == 1 and _trainable(sharing[0].model) == own:
        return sharing[0]
    if must_train and own:
        _refuse(model, own, sharing)
    return None


def _trainable(model: nn.Module) -> set[int]:
    return {id(parameter) for parameter in model.parameters() if parameter.requires_grad}


def _refuse(model: nn.Module, own: set[int], sharing: Sequence[TrainedModel]) -> NoReturn:
    name = type(model).__name__
    if not sharing:
        raise ValueError(
            f"This {name} has trainable parameters, but no optimizer is registered with it, so a checkpoint could not "
            "continue its training. Pass (model, optimizer, scheduler) to prepare() first, or freeze it by "
            "model.requires_grad_(False). load_ckpt(..., load_module_only=True) reads weights alone."
        )
    prepared, theirs = type(sharing[0].model).__name__, _trainable(sharing[0].model)
    if len({id(entry.model) for entry in sharing}) < len(sharing):
        raise ValueError(
            f"{len(sharing)} optimizers step this {prepared}, and a checkpoint holds one. Make it one optimizer with "
            "several parameter groups, or name the one to save by register(model, optimizer, scheduler)."
        )
    if own < theirs:
        raise ValueError(
            f"This {name} has {len(own)} of the {len(theirs)} trainable parameters of the {prepared} that was "
            "prepared: give that model."
        )
    raise ValueError(
        f"This {name} has {len(own)} trainable parameters, the {prepared} that was prepared inside it {len(theirs)}: "
        "give that model, and others of their own by companions={name: model}."
    )
