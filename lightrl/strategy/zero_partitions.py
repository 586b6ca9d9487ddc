"""How ZeRO-3 keeps a parameter: one flat shard per rank, and an empty tensor where the model looks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def is_partitioned(parameter: Tensor) -> bool:
    return hasattr(parameter, "ds_tensor")


def partitioned_parameters(model: nn.Module) -> list[Any]:
    return [parameter for parameter in model.parameters() if is_partitioned(parameter)]


def own_range(parameter: Any, rank: int) -> tuple[int, int]:
    """Where this rank's shard lies in the flattened parameter; the last shards are padded, or padding altogether."""
    size, total = parameter.ds_tensor.numel(), parameter.ds_numel
    return min(rank * size, total), min((rank + 1) * size, total)


def own_shard(parameter: Any, rank: int) -> Tensor:
    """This rank's values, by reference and without the padding: [numbers]."""
    start, end = own_range(parameter, rank)
    shard: Tensor = parameter.ds_tensor.detach().reshape(-1)[: end - start]
    return shard


def own_part(parameter: Any, whole: Tensor, rank: int) -> Tensor:
    """What own_shard would give of a parameter of these values."""
    start, end = own_range(parameter, rank)
    return whole.reshape(-1)[start:end]


@torch.no_grad()
def write_whole(parameter: Any, whole: Tensor, rank: int) -> None:
    """This rank's part of a whole tensor that every rank holds; no collective."""
    own_shard(parameter, rank).copy_(own_part(parameter, whole, rank))
    if parameter.data.numel() == parameter.ds_numel:  # one too small to be worth a gather is kept whole as well
        parameter.data.copy_(whole.view(parameter.data.shape))


class ParametersToPartition(nn.Module):
    """Stands for a model before deepspeed.zero.Init, which converts what parameters() yields, one after the other.

    Those on the meta device become real just then, so that a rank holds its shards and one whole parameter at a time.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.__dict__["model"] = model  # not as a submodule
        self._device = device

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        slots: dict[int, list[tuple[nn.Module, str]]] = {}  # a tied parameter has several
        for module in self.__dict__["model"].modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    slots.setdefault(id(parameter), []).append((module, name))
        for places in slots.values():
            module, name = places[0]
            parameter = module._parameters[name]
            assert parameter is not None
            if parameter.is_meta:
                empty = torch.empty_like(parameter, device=self._device)
                parameter = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                for module, name in places:
                    module._parameters[name] = parameter
            yield parameter


class DataclassOutputs:
    """Shows a model's outputs as a tuple to the hooks of ZeRO-3, and as the dataclass that they were to the caller.

    The hooks look for tensors in tuples, lists and dicts, and gather the weights for the backward where they find them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._forward = model.forward
        self._kind: type[Any] | None = None
        model.forward = self._as_tuple

    def _as_tuple(self, *args: Any, **kwargs: Any) -> Any:
        output = self._forward(*args, **kwargs)
        names = getattr(type(output), "__dataclass_fields__", None)
        self._kind = None
        if names is None or isinstance(output, dict):  # a ModelOutput of transformers is both
            return output
        self._kind = type(output)
        return tuple(getattr(output, name) for name in names)

    def restore(self, module: nn.Module, args: Any, output: Any) -> Any:
        """A forward hook that must come after those of ZeRO-3."""
        if self._kind is None:
            return output
        return self._kind(**dict(zip(self._kind.__dataclass_fields__, output, strict=True)))
