"""DeepSpeed: ZeRO 0 (replicas), 1 (optimizer states sharded), 2 (gradients too) and 3 (parameters too).

The model that is handed in stays the model; DeepSpeed's engine stands beside it and is driven by its calls. Parameters
and optimizer states are float32 at every stage, and bfloat16 is torch's autocast, as in every other strategy: ZeRO-0
with DeepSpeed's own bfloat16 takes an empty first step of Adam, and the others round the weights that they start from.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import warnings
from collections.abc import Iterable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightrl.strategy import critic_warmup
from lightrl.strategy.single import compute_in_bfloat16, enable_gradient_checkpointing
from lightrl.strategy.state_files import Piece, TensorReader
from lightrl.strategy.torch_native import TorchStrategy, broadcast_buffers, broadcast_from_main, ensure_process_group
from lightrl.strategy.zero_partitions import (
    DataclassOutputs,
    ParametersToPartition,
    is_partitioned,
    own_part,
    own_shard,
    partitioned_parameters,
    write_whole,
)

_ENGINE = "_deepspeed_engine"  # both in the model's __dict__, so that they live as long as the model
_OUTPUTS = "_deepspeed_outputs"
_OFTEN_LEFT = ("pre_bwd_fn", "post_bwd_fn", "applied_pre_backward_ref_cnt")  # what destroy() leaves on the modules


class DeepSpeedStrategy(TorchStrategy):
    """The stage is --deepspeed.zero_stage. A model gets its engine when its optimizer is registered."""

    steps_whole_matrices = False

    def __init__(
        self, seed: int, max_norm: float, micro_train_batch_size: int, train_batch_size: int, args: Any | None = None
    ) -> None:
        super().__init__(seed, max_norm, micro_train_batch_size, train_batch_size, args)
        self.options.deepspeed.check()
        if self.options.compile:
            raise ValueError(
                "--compile does not go with --strategy deepspeed. Use single, ddp or fsdp, or leave it out."
            )
        if importlib.util.find_spec("deepspeed") is None:
            raise ImportError('--strategy deepspeed needs DeepSpeed. Install it: pip install "lightrl[deepspeed]"')
        self.stage = self.options.deepspeed.zero_stage

    def setup_distributed(self, timeout: timedelta | None = None, num_gpu_per_node: int = 8) -> None:
        super().setup_distributed(timeout, num_gpu_per_node)
        if (
            self.options.deepspeed.cpu_adam
            and self.device.type != "cpu"
            and not self.options.deepspeed.offload_optimizer
        ):
            raise ValueError("--deepspeed.cpu_adam steps in host memory: add --deepspeed.offload_optimizer True.")
        self.comm = ensure_process_group(self.comm, self.device)
        self._deepspeed = load_deepspeed(self.device)

    @property
    def averaging_ranks(self) -> int:
        return self.comm.world

    @property
    def materializes_weights(self) -> bool:
        return self.comm.is_main

    # ---- Models and their engines ------------------------------------------------------------------------------

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Rank 0's weights on every rank, at stage 3 its shard of them; the others' may be on the meta device."""
        enable_gradient_checkpointing(self.unwrap_model(model), self.options.gradient_checkpointing)
        if self.options.dtype == "bfloat16":
            compute_in_bfloat16(model, self.device)
        if self.stage < 3:
            broadcast_from_main(model, self.device, self.comm)
            return model
        whole = ParametersToPartition(model, self.device)
        self._deepspeed.zero.Init(module=whole, config_dict_or_path=self._config())  # rank 0's, broadcast
        broadcast_buffers(model, self.device, self.comm)
        model.__dict__[_OUTPUTS] = DataclassOutputs(model)
        self._start_engine(model, None)  # it may have to run before it has an optimizer, or never get one
        return model

    def register(self, model: nn.Module, optimizer: Optimizer, scheduler: Any = None) -> None:
        if optimizer.state:
            raise ValueError("The optimizer has taken steps before DeepSpeed had it. Prepare first, then train.")
        for group in optimizer.param_groups:
            if critic_warmup.steps_left(group):
                self._freeze_in_warmup(group)
        self._start_engine(model, optimizer)
        if self.stage > 0:
            optimizer.register_step_pre_hook(_drop_frozen)
        super().register(model, optimizer, scheduler)

    def _freeze_in_warmup(self, group: dict[str, Any]) -> None:
        if self.options.deepspeed.offload_optimizer:
            raise ValueError(
                "A critic warm-up cannot go with --deepspeed.offload_optimizer True: turn one of them off."
            )
        for parameter in group["params"] if self.stage > 0 else []:
            parameter.register_hook(partial(_zero_in_warmup, group))

    def _start_engine(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        _stop_engine(model)
        was_training = model.training
        engine, *_ = self._deepspeed.initialize(
            model=model, optimizer=optimizer, config=self._config(), dist_init_required=False
        )
        model.train(was_training)
        model.__dict__[_ENGINE] = engine
        if _OUTPUTS in model.__dict__:
            engine.restore_hook = model.register_forward_hook(model.__dict__[_OUTPUTS].restore)

    def _config(self) -> dict[str, Any]:
        chosen = self.options.deepspeed
        host = {"device": "cpu", "pin_memory": self.device.type == "cuda"}
        zero: dict[str, Any] = {
            "stage": self.stage,
            "reduce_bucket_size": (chosen.bucket_mb << 20) // 4,  # in elements
            "allgather_bucket_size": (chosen.bucket_mb << 20) // 4,
            "memory_efficient_linear": False,  # it replaces torch's linear in the whole process
        }
        zero |= {"offload_optimizer": host} if chosen.offload_optimizer else {}
        zero |= {"offload_param": host} if chosen.offload_param else {}
        zero |= {"stage3_param_persistence_threshold": chosen.param_persistence_threshold} if self.stage == 3 else {}
        return {
            "train_micro_batch_size_per_gpu": 1,  # it counts samples by this, and nothing else
            "gradient_accumulation_steps": 1,
            # step() ends an accumulation, whatever number of micro-batches came before. Stage 0 does without step().
            "managed_gradient_accumulation": self.stage == 0,
            "gradient_clipping": 0.0,  # set at each step
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": False},
            "steps_per_print": 1 << 40,
        }

    # ---- Training ----------------------------------------------------------------------------------------------

    def create_optimizer(self, model: nn.Module, **kwargs: Any) -> Optimizer:
        if not self.options.deepspeed.cpu_adam:
            return super().create_optimizer(model, **kwargs)
        plain = super().create_optimizer(model, **{**kwargs, "fused": False})
        settings = {name: plain.defaults[name] for name in ("betas", "eps")}
        kept = ("params", "weight_decay", "lr", "lr_scale")
        groups = [{name: group[name] for name in kept} for group in plain.param_groups]
        optimizer: Optimizer = self._deepspeed.ops.adam.DeepSpeedCPUAdam(groups, adamw_mode=True, **settings)
        return optimizer

    def run_backward(self, loss: Tensor, model: nn.Module) -> None:
        engine = _engine_of(model)
        if self.stage == 0:
            engine.set_gradient_accumulation_boundary(False)  # nothing is reduced before reduce_gradients()
        else:
            # engine.forward() does this by hooks on the outputs; here the model is called, not the engine.
            engine.optimizer.clear_backward_seen_flag()
            engine.optimizer.backward_prologue()
            engine.optimizer.enter_backward()
        engine.backward(loss, scale_wrt_gas=False)

    def reduce_gradients(self, model: nn.Module, parameters: list[Tensor]) -> None:
        """At stage 0 only: the others reduce in the backward or in step()."""
        engine = _engine_of(model)
        engine.set_gradient_accumulation_boundary(True)
        engine.allreduce_gradients()

    def apply_gradients(self, optimizer: Optimizer, model: nn.Module, divisor: float) -> tuple[float, bool]:
        if self.stage == 0:
            return super().apply_gradients(optimizer, model, divisor)
        engine = _engine_of(model)
        zero = engine.optimizer
        zero.clip_grad = self.max_norm
        zero.override_loss_scale(divisor)  # what the gradients are divided by
        engine.step()  # skips on every rank, and clears up, if the norm over all ranks is not finite
        zero.override_loss_scale(1.0)  # it would also multiply the next loss
        grad_norm = float(engine.get_global_grad_norm())
        stepped = not zero.overflow
        assert stepped == math.isfinite(grad_norm), (stepped, grad_norm)
        return grad_norm, stepped

    # ---- Whole tensors -----------------------------------------------------------------------------------------

    def whole_shape(self, parameter: Tensor) -> torch.Size:
        shape: torch.Size = parameter.ds_shape if is_partitioned(parameter) else parameter.shape  # type: ignore[attr-defined]
        return shape

    def readable(self, parameter: Tensor) -> Tensor:
        return parameter if is_partitioned(parameter) else parameter.detach()

    def shard_of(self, parameter: Tensor) -> Tensor:
        return own_shard(parameter, self.comm.rank) if is_partitioned(parameter) else parameter.detach()

    def write_shard(self, parameter: Tensor, shard: Tensor) -> None:
        super().write_shard(parameter, shard)
        if is_partitioned(parameter) and parameter.numel():  # one that is kept whole as well
            parameter.data.copy_(self.comm.all_gather(shard).view(parameter.shape))

    def part_of(self, parameter: Tensor, whole: Tensor) -> Tensor:
        return own_part(parameter, whole, self.comm.rank) if is_partitioned(parameter) else whole

    def plus(self, parameter: Tensor, delta: Tensor) -> Tensor:
        """A partitioned one comes back whole: its shard is a range of numbers, which nothing here can gather."""
        return self.gather_whole(parameter) + delta if is_partitioned(parameter) else super().plus(parameter, delta)

    def num_holders(self, parameter: Tensor) -> int:
        return 1 if is_partitioned(parameter) else self.comm.world

    def gather_named(
        self, named: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters of --sync_bucket_mb are gathered at a time."""
        for bucket in _buckets(named, self.options.sync_bucket_mb << 20):
            gathered = [tensor for _, tensor in bucket if is_partitioned(tensor)]
            with self._deepspeed.zero.GatheredParameters(gathered, enabled=bool(gathered)):
                for name, tensor in bucket:
                    whole = tensor.detach().to(self.device)
                    yield name, whole.to(dtype) if dtype and whole.is_floating_point() else whole

    def gather_whole(self, tensor: Tensor) -> Tensor:
        ((_, whole),) = self.gather_named([("", tensor)])
        return whole

    def copy_whole(self, target: Tensor, whole: Tensor) -> None:
        if is_partitioned(target):
            write_whole(target, whole, self.comm.rank)
        else:
            super().copy_whole(target, whole)

    def after_weights_loaded(self, model: nn.Module) -> None:
        """ZeRO steps on a copy of its own."""
        zero = _zero_of(model)
        if zero is not None:
            zero.refresh_fp32_params()

    # ---- Optimizer states --------------------------------------------------------------------------------------

    def optimizer_pieces(self, model: nn.Module, optimizer: Optimizer) -> Iterator[Piece]:
        """One parameter's state is gathered at a time: a rank's part is no rows but a range of many parameters."""
        zero = _zero_of(model)
        if zero is None:
            yield from super().optimizer_pieces(model, optimizer)
            return
        flats = _flat_of_each(zero)
        _link_states(zero)
        for name, parameter in sorted(model.named_parameters()):
            flat = flats.get(id(parameter))
            state = optimizer.state.get(flat, {}) if flat is not None else {}
            for key in sorted(state):
                if torch.is_tensor(state[key]) and flat is not None and state[key].shape == flat.shape:
                    whole = self._deepspeed.utils.safe_get_full_optimizer_state(parameter, key)
                    yield Piece(f"{name}/{key}", whole)
                else:
                    yield Piece(f"{name}/{key}", torch.as_tensor(state[key], dtype=torch.float32))  # number of steps

    def load_optimizer_states(self, model: nn.Module, optimizer: Optimizer, reader: TensorReader) -> None:
        zero = _zero_of(model)
        if zero is None:
            super().load_optimizer_states(model, optimizer, reader)
            return
        flats = _flat_of_each(zero)
        named = [(name, parameter) for name, parameter in sorted(model.named_parameters()) if id(parameter) in flats]
        for name, parameter in named:
            self._make_state(optimizer, flats[id(parameter)], name, self.whole_shape(parameter), reader)
        _link_states(zero)
        for name, parameter in named:
            for key in reader.keys_of(name):
                saved = f"{name}/{key}"
                if reader.shape_of(saved) == self.whole_shape(parameter):
                    whole = reader[saved].to(self.device)
                    self._deepspeed.utils.safe_set_full_optimizer_state(parameter, whole, key)

    def _make_state(
        self, optimizer: Optimizer, flat: Tensor, name: str, shape: torch.Size, reader: TensorReader
    ) -> None:
        """Moments of zero, as long as the flat tensor in which ZeRO keeps many parameters; and the number of steps."""
        state = optimizer.state[flat]
        for key in reader.keys_of(name):
            saved = f"{name}/{key}"
            if reader.shape_of(saved) == shape:
                state.setdefault(key, torch.zeros_like(flat, dtype=reader.dtype_of(saved)))
            elif self.options.deepspeed.cpu_adam:
                state[key] = int(reader[saved])
            else:
                state[key] = reader[saved].to(flat.device)

    # ---- Offload: by the storages, since DeepSpeed's offload_states() takes FusedAdam only at stage 3 -----------

    def parameter_tensors(self, model: nn.Module) -> list[Tensor]:
        shards = [parameter.ds_tensor for parameter in partitioned_parameters(model)]
        return [*super().parameter_tensors(model), *shards]

    def gradient_tensors(self, model: nn.Module) -> list[Tensor]:
        zero = _zero_of(model)
        kept = [getattr(parameter, "grad_accum", None) for parameter in model.parameters()]
        for groups in (getattr(zero, "averaged_gradients", None), getattr(zero, "all_grad_tensors", None)):
            for tensors in (groups or {}).values():
                kept.extend(tensors or [])
        return [*super().gradient_tensors(model), *(tensor for tensor in kept if tensor is not None)]

    def drop_gradients(self, model: nn.Module) -> None:
        super().drop_gradients(model)
        zero = _zero_of(model)
        if zero is None:
            return
        # What a skipped step() clears.
        zero.zero_grad(set_to_none=True)
        zero.reset_cpu_buffers()
        zero.micro_step_id = 0 if self.stage == 3 else -1  # the next gradient is written, not added
        for name in ("_offload_accumulated_param_ids", "_offload_boundary_param_ids"):
            getattr(zero, name, set()).clear()
        for groups in (zero.averaged_gradients, getattr(zero, "all_grad_tensors", {})):
            for group in groups:
                groups[group] = None

    def optimizer_tensors(self, optimizer: Optimizer) -> list[Tensor]:
        entries = [entry for entry in self._trained if entry.optimizer is optimizer]
        zero = _zero_of(entries[0].model) if entries else None
        if zero is None:
            return super().optimizer_tensors(optimizer)
        weights = {tensor.untyped_storage().data_ptr() for tensor in self.parameter_tensors(entries[0].model)}
        flats = {id(flat): flat for flat in _flat_of_each(zero).values()}.values()
        states = [value for flat in flats for value in optimizer.state.get(flat, {}).values()]
        moments = [value for value in states if torch.is_tensor(value) and value.dim()]
        # At stage 3 in float32 the optimizer steps on the shards themselves.
        return moments + [flat for flat in flats if flat.untyped_storage().data_ptr() not in weights]


def load_deepspeed(device: torch.device) -> Any:
    """Imports it for this device, inside the process group that there is."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", "0")
    # It calls these by names that torch 2.13 renamed, at every step.
    warnings.filterwarnings("ignore", ".*(reduce_scatter|all_gather_into)_tensor.* is deprecated", FutureWarning)
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)  # it warns of every optimizer but its own
    if device.type == "cpu":  # shared-memory collectives, which would be compiled now, for minutes
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo", auto_mpi_discovery=False)
    return deepspeed


def _engine_of(model: nn.Module) -> Any:
    engine = model.__dict__.get(_ENGINE)
    if engine is None or not hasattr(engine.optimizer, "param_groups"):
        raise ValueError("This model has no optimizer yet. Pass (model, optimizer, scheduler) to prepare() first.")
    return engine


def _zero_of(model: nn.Module) -> Any:
    """The sharding optimizer around the model's; None at stage 0 and for a model that does not train."""
    engine = model.__dict__.get(_ENGINE)
    return engine.optimizer if engine is not None and hasattr(engine.optimizer, "refresh_fp32_params") else None


def _stop_engine(model: nn.Module) -> None:
    engine = model.__dict__.pop(_ENGINE, None)
    if engine is None:
        return
    engine.destroy()
    hook = getattr(engine, "restore_hook", None)
    if hook is not None:
        hook.remove()
    for module in model.modules():  # they belong to the old engine, and a new one would keep them
        for name in _OFTEN_LEFT:
            module.__dict__.pop(name, None)


def _flat_of_each(zero: Any) -> dict[int, Tensor]:
    """For each trained parameter (by id) the flat float32 tensor that is stepped and that holds this rank's part."""
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        pairs = zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True)
    else:
        pairs = zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True)
    return {id(parameter): flat for group, flat in pairs for parameter in group}


def _link_states(zero: Any) -> None:
    """Makes anew the table in which stages 1 and 2 look up the states of a parameter.

    They make it once, when their first group of parameters has stepped and the others have no states yet.
    """
    if hasattr(zero, "_hp_optimizer_states_linked"):
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()


def _buckets(named: Iterable[tuple[str, Tensor]], limit_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in named:
        num_bytes = getattr(tensor, "ds_numel", tensor.numel()) * tensor.element_size()
        if bucket and size + num_bytes > limit_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += num_bytes
    if bucket:
        yield bucket


# ---- Critic warm-up: its groups must neither move nor count in the norm, which ZeRO takes of all gradients -------


def _zero_in_warmup(group: dict[str, Any], gradient: Tensor) -> Tensor | None:
    return torch.zeros_like(gradient) if critic_warmup.steps_left(group) else None


def _drop_frozen(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    critic_warmup.drop_frozen_gradients(optimizer)
