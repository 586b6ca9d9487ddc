"""ZeroLayout: DeepSpeed's ZeRO, whose optimizer steps on flat tensors made of many parameters.

At stage 3, a parameter is one flat shard per rank, and the model itself holds an empty tensor. Everything here reads
attributes that DeepSpeed keeps on parameters and on its optimizer wrapper (as of DeepSpeed 0.19.8,
https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/zero/partition_parameters.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightrl.comm import Comm
from lightrl.engines.base import NamedTensors
from lightrl.engines.weights.fingerprint import Span
from lightrl.models.router_biases import as_sent
from lightrl.strategy.layout.buckets import buckets
from lightrl.strategy.layout.plain import Piece, PlainLayout, SavedTensors, pieces_of_shards

ENGINE = "_deepspeed_engine"  # a key of the model's __dict__, so that the engine lives as long as the model


class ZeroLayout(PlainLayout):
    """Reads and writes parameters and optimizer states under any ZeRO stage."""

    def __init__(
        self, comm: Comm, deepspeed: Any, *, device: torch.device, bucket_bytes: int, cpu_adam: bool = False
    ) -> None:
        """Sets up how parameters are gathered.

        Args:
            device: where gathered tensors lie.
            bucket_bytes: the size of the whole parameters gathered at a time.
            cpu_adam: whether the optimizer is DeepSpeed's own, whose step counter is a plain number.
        """
        super().__init__(comm)
        self._deepspeed = deepspeed
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._cpu_adam = cpu_adam

    def whole_shape(self, parameter: Tensor) -> torch.Size:
        shape: torch.Size = parameter.ds_shape if is_partitioned(parameter) else parameter.shape  # type: ignore[attr-defined]
        return shape

    def is_whole(self, tensor: Tensor) -> bool:
        return not is_partitioned(tensor)

    def detached(self, parameter: Tensor) -> Tensor:
        return parameter if is_partitioned(parameter) else parameter.detach()

    def shard(self, parameter: Tensor) -> Tensor:
        return own_shard(parameter, self.comm.rank) if is_partitioned(parameter) else parameter.detach()

    def shard_of_whole(self, parameter: Tensor, whole: Tensor) -> Tensor:
        return own_part(parameter, whole, self.comm.rank) if is_partitioned(parameter) else whole

    def pieces(self, named: NamedTensors) -> Iterator[Piece]:
        return pieces_of_shards(self, named)

    def span(self, parameter: Tensor) -> Span:
        return Span(own_range(parameter, self.comm.rank)[0]) if is_partitioned(parameter) else Span()

    def is_first_holder(self, parameter: Tensor) -> bool:
        return is_partitioned(parameter) or super().is_first_holder(parameter)

    @torch.no_grad()
    def add(self, parameter: Tensor, delta: Tensor) -> Tensor:
        """Returns a partitioned parameter whole, because gather_named cannot take its shard, a range of numbers."""
        return self.gather(parameter) + delta if is_partitioned(parameter) else super().add(parameter, delta)

    def gather_named(self, named: NamedTensors, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        for bucket in buckets(named, _num_bytes, self._bucket_bytes):
            partitioned = [tensor for _, tensor in bucket if is_partitioned(tensor)]
            with self._deepspeed.zero.GatheredParameters(partitioned, enabled=bool(partitioned)):
                for name, tensor in bucket:
                    whole = tensor.detach().to(self._device)
                    yield name, as_sent(name, whole, dtype)

    @torch.no_grad()
    def write_whole(self, target: Tensor, whole: Tensor) -> None:
        if is_partitioned(target):
            write_whole(target, whole, self.comm.rank)
        else:
            super().write_whole(target, whole)

    @torch.no_grad()
    def write_shard(self, parameter: Tensor, shard: Tensor) -> None:
        super().write_shard(parameter, shard)
        if is_partitioned(parameter) and parameter.numel():  # also kept whole
            parameter.data.copy_(self.comm.all_gather(shard).view(parameter.shape))

    def finish_writing(self, model: nn.Module) -> None:
        """Updates the flat copies that ZeRO steps."""
        zero = zero_of(model)
        if zero is not None:
            zero.refresh_fp32_params()

    # ---- Optimizer states --------------------------------------------------------------------------------------

    def optimizer_states(self, model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
        """Gathers one parameter's states at a time, as a rank's part is not rows but a range over parameters."""
        zero = zero_of(model)
        if zero is None:
            yield from super().optimizer_states(model, optimizer)
            return
        flats = _flat_of_each(zero)
        _link_states(zero)
        for name, parameter in sorted(model.named_parameters()):
            flat = flats.get(id(parameter))
            state = optimizer.state.get(flat, {}) if flat is not None else {}
            for key in sorted(state):
                if torch.is_tensor(state[key]) and flat is not None and state[key].shape == flat.shape:
                    yield f"{name}/{key}", self._deepspeed.utils.safe_get_full_optimizer_state(parameter, key)
                else:
                    yield f"{name}/{key}", torch.as_tensor(state[key], dtype=torch.float32)  # the number of steps

    def load_optimizer_states(self, model: nn.Module, optimizer: Optimizer, saved: SavedTensors) -> None:
        zero = zero_of(model)
        if zero is None:
            super().load_optimizer_states(model, optimizer, saved)
            return
        flats = _flat_of_each(zero)
        named = [(name, parameter) for name, parameter in sorted(model.named_parameters()) if id(parameter) in flats]
        for name, parameter in named:
            self._make_state(optimizer, flats[id(parameter)], name, self.whole_shape(parameter), saved)
        _link_states(zero)
        for name, parameter in named:
            for key in saved.keys_of(name):
                full_name = f"{name}/{key}"
                if saved.shape_of(full_name) == self.whole_shape(parameter):
                    self._write_state(parameter, key, saved[full_name].to(self._device))

    def _write_state(self, parameter: Any, key: str, whole: Tensor) -> None:
        if not is_partitioned(parameter):
            self._deepspeed.utils.safe_set_full_optimizer_state(parameter, whole, key)
            return
        # DeepSpeed's own cut of a whole tensor takes too few numbers if the last part is padded.
        padded = torch.zeros_like(parameter.ds_tensor, dtype=whole.dtype, device=self._device).flatten()
        part = own_part(parameter, whole, self.comm.rank)
        padded[: part.numel()] = part
        self._deepspeed.utils.safe_set_local_optimizer_state(parameter, padded, key)

    def _make_state(
        self, optimizer: Optimizer, flat: Tensor, name: str, shape: torch.Size, saved: SavedTensors
    ) -> None:
        """Makes zero moments of the length of the flat tensor of many parameters, and the step counter."""
        state = optimizer.state[flat]
        for key in saved.keys_of(name):
            full_name = f"{name}/{key}"
            if saved.shape_of(full_name) == shape:
                state.setdefault(key, torch.zeros_like(flat, dtype=saved.dtype_of(full_name)))
            elif self._cpu_adam:
                state[key] = int(saved[full_name])
            else:
                state[key] = saved[full_name].to(flat.device)

    # ---- The memory behind a model: by storages, since DeepSpeed's offload_states() takes FusedAdam only at stage 3 --

    def parameter_tensors(self, model: nn.Module) -> list[Tensor]:
        plain = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
        return [*plain, *(parameter.ds_tensor for parameter in partitioned_parameters(model))]

    def gradient_tensors(self, model: nn.Module) -> list[Tensor]:
        zero = zero_of(model)
        kept = [getattr(parameter, "grad_accum", None) for parameter in model.parameters()]
        for groups in (getattr(zero, "averaged_gradients", None), getattr(zero, "all_grad_tensors", None)):
            for tensors in (groups or {}).values():
                kept.extend(tensors or [])
        return [*super().gradient_tensors(model), *(tensor for tensor in kept if tensor is not None)]

    def optimizer_tensors(self, model: nn.Module | None, optimizer: Optimizer) -> list[Tensor]:
        zero = zero_of(model) if model is not None else None
        if zero is None or model is None:
            return super().optimizer_tensors(model, optimizer)
        weights = {tensor.untyped_storage().data_ptr() for tensor in self.parameter_tensors(model)}
        flats = {id(flat): flat for flat in _flat_of_each(zero).values()}.values()
        states = [value for flat in flats for value in optimizer.state.get(flat, {}).values()]
        moments = [value for value in states if torch.is_tensor(value) and value.dim()]
        # At stage 3 in float32 the optimizer steps on the shards themselves.
        return moments + [flat for flat in flats if flat.untyped_storage().data_ptr() not in weights]

    def drop_gradients(self, model: nn.Module) -> None:
        """Drops the gradients in the same way as a skipped step() of DeepSpeed."""
        super().drop_gradients(model)
        zero = zero_of(model)
        if zero is None:
            return
        zero.zero_grad(set_to_none=True)
        zero.reset_cpu_buffers()
        zero.micro_step_id = 0 if _is_stage_3(zero) else -1  # the next gradient is written, not added
        for name in ("_offload_accumulated_param_ids", "_offload_boundary_param_ids"):
            getattr(zero, name, set()).clear()
        for groups in (zero.averaged_gradients, getattr(zero, "all_grad_tensors", {})):
            for group in groups:
                groups[group] = None


def zero_of(model: nn.Module) -> Any:
    """Returns DeepSpeed's sharding wrapper of the model's optimizer; None at stage 0 and for a model without one."""
    engine = model.__dict__.get(ENGINE)
    return engine.optimizer if engine is not None and hasattr(engine.optimizer, "refresh_fp32_params") else None


def is_partitioned(parameter: Tensor) -> bool:
    """Returns whether ZeRO-3 has sharded the parameter."""
    return hasattr(parameter, "ds_tensor")


def partitioned_parameters(model: nn.Module) -> list[Any]:
    """Returns the parameters that ZeRO-3 has sharded."""
    return [parameter for parameter in model.parameters() if is_partitioned(parameter)]


def own_range(parameter: Any, rank: int) -> tuple[int, int]:
    """Returns this rank's range of the flattened parameter; the last shards have padding, or only padding."""
    size, total = parameter.ds_tensor.numel(), parameter.ds_numel
    return min(rank * size, total), min((rank + 1) * size, total)


def own_shard(parameter: Any, rank: int) -> Tensor:
    """Returns this rank's values, [numbers], by reference and without the padding."""
    start, end = own_range(parameter, rank)
    shard: Tensor = parameter.ds_tensor.detach().reshape(-1)[: end - start]
    return shard


def own_part(parameter: Any, whole: Tensor, rank: int) -> Tensor:
    """Returns the own_shard() of a parameter as if it had the values of `whole`."""
    start, end = own_range(parameter, rank)
    return whole.reshape(-1)[start:end]


@torch.no_grad()
def write_whole(parameter: Any, whole: Tensor, rank: int) -> None:
    """Writes this rank's part of a whole tensor that every rank holds; no collective."""
    own_shard(parameter, rank).copy_(own_part(parameter, whole, rank))
    if parameter.data.numel() == parameter.ds_numel:  # a parameter too small to be worth a gather is also kept whole
        parameter.data.copy_(whole.view(parameter.data.shape))


class ParametersToPartition(nn.Module):
    """Stands for a model in deepspeed.zero.Init, which converts the parameters that this yields one by one.

    A meta parameter gets memory just before its conversion, so a rank holds its shards and one whole parameter.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.__dict__["model"] = model  # not registered as a submodule
        self._device = device

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yields every parameter once, with memory behind it."""
        slots: dict[int, list[tuple[nn.Module, str]]] = {}  # a tied parameter has several places
        for module in self.__dict__["model"].modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    slots.setdefault(id(parameter), []).append((module, name))
        for owners in slots.values():
            module, name = owners[0]
            parameter = module._parameters[name]
            assert parameter is not None
            if parameter.is_meta:
                empty = torch.empty_like(parameter, device=self._device)
                parameter = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                for module, name in owners:
                    module._parameters[name] = parameter
            yield parameter


class DataclassOutputs:
    """Shows a model's outputs as a tuple to ZeRO-3's hooks, but as the original dataclass to the caller.

    The hooks look for tensors in tuples, lists and dicts, and gather the weights for the backward where they find them
    (apply_to_tensors_only in https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/zero/utils.py).
    This can go when they look into dataclasses too.
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
        """Restores the dataclass; this forward hook must run after those of ZeRO-3."""
        if self._kind is None:
            return output
        return self._kind(**dict(zip(self._kind.__dataclass_fields__, output, strict=True)))


def _is_stage_3(zero: Any) -> bool:
    return hasattr(zero, "fp32_partitioned_groups_flat")


def _flat_of_each(zero: Any) -> dict[int, Tensor]:
    """Maps the id of each trained parameter to the flat float32 tensor with this rank's part, which is stepped."""
    if _is_stage_3(zero):
        pairs = zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True)
    else:
        pairs = zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True)
    return {id(parameter): flat for group, flat in pairs for parameter in group}


def _link_states(zero: Any) -> None:
    """Rebuilds the table in which stages 1 and 2 look up a parameter's states.

    DeepSpeed builds it only once, when the first group of parameters has stepped and others have no states yet.
    """
    if hasattr(zero, "_hp_optimizer_states_linked"):
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()


def _num_bytes(tensor: Tensor) -> int:
    numel: int = getattr(tensor, "ds_numel", tensor.numel())
    return numel * tensor.element_size()
