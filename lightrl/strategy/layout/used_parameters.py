"""UsedParameters: which units of a sharded model have run, and which parameters have a gradient on any rank.

torch's FSDP expects every unit to run, and ranks to have gradients of the same parameters. A vision tower does not run
without images, and an expert that is a module of its own has a gradient only where a token chose it. Without this,
FSDP would add one rank's gradient of an expert to another rank's gradient of a different expert:
https://github.com/pytorch/pytorch/issues/158719
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from lightrl.comm import Comm
from lightrl.models.critic import Critic
from lightrl.models.policy import Policy
from lightrl.models.reward_model import RewardModel

_SUMS_UNUSED = "set_reduce_scatter_unused_params"  # a method of FSDPModule since torch 2.13
_UNUSED, _UNKNOWN, _USED = range(3)  # whether a parameter got a gradient; the largest of all ranks counts


class UsedParameters:
    """Records when each unit first runs, and which parameters get a gradient."""

    def __init__(self, model: nn.Module) -> None:
        """Starts to record; the model's parameters must be those that its optimizer will step."""
        self._idle = {unit for unit in model.modules() if isinstance(unit, FSDPModule)}  # those that have not run yet
        self._hooks: dict[nn.Module, RemovableHandle] = {}  # of the first run of each
        self._watched: set[Tensor] = set()  # parameters whose gradients this notes: not those frozen in the first run
        self._used: set[Tensor] = set()  # those with a gradient since the last update
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self._sums_unused = hasattr(model, _SUMS_UNUSED)
        if self._sums_unused:
            getattr(model, _SUMS_UNUSED)(True)
        self._may_choose = not self._sums_unused or not _runs_whole(model)
        self._all_used = False  # whether ranks have agreed, in any update, that each parameter had a gradient
        for unit in self._idle:
            first_run = partial(self._first_run, dict(unit.named_parameters()))
            # After FSDP's own hook, which puts whole parameters in the place of the sharded ones.
            self._hooks[unit] = unit.register_forward_pre_hook(first_run)

    def _first_run(self, sharded: dict[str, nn.Parameter], unit: Any, _: Any) -> None:
        self._hooks.pop(unit).remove()
        self._idle.discard(unit)
        for name, parameter in unit.named_parameters():
            known = sharded.get(name, parameter)  # a parameter that was added later is not sharded
            if parameter is not known and parameter.requires_grad:
                self._watched.add(known)
                parameter.register_post_accumulate_grad_hook(partial(self._note, known))

    def _note(self, sharded: nn.Parameter, _: Tensor) -> None:
        self._used.add(sharded)

    def leave_out_idle_units(self) -> None:
        """Lets the backward skip units that have never run, whose gradients FSDP would otherwise look for.

        This can go with https://github.com/pytorch/pytorch/pull/194058 (2.13: not yet).
        """
        for unit in self._idle:
            unit.set_requires_gradient_sync(True, recurse=False)

    def drop_unused(self, parameters: list[Tensor], comm: Comm) -> None:
        """Drops gradients that no rank has, which FSDP fills with zeros, and starts anew for the next update.

        Momentum and weight decay would move their parameters, unlike in one process. Ranks no longer ask each other
        after an update that used every parameter of a model that runs as a whole: it costs a reduction.
        """
        if self._all_used and not self._may_choose:
            return
        own = torch.tensor([self._use_of(parameter) for parameter in parameters])
        self._used.clear()
        anywhere = comm.all_reduce(own, "max").tolist()
        self._all_used = self._all_used or set(anywhere) == {_USED}
        if not self._sums_unused:
            self._require_same(parameters, own.tolist(), anywhere, comm)
        for parameter, use in zip(parameters, anywhere, strict=True):
            if use == _UNUSED:
                parameter.grad = None

    def _use_of(self, parameter: Tensor) -> int:
        if parameter in self._watched:
            return _USED if parameter in self._used else _UNUSED
        return _UNKNOWN  # frozen in the first run, or of a unit that has not run

    def _require_same(self, parameters: list[Tensor], own: list[int], anywhere: list[int], comm: Comm) -> None:
        """Raises RuntimeError on every rank if FSDP has just added up gradients of different parameters."""
        names = [self._names.get(parameter, "") for parameter in parameters]
        missing = [name for name, *use in zip(names, own, anywhere, strict=True) if use == [_UNUSED, _USED]]
        found = [theirs[0] for theirs in comm.all_gather_object(missing) if theirs]
        if found:
            raise RuntimeError(
                f"Only some ranks have a gradient of {found[0]}, and torch {torch.__version__} cannot sum such "
                "gradients under --strategy fsdp. Install torch 2.13 or later, or use --strategy ddp."
            )


def _runs_whole(model: nn.Module) -> bool:
    """Returns whether each forward uses every parameter; other modules than lightrl's may have parts that rest."""
    if not isinstance(model, Policy | Critic | RewardModel):
        return False
    lists = (name for name, module in model.named_modules() if isinstance(module, nn.ModuleList | nn.ModuleDict))
    return not any("expert" in name for name in lists)  # each an expert of its own, which only some tokens choose
