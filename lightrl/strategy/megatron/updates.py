"""Sums gradients over the ranks of a Megatron layout, takes their norm, and exchanges the stepped parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightrl.comm import Comm
from lightrl.strategy.layout.buckets import buckets
from lightrl.strategy.megatron.layout import HELD, Held, held_of, is_placed

_BUCKET_BYTES = 64 << 20  # reduced or sent at once; bounds the copy that this makes


def give_local_parameters(optimizer: Optimizer) -> None:
    """Replaces an optimizer's parameters, the model's without values, by this rank's own."""
    for group in optimizer.param_groups:
        group["params"] = [local for item in group["params"] for local in _local(item)]


def _local(parameter: Tensor) -> list[Tensor]:
    if not is_placed(parameter) or not parameter.is_meta:
        return [parameter]
    held = held_of(parameter)
    if held is None:
        return []
    setattr(held.local, HELD, held)
    return [held.local]


def stepped_parts(optimizer: Optimizer) -> list[Held]:
    """Returns the parts that an optimizer steps on this rank or, with sharded states, on its replicas too."""
    parameters = (item for group in optimizer.param_groups for item in group["params"])
    found = (held_of(item) for item in parameters if is_placed(item))
    return [held for held in found if held is not None]


@torch.no_grad()
def sum_gradients(held_parts: Sequence[Held], divisor: float) -> None:
    """Sums each gradient over its groups and divides it; a missing gradient counts as zero."""
    for held in held_parts:
        if held.local.grad is None:  # another rank's samples may have used it
            held.local.grad = torch.zeros_like(held.local)
    groups = {id(group): group for held in held_parts for group in held.sums}
    for key, group in groups.items():
        gradients = [_gradient(held) for held in held_parts if any(id(one) == key for one in held.sums)]
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            dist.all_reduce(flat, group=group)
            for gradient, part in zip(bucket, flat.split([item.numel() for item in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))
    if divisor != 1:
        for held in held_parts:
            _gradient(held).mul_(1 / divisor)


def _gradient(held: Held) -> Tensor:
    assert held.local.grad is not None
    return held.local.grad


def _buckets(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    named = ((str(index), tensor) for index, tensor in enumerate(tensors))
    for bucket in buckets(named, lambda tensor: tensor.nbytes, _BUCKET_BYTES):
        yield [tensor for _, tensor in bucket]


@torch.no_grad()
def gradient_norm(held_parts: Sequence[Held], comm: Comm) -> float:
    """Returns the norm over all ranks; ranks with the same gradient count once."""
    gradients = [held.local.grad for held in held_parts if held.is_first_holder and held.local.grad is not None]
    own = (
        torch.nn.utils.get_total_norm(gradients).double().cpu() ** 2
        if gradients
        else torch.zeros((), dtype=torch.double)
    )
    return float(comm.all_reduce(own, "sum").sqrt())


@torch.no_grad()
def step_own(optimizer: Optimizer, held_parts: Sequence[Held]) -> None:
    """Steps the parameters whose states this rank has, and fetches the others from the replica that steps them."""
    for held in held_parts:
        if not held.is_stepped_here:
            held.local.grad = None  # so that the optimizer makes no states for it
    optimizer.step()
    groups: dict[tuple[int, int], list[Held]] = {}
    for held in held_parts:
        if held.owner >= 0 and dist.get_world_size(held.replicas) > 1:
            groups.setdefault((id(held.replicas), held.owner), []).append(held)
    for (_, owner), members in groups.items():
        group = members[0].replicas
        for bucket in _buckets(held.local.detach() for held in members):
            flat = torch.cat([item.reshape(-1) for item in bucket])
            dist.broadcast(flat, src=dist.get_global_rank(group, owner), group=group)
            for item, part in zip(bucket, flat.split([item.numel() for item in bucket]), strict=True):
                item.copy_(part.view_as(item))


def clear_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Drops the gradients of parameters."""
    for parameter in parameters:
        parameter.grad = None
