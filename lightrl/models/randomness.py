"""Removes randomness from a model's forward: a loss compares the probabilities of two passes over one token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_RATES = ("dropout", "pdrop", "drop_prob", "drop_rate", "drop_path_rate", "layerdrop")  # ends of names


def remove_randomness(model: nn.Module) -> None:
    """Turns dropout, dropped layers and the noise of routers off for good, in training mode too.

    Modules hold their rate in an nn.Dropout or, for the functional form, as a number. Those with a jitter (Mixtral,
    PhiMoE, DBRX) stay in evaluation mode instead: PhiMoE draws its experts in training mode whatever the number is.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if name.endswith(_RATES) and isinstance(value, float):
                setattr(module, name, 0.0)
            elif "jitter" in name:
                _keep_in_evaluation(module)


def _keep_in_evaluation(module: Any) -> None:
    module.eval()
    module.train = partial(_stay, module)  # what the train() of a module that holds it calls


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    return module


# ---- The check -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Call:
    """The tensors of one call of a module."""

    name: str
    inputs: list[Tensor]
    outputs: list[Tensor]


def refuse_randomness(model: nn.Module, run: Callable[[], object], difference: float) -> ValueError:
    """Returns the error for a model whose scores differ in training mode, naming the module that does it.

    Args:
        model: the model that run() calls.
        run: runs the model on the same tokens each time.
        difference: of the largest score, relative.
    """
    model.eval()
    expected = _calls(model, run)
    model.train()
    found = _calls(model, run)
    names = [
        theirs.name
        for ours, theirs in zip(expected, found, strict=False)
        if _same(ours.inputs, theirs.inputs) and not _same(ours.outputs, theirs.outputs)
    ]
    where = f"{names[0]} ({type(model.get_submodule(names[0])).__name__})" if names else "a module that was not found"
    return ValueError(
        f"In training mode the scores of the model differ by {difference:.2g} relative from those in evaluation mode, "
        f"because of {where}: it draws random numbers, or computes something else. Two passes over one token must "
        "agree. Set the rate of its dropout or noise to 0 in the model's config.json, or choose another model."
    )


def _calls(model: nn.Module, run: Callable[[], object]) -> list[_Call]:
    """Returns the calls of all modules in the order in which they ended, so that an inner module comes first."""
    under_way: list[list[Tensor]] = []
    done: list[_Call] = []

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        under_way.append([part.clone() for part in _tensors((args, kwargs))])  # a module may change its input in place

    def end(name: str, module: nn.Module, args: Any, output: Any) -> None:
        done.append(_Call(name, under_way.pop(), [part.clone() for part in _tensors(output)]))

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(begin, with_kwargs=True))
        handles.append(module.register_forward_hook(partial(end, name)))
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return done


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [part for item in value for part in _tensors(item)] if isinstance(value, list | tuple) else []


def _same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
