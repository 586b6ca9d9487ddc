"""Main copies: the float32 weights that an optimizer steps, beside the bfloat16 weights that the stages compute with.

Everything outside of a pass sees the main copies: optimizers, checkpoints, weight syncs, averages. --dtype bfloat16
therefore adds only this: modules get rounded weights, each gradient is added to its main copy's gradient in float32 as
soon as a backward has it, and a stage rounds again the copies that have changed since its last pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from lightrl.strategy.optim.optimizers import refuse_without_main_copies

_KEY = "megatron_main_copies"  # a key of the model's __dict__


class _Pair(NamedTuple):
    main: nn.Parameter
    rounded: nn.Parameter


class MainCopies:
    """The main copies of a model's weights on this rank, and the weights that are rounded from them."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        """Takes the float32 parameters out of the modules and puts bfloat16 ones in their place."""
        self._pairs = [_round(module, name) for module, name in _rounded_parameters(stages)]
        self._versions = [-1] * len(self._pairs)  # versions of the main copies when they were last rounded
        for stage in stages:
            stage.register_forward_pre_hook(lambda *_: self.refresh())

    @torch.no_grad()
    def refresh(self) -> None:
        """Rounds the main copies that have changed since they were last rounded."""
        for index, (main, rounded) in enumerate(self._pairs):
            if self._versions[index] != main._version:
                rounded.copy_(main)
                self._versions[index] = main._version

    def main(self) -> list[Tensor]:
        """Brings the rounded weights up to date and returns the main copies, which may then leave the device."""
        self.refresh()
        return [pair.main.detach() for pair in self._pairs]

    def rounded(self) -> list[Tensor]:
        """Returns the rounded weights, which the modules hold."""
        return [pair.rounded.detach() for pair in self._pairs]

    @property
    def are_offloaded(self) -> bool:
        """Whether the main copies' memory has been freed."""
        return any(is_emptied(pair.main) for pair in self._pairs)


def compute_in_bfloat16(model: nn.Module, stages: Sequence[nn.Module]) -> None:
    """Makes a model's stages compute in bfloat16; a model that does not train is rounded, without main copies."""
    for stage in stages:
        config: Any = stage.config
        config.pipeline_dtype = torch.bfloat16
    if any(parameter.requires_grad for parameter in model.parameters()):
        model.__dict__[_KEY] = MainCopies(stages)
        return
    for module, name in _rounded_parameters(stages):
        _to_bfloat16(module.get_parameter(name))
    for module, name in _rounded_parameters([model]):
        _to_bfloat16(module.get_parameter(name))


def copies_of(model: nn.Module | None) -> MainCopies | None:
    """Returns the main copies of a model; None if its optimizer steps the weights that compute."""
    found: MainCopies | None = None if model is None else model.__dict__.get(_KEY)
    return found


def follow_steps(optimizer: Optimizer, model: nn.Module) -> None:
    """Marks the main copies as changed after each optimizer step: fused kernels do not bump their versions."""
    if copies_of(model) is not None:
        optimizer.register_step_post_hook(
            lambda done, *_: increment_version([item for group in done.param_groups for item in group["params"]])
        )


def is_emptied(tensor: Tensor) -> bool:
    """Returns whether a tensor's memory has been freed, so that reading it would crash the process."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def require_on_device(model: nn.Module) -> None:
    """Raises RuntimeError while the main copies are in host memory."""
    copies = copies_of(model)
    if copies is not None and copies.are_offloaded:
        refuse_without_main_copies()


def _rounded_parameters(modules: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, str]]:
    """Yields the parameters that compute in bfloat16: all except those of heads that ask for float32."""
    for root in modules:
        for module in [*root.modules()]:
            if not getattr(module, "computes_in_float32", False):
                yield from ((module, name) for name, _ in [*module.named_parameters(recurse=False)])


def _round(module: nn.Module, name: str) -> _Pair:
    main = module.get_parameter(name)
    rounded = nn.Parameter(main.detach().to(torch.bfloat16), requires_grad=main.requires_grad)
    setattr(module, name, rounded)
    if main.requires_grad:
        rounded.register_post_accumulate_grad_hook(partial(_add_in_float32, main))
    return _Pair(main, rounded)


def _add_in_float32(main: nn.Parameter, rounded: Tensor) -> None:
    assert rounded.grad is not None
    main.grad = rounded.grad.float() if main.grad is None else main.grad.add_(rounded.grad)
    rounded.grad = None


def _to_bfloat16(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.to(torch.bfloat16)
