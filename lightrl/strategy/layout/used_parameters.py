"""UsedParameters: which units of a sharded model run, and which parameters get a gradient on this rank.

torch's FSDP expects every unit to run, and ranks to have gradients of the same parameters. A vision tower does not run
without images, and an expert that is a module of its own has a gradient only where a token chose it. Otherwise a rank
would add its gradient of one expert to another rank's gradient of another: https://github.com/pytorch/pytorch/issues/158719
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightrl.comm import Comm

_SUMS_UNUSED = "set_reduce_scatter_unused_params"  # a method of FSDPModule since torch 2.13


class UsedParameters:
    """Notes the first run of each unit, by a hook that this removes, and every gradient of its parameters."""

    def __init__(self, model: nn.Module) -> None:
        """Starts to note what is used; the model's parameters must be those that its optimizer will step."""
        self._idle: set[FSDPModule] = set()  # units that have not run yet
        self._used: set[Tensor] = set()  # parameters with a gradient since the last update
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self._sums_unused = hasattr(model, _SUMS_UNUSED)
        if self._sums_unused:
            getattr(model, _SUMS_UNUSED)(True)
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                self._idle.add(unit)
                sharded = dict(unit.named_parameters())
                first = partial(self._first_run, sharded)
                # After FSDP's own hook, which puts whole parameters in the place of the sharded ones.
                first.keywords["handles"] = [unit.register_forward_pre_hook(first)]

    def _first_run(self, sharded: dict[str, nn.Parameter], unit: Any, _: Any, *, handles: list[Any]) -> None:
        self._idle.discard(unit)
        for handle in handles:
            handle.remove()
        for name, parameter in unit.named_parameters():
            known = sharded.get(name, parameter)  # a parameter that was added later is not sharded
            if parameter is not known and parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(self._note, known))

    def _note(self, sharded: nn.Parameter, _: Tensor) -> None:
        self._used.add(sharded)

    def leave_out_idle_units(self) -> None:
        """Lets a backward skip units that have never run; without a reduction, FSDP would look for their gradients.

        This can go with https://github.com/pytorch/pytorch/pull/194058 (2.13: not yet).
        """
        for unit in self._idle:
            unit.set_requires_gradient_sync(True, recurse=False)

    def drop_unused(self, parameters: list[Tensor], comm: Comm) -> None:
        """Drops gradients that no rank has, which FSDP fills with zeros, and starts anew for the next update.

        Momentum and weight decay would move their parameters, unlike in one process.
        """
        own = torch.tensor([parameter in self._used for parameter in parameters]).int()
        self._used.clear()
        is_used = comm.all_reduce(own, "max").tolist()
        if not self._sums_unused:
            self._require_same(parameters, own.tolist(), is_used, comm)
        for parameter, used in zip(parameters, is_used, strict=True):
            if not used:
                parameter.grad = None

    def _require_same(self, parameters: list[Tensor], own: list[int], is_used: list[int], comm: Comm) -> None:
        """Raises RuntimeError on every rank if FSDP has just added up gradients of different parameters."""
        names = [self._names.get(parameter, "") for parameter in parameters]
        missing = [name for name, *used in zip(names, own, is_used, strict=True) if used == [0, 1]]
        found = [names[0] for names in comm.all_gather_object(missing) if names]
        if found:
            raise RuntimeError(
                f"Only some ranks have a gradient of {found[0]}, and torch {torch.__version__} cannot sum such "
                "gradients under --strategy fsdp. Install torch 2.13 or later, or use --strategy ddp."
            )
