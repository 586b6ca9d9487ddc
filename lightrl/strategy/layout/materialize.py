"""Gives memory to a model that was built on the meta device, and the weights of rank 0 to every rank."""

from __future__ import annotations

import torch
from torch import nn

from lightrl.comm import Comm


@torch.no_grad()
def broadcast_from_main(model: nn.Module, device: torch.device, comm: Comm) -> None:
    """Moves the model to the device with rank 0's parameters and buffers; other ranks may pass a meta model."""
    _materialize(model, device)
    for _, parameter in sorted(model.named_parameters()):
        parameter.data = parameter.data.to(device)
        comm.broadcast_tensor(parameter.data)
    broadcast_buffers(model, device, comm)


@torch.no_grad()
def broadcast_buffers(model: nn.Module, device: torch.device, comm: Comm) -> None:
    """Broadcasts all buffers, even those that no checkpoint holds, such as rotary frequencies.

    In a model that was on the meta device, they contain garbage. One that several modules share there becomes several,
    so it is broadcast once for each name.
    """
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            real = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
            module._buffers[name] = real
    for _, buffer in sorted(model.named_buffers(remove_duplicate=False)):
        comm.broadcast_tensor(buffer)


def _materialize(model: nn.Module, device: torch.device) -> None:
    """Does the same as Module.to_empty(), but keeps tied parameters tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    empty = torch.empty_like(parameter, device=device)
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]


def to_meta(model: nn.Module) -> None:
    """Does the same as Module.to("meta"), but keeps tied parameters tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
                module._parameters[name] = made.setdefault(id(parameter), empty)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to("meta")


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Gives every buffer new memory on the device; the values are lost."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=device))
