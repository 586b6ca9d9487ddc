"""Checks a strategy class of the user's before a run: its base, its methods, and whether they take lightrl's calls."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from torch import Tensor, nn

from lightrl.imports import place_of

# How lightrl calls the methods that a strategy may write: values by position, then names. The weight of backward() and
# is_boundary of optimizer_step() are left out, because lightrl keeps them to itself if prepare_model() is its own.
_CALLS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "__init__": ((), ("seed", "max_norm", "micro_train_batch_size", "train_batch_size", "args")),
    "prepare_model": (("model",), ()),
    "create_optimizer": (("model",), ("lr", "betas", "eps", "weight_decay")),
    "backward": (("loss", "model", "optimizer"), ()),
    "optimizer_step": (("optimizer", "model", "scheduler"), ()),
    "full_parameters": (("model", "dtype"), ()),
    "before_micro_batch": (("model", "is_last_micro_batch"), ()),
    "after_forward_only": (("model",), ()),
    "group_batches": (("data",), ()),
    "check_model_config": (("config",), ()),
    "save_ckpt": (("model", "save_dir"), ("max_num", "max_mem", "client_state")),
    "load_ckpt": (("model", "load_dir"), ("tag",)),
}
_REMEDY = "Change its parameters; **kwargs takes those that you do not need."
_OVER_MODEL = "It must train parameters of the model that it was given, the same on every rank: model.parameters()."
_REMEDIES = {"__init__": "Write __init__(self, **settings) and begin it with super().__init__(**settings)."}


def checked_class(name: str, kind: Any, base: type) -> type[Any]:
    """Returns the class that --strategy names; raises ValueError if it cannot be a strategy."""
    if not isinstance(kind, type) or not issubclass(kind, base):
        raise ValueError(f"Strategy {name!r} is not a subclass of lightrl.StrategyBase.")
    missing = sorted(getattr(kind, "__abstractmethods__", ()))
    if missing:
        remedy = "Write them, or inherit from a built-in strategy."
        raise ValueError(f"Strategy {name!r} does not implement {', '.join(missing)}. {remedy}")
    for method, (positional, named) in _CALLS.items():
        function = inspect.getattr_static(kind, method)
        if not inspect.isfunction(function):  # a static method, for example, has no self
            continue
        signature = inspect.signature(function, follow_wrapped=False)  # a decorator may take what the method does not
        try:
            signature.bind(None, *positional, **dict.fromkeys(named))
        except TypeError as error:
            call = f"{method}({', '.join([*positional, *(f'{word}=...' for word in named)])})"
            raise ValueError(
                f"{kind.__name__}.{method}{signature} of strategy {name!r} cannot be called as {call}, as lightrl "
                f"does: {error}. {_REMEDIES.get(method, _REMEDY)}"
            ) from None
    return kind


def ranks_apart(strategy: Any, world: int) -> ValueError:
    """Returns the error about a setup_distributed() that does not connect the ranks."""
    where = place_of(strategy.setup_distributed)
    return ValueError(
        f"{type(strategy).__name__}.setup_distributed() did not connect the {world} ranks{where}. Call "
        "super().setup_distributed(...) in it, with its arguments, which connects the ranks and picks the device."
    )


def no_model(kind: type, returned: object) -> TypeError:
    """Returns the error about a prepare_model() that returns no model."""
    return TypeError(
        f"{kind.__name__}.prepare_model() returned {returned!r}. It must return the model that is called from now on: "
        "the one that it was given, or a torch module around it, such as the result of super().prepare_model(model)."
    )


def check_optimizer(strategy: Any, optimizer: Any, model: nn.Module) -> None:
    """Raises an error on every rank for a result of create_optimizer() that cannot train the model; a collective.

    A class with its own apply_gradients() may step other parameters, such as copies, than those of the model.
    """
    called = f"{type(strategy).__name__}.create_optimizer()"
    with strategy.comm.phase("set-up", local=True):
        if not hasattr(optimizer, "param_groups"):
            raise _no_optimizer(called, optimizer)
        rates = [group.get("lr") for group in optimizer.param_groups]
        if not all(isinstance(rate, Real | Tensor) and 0 <= float(rate) < math.inf for rate in rates):
            raise ValueError(f"{called} set the learning rates {rates}. Each must be a finite number of at least 0.")
    apply = getattr(type(strategy), "apply_gradients", None)
    if getattr(apply, "__module__", "") != "lightrl.strategy.torch_native":
        return
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    names = [name for name, parameter in model.named_parameters() if id(parameter) in trained]
    first, *others = strategy.comm.all_gather_object(names)
    other = next((part for part in others if part != first), first)
    if not first or other is not first:
        differs = "" if other is first else "; on another rank they are different ones"
        raise ValueError(
            f"{called} returned an optimizer of {len(trained)} parameters, {len(names)} of them the model's"
            f"{differs}. {_OVER_MODEL}"
        )


def _no_optimizer(called: str, returned: object) -> TypeError:
    return TypeError(
        f"{called} returned {returned!r}. It must return an optimizer over the model's "
        "trainable parameters, such as torch.optim.AdamW(model.parameters(), lr=kwargs['lr'])."
    )


def no_step(kind: type, returned: object) -> TypeError:
    """Returns the error about an optimizer_step() that does not report its update."""
    return TypeError(
        f"{kind.__name__}.optimizer_step() returned {returned!r}. It must return an OptimizerStep of "
        "lightrl.strategy.results, with the norm of the gradient and the learning rates, such as the result of "
        "super().optimizer_step(...)."
    )
