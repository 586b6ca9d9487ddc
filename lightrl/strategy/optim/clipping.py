"""Gradient norm and clipping over plain tensors, DTensors, and both in one model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scales the gradients so that their global norm is at most max_norm (0: no limit); returns the norm before."""
    with_grad = [parameter for parameter in parameters if parameter.grad is not None]
    if not with_grad:
        return torch.zeros(())
    norm = _global_norm(with_grad)
    if max_norm > 0:
        for group in _by_mesh(with_grad):
            torch.nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    return norm


def _by_mesh(parameters: list[Tensor]) -> list[list[Tensor]]:
    """Groups parameters that torch's fused norms accept together: no plain tensors with DTensors, no two meshes."""
    groups: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        grad = parameter.grad
        groups.setdefault(grad.device_mesh if isinstance(grad, DTensor) else None, []).append(parameter)
    return list(groups.values())


def _global_norm(parameters: list[Tensor]) -> Tensor:
    squares = []
    for group in _by_mesh(parameters):
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in group if parameter.grad is not None])
        squares.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).float() ** 2)
    return torch.stack(squares).sum().sqrt()
