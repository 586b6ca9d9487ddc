"""What every strategy shares whose models are torch modules with plain or DTensor parameters."""

from __future__ import annotations

import io
import math
import pickle
import random
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightrl.checkpoint import MARKER_NAME, CheckpointDirectory
from lightrl.comm import Comm, backend_for
from lightrl.engines.weight_sync import Fingerprint, fingerprint
from lightrl.models import lora
from lightrl.strategy import critic_warmup, state_files
from lightrl.strategy.background_save import BackgroundSave
from lightrl.strategy.base import OptimizerStep, StrategyBase, persistent_buffers
from lightrl.strategy.gradients import clip_gradients
from lightrl.strategy.muon import MuonWithAdamW
from lightrl.strategy.parameter_groups import parameter_groups
from lightrl.strategy.row_shards import own_rows
from lightrl.strategy.sharding import local
from lightrl.strategy.state_files import Piece, StateWriter, TensorReader
from lightrl.strategy.weight_average import WeightAverage

_MEGABYTE = 1 << 20


class TorchStrategy(StrategyBase):
    """Optimizer, accumulation, clipping and checkpoints; a subclass says how a model is placed."""

    steps_whole_matrices: ClassVar[bool] = True  # False where an optimizer sees a shard of each parameter

    @property
    def averaging_ranks(self) -> int:
        """How many ranks the back end averages a gradient over; 1 if it has no reduction."""
        return 1

    @property
    def gradient_parts(self) -> int:
        """How many ranks each bring a part of one micro-batch's gradient."""
        return 1

    def run_backward(self, loss: Tensor, model: nn.Module) -> None:
        """For a back end that must be told that a backward begins."""
        loss.backward()

    def reduce_gradients(self, model: nn.Module, parameters: list[Tensor]) -> None:
        """Called once per update, before the clip: for a back end whose backward() reduces nothing."""

    def apply_gradients(self, optimizer: Optimizer, model: nn.Module, divisor: float) -> tuple[float, bool]:
        """Divides, clips, and steps if the norm is finite on every rank; drops the gradients.

        Returns the norm over all ranks before the clip, and whether it stepped.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.reduce_gradients(model, parameters)
        if divisor != 1:
            _scale_gradients(parameters, 1 / divisor)
        critic_warmup.drop_frozen_gradients(optimizer)
        grad_norm = float(clip_gradients(parameters, self.max_norm))
        is_finite = self.comm.agree(math.isfinite(grad_norm))
        if is_finite:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return grad_norm, is_finite

    # ---- Where a back end keeps a parameter ----------------------------------------------------------------------

    def whole_shape(self, parameter: Tensor) -> torch.Size:
        return parameter.shape

    def readable(self, parameter: Tensor) -> Tensor:
        """What gather_whole, gather_named and copy_whole take: without the autograd of the parameter."""
        return parameter.detach()

    def shard_of(self, parameter: Tensor) -> Tensor:
        """This rank's part, by reference."""
        return local(parameter).detach()

    def part_of(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """What shard_of would give if the parameter had these values, which every rank holds; no collective."""
        if not isinstance(parameter, DTensor):
            return whole
        mesh, placements = parameter.device_mesh, parameter.placements
        return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()

    def num_holders(self, parameter: Tensor) -> int:
        """Ranks that hold the same values of it as this one."""
        if not isinstance(parameter, DTensor):
            return self.comm.world
        sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
        num_shards = math.prod(size for placement, size in sizes if not placement.is_replicate())
        return self.comm.world // num_shards

    def after_weights_loaded(self, model: nn.Module) -> None:
        """Called when copy_whole has written all of a model's parameters: for a back end that keeps copies."""

    # ---- Optimizer ---------------------------------------------------------------------------------------------

    def create_optimizer(self, model: nn.Module, **kwargs: Any) -> Optimizer:
        optim = self.options.optim
        groups = parameter_groups(
            model,
            optim,
            lr=kwargs.pop("lr", self.options.lr),
            weight_decay=kwargs.pop("weight_decay", optim.weight_decay),
            shape_of=self.whole_shape,
        )
        settings = {"betas": optim.betas, "eps": optim.eps, "fused": True, **kwargs}
        if optim.name == "muon":
            if not self.steps_whole_matrices:
                raise ValueError(
                    f"--optim.name muon needs whole matrices, which {type(self).__name__} does not keep on a rank. Use "
                    "--strategy ddp or single, or --optim.name adamw."
                )
            return MuonWithAdamW(groups, momentum=optim.momentum, **settings)
        return torch.optim.AdamW(groups, **settings)

    def backward(self, loss: Tensor, model: nn.Module, optimizer: Optimizer, **kwargs: Any) -> None:
        weight = kwargs.pop("weight", None)
        if kwargs:
            raise TypeError(f"backward() takes no {', '.join(sorted(kwargs))}; known: weight.")
        if weight is not None:
            self.run_backward(self.grad_scaler.scale(loss * (weight * self.averaging_ranks)), model)
            return
        # Reduced at every call: where the accumulation ends is known only when optimizer_step is called.
        with self.before_micro_batch(model, True):
            mean = loss * (self.gradient_parts / self.accumulation_steps)
            self.run_backward(self.grad_scaler.scale(mean), model)
        self._pending_micro_batches[optimizer] = self._pending_micro_batches.get(optimizer, 0) + 1

    def optimizer_step(
        self, optimizer: Optimizer, model: nn.Module, scheduler: Any, name: str = "model", **kwargs: Any
    ) -> OptimizerStep:
        is_boundary = kwargs.pop("is_boundary", None)
        if kwargs:
            raise TypeError(f"optimizer_step() takes no {', '.join(sorted(kwargs))}; known: is_boundary.")
        lr_list = [0.0 if critic_warmup.steps_left(group) else float(group["lr"]) for group in optimizer.param_groups]
        pending = self._pending_micro_batches.get(optimizer, 0)  # 0: the gradient came by train_batch or from outside
        if is_boundary is None:
            is_boundary = pending == 0 or pending >= self.accumulation_steps
        if not is_boundary:
            return OptimizerStep(grad_norm=0.0, lr_list=lr_list, stepped=False)
        self.require_loaded(model)
        self.require_loaded_optimizer(optimizer)
        self._pending_micro_batches[optimizer] = 0
        divisor = self.grad_scaler.get_scale()
        if 0 < pending < self.accumulation_steps:  # the mean over the micro-batches that there were
            divisor *= pending / self.accumulation_steps
        grad_norm, is_finite = self.apply_gradients(optimizer, model, divisor)
        self.grad_scaler.update(is_finite)
        if is_finite:
            critic_warmup.count_step(optimizer)
            if scheduler is not None and self.options.optim.schedule_unit == "optimizer_step":
                scheduler.step()
            average = self._averages.get(model)
            if average is not None:
                average.update(self._trained_shards(model))
        return OptimizerStep(grad_norm=grad_norm, lr_list=lr_list, skipped=not is_finite)

    # ---- The average of the weights ---------------------------------------------------------------------------

    def keep_average(self, model: nn.Module, decay: float) -> None:
        self._averages[model] = WeightAverage(self._trained_shards(model), decay)

    def _trained_shards(self, model: nn.Module) -> dict[str, Tensor]:
        named = sorted(model.named_parameters())
        return {name: self.shard_of(parameter) for name, parameter in named if parameter.requires_grad}

    @contextmanager
    def averaged_weights(self, model: nn.Module) -> Iterator[None]:
        average = self._averages.get(model)
        if average is None:
            raise ValueError("No average of this model's weights is kept. Call keep_average(model, 0.99) first.")
        self.after_forward_only(model)
        self.require_loaded(model)
        self._require_loaded_average(model)
        kept = {name: shard.clone() for name, shard in self._trained_shards(model).items()}
        self._write_shards(model, average.shards)
        try:
            yield
        finally:
            self.after_forward_only(model)
            self._write_shards(model, kept)

    def _require_loaded_average(self, model: nn.Module) -> None:
        """It leaves the device, and comes back, with the optimizer's states."""
        for entry in self._trained:
            if entry.model is model:
                self.require_loaded_optimizer(entry.optimizer)

    @torch.no_grad()
    def _write_shards(self, model: nn.Module, shards: dict[str, Tensor]) -> None:
        named = dict(model.named_parameters())
        for name in sorted(shards):
            self.write_shard(named[name], shards[name])

    def write_shard(self, parameter: Tensor, shard: Tensor) -> None:
        """What shard_of gives; every rank must call it."""
        self.shard_of(parameter).copy_(shard)

    def average_tensors(self, optimizer: Optimizer) -> list[Tensor]:
        models = [entry.model for entry in self._trained if entry.optimizer is optimizer]
        return [shard for model in models if model in self._averages for shard in self._averages[model].shards.values()]

    def _trained_tensors(self, model: nn.Module) -> list[tuple[str, Tensor]]:
        return [(name, self.readable(item)) for name, item in sorted(model.named_parameters()) if item.requires_grad]

    def _read_average(self, path: Path, model: nn.Module) -> None:
        """Through the weights themselves, which are read after it."""
        reader = TensorReader(path, "ema")
        named = dict(model.named_parameters())
        for name in sorted(self._averages[model].shards):
            if name not in reader.names:
                raise ValueError(f"{path} holds no average of {name}, which trains here.")
            self.read_into(self.readable(named[name]), reader, name)
        self._averages[model].restart(self._trained_shards(model))

    # ---- Whole tensors -----------------------------------------------------------------------------------------

    def named_parameters_of(self, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """(HF name, parameter) sorted by name, tied ones once; not the adapters."""
        self.require_loaded(model)
        return sorted(lora.plain_parameters(self.unwrap_model(model)))

    def full_parameters(self, model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        self.after_forward_only(model)
        return self.gather_named(self.merged_parameters(model), dtype)

    def merged_parameters(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """(HF name, what gather_named takes): a weight that has an adapter as a copy, made when its turn comes.

        A collective where there are adapters: every rank must iterate to the end.
        """
        adapters = lora.adapters_of(self.unwrap_model(model))
        for name, parameter in self.named_parameters_of(model):
            if name in adapters:
                yield name, self.plus(parameter, self.adapter_delta(adapters[name]))
            else:
                yield name, self.readable(parameter)

    def merged_shards(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """(HF name, parameter, this rank's part of it): by reference, with an adapter a copy. As merged_parameters."""
        adapters = lora.adapters_of(self.unwrap_model(model))
        for name, parameter in self.named_parameters_of(model):
            shard = self.shard_of(parameter)
            if name in adapters:
                shard = shard + self.part_of(parameter, self.adapter_delta(adapters[name]).to(shard.device))
            yield name, parameter, shard

    @torch.no_grad()
    def adapter_delta(self, adapter: lora.Adapter) -> Tensor:
        """What it adds to its weight, whole, on every rank; a collective."""
        parts = [("down", self.readable(adapter.down)), ("up", self.readable(adapter.up))]
        return adapter.delta(**{name: whole.clone() for name, whole in self.gather_named(parts)})

    @torch.no_grad()
    def plus(self, parameter: Tensor, delta: Tensor) -> Tensor:
        """A copy to which a whole tensor is added, for gather_named."""
        if not isinstance(parameter, DTensor):
            return parameter.detach() + delta.to(parameter.device)
        shard = self.shard_of(parameter)
        return DTensor.from_local(
            shard + self.part_of(parameter, delta.to(shard.device)),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def weight_fingerprints(self, model: nn.Module, dtype: torch.dtype | None) -> dict[str, Fingerprint]:
        """Every rank sums over the shards that it holds, on which the gather of full_parameters has no part."""
        self.after_forward_only(model)
        sums: dict[str, Tensor] = {}
        for name, parameter, shard in self.merged_shards(model):
            own = fingerprint(shard.to(dtype) if dtype and shard.is_floating_point() else shard)
            sums[name] = torch.tensor(own, dtype=torch.float64) / self.num_holders(parameter)
        total = self.comm.all_reduce(torch.stack([*sums.values()]), "sum")
        return {name: Fingerprint(*row) for name, row in zip(sums, total.tolist(), strict=True)}

    def gather_named(
        self, named: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) in the order given; every rank must iterate to the end."""
        for name, tensor in named:
            # Cast before the gather: half the bytes travel.
            yield name, self.gather_whole(tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor)

    def gather_whole(self, tensor: Tensor) -> Tensor:
        """The whole of a sharded tensor on every rank; a collective."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    @torch.no_grad()
    def copy_whole(self, target: Tensor, whole: Tensor) -> None:
        """Writes this rank's part of a whole tensor that every rank holds; no collective."""
        local(target).copy_(self.part_of(target, whole.to(target.device)))

    def get_model_state_dict(
        self, cpu_offload: bool = False, full_state_dict: bool = True, model: nn.Module | None = None
    ) -> dict[str, Tensor]:
        """The trained model's state under HF names.

        full_state_dict: whole tensors on every rank, else this rank's shards. cpu_offload: copies in host memory, else
        references to the live tensors wherever no gather was needed.
        """
        chosen = model if model is not None else self._trained_entry(None).model
        self.after_forward_only(chosen)
        if full_state_dict:
            found = ((name, self.gather_whole(readable)) for name, readable in self.merged_parameters(chosen))
        else:
            found = ((name, shard) for name, _, shard in self.merged_shards(chosen))
        return {name: tensor.to("cpu", copy=True) if cpu_offload else tensor for name, tensor in found}

    def save_pretrained(self, model: nn.Module, path: str | Path) -> None:
        """With adapters the folder holds the merged model, and adapter/ in it what peft loads."""
        super().save_pretrained(model, path)
        host = lora.host_of(model)
        if host is None:
            return
        named = [(name, self.readable(parameter)) for name, parameter in lora.trained_parameters(host)]
        whole = {name: tensor.cpu() if self.comm.is_main else tensor for name, tensor in self.gather_named(named)}
        if self.comm.is_main:
            lora.save_adapter(host, whole, Path(path) / "adapter")
        self.comm.barrier()

    # ---- Checkpoints -------------------------------------------------------------------------------------------

    def save_ckpt(
        self,
        model: nn.Module,
        save_dir: str,
        tag: str | None = None,
        max_num: int = 3,
        max_mem: int = 1000,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        companions: Mapping[str, nn.Module] | None = None,
    ) -> None:
        """A tag is a folder of its own under save_dir; at most max_num tags are kept. A companion is a folder in it.

        With --checkpoint.asynchronous it returns when the state is copied to host memory. The checkpoint counts when
        all ranks have written it: after a later update, finish_saving(), the next save, or close().
        """
        self.finish_saving()
        root = Path(save_dir) / tag if tag else Path(save_dir)
        directory = CheckpointDirectory(root, keep=max_num, max_bytes=max_mem * _MEGABYTE)
        step = self.global_step
        with self.comm.phase("checkpoint", local=True):
            client_state = _checked_client_state(client_state or {})
            temporary = directory.begin(step) if self.comm.is_main else None
        path = self.comm.broadcast_object(temporary)
        assert path is not None
        is_asynchronous = self.options.checkpoint.asynchronous
        with self.comm.phase("checkpoint"):
            writer = StateWriter(path, self.comm, deferred=is_asynchronous)
            self.write_state(writer, model, client_state)
            jobs = [*writer.jobs]
            for name, companion in sorted((companions or {}).items()):
                (path / name).mkdir(exist_ok=True)
                writer = StateWriter(path / name, self.comm, deferred=is_asynchronous)
                self.write_state(writer, companion, {})
                jobs += writer.jobs

        def commit() -> None:
            directory.commit(step, is_latest=save_latest)
            if tag:
                _drop_old_tags(Path(save_dir), max_num)

        self._saving = BackgroundSave(jobs, commit)
        if not is_asynchronous:
            self.finish_saving()

    def poll_saving(self) -> None:
        if self._saving is not None and self.comm.agree(self._saving.is_written):
            self.finish_saving()

    def finish_saving(self) -> None:
        saving, self._saving = self._saving, None
        if saving is None:  # on every rank, since all of them save together
            return
        with self.comm.phase("checkpoint", local=True):
            saving.wait()
            if saving.error is not None:
                raise RuntimeError(f"A checkpoint could not be written: {saving.error}") from saving.error
        with self.comm.phase("checkpoint", local=True):
            if self.comm.is_main:
                saving.commit()

    def write_state(self, writer: StateWriter, model: nn.Module, client_state: dict[str, Any]) -> None:
        """Everything a run needs to go on; every rank calls it, each writes files of its own name."""
        self.after_forward_only(model)
        self.require_loaded(model)
        writer.add_tensors("model", self.pieces_of(self._saved_tensors(model)))
        if model in self._averages:
            with self.averaged_weights(model):
                writer.add_tensors("ema", self.pieces_of(self._trained_tensors(model)))
        misc: dict[str, Any] = {"global_step": self.global_step, "client_state": client_state}
        misc["has_average"] = model in self._averages
        entry = next((entry for entry in self._trained if entry.model is model), None)
        if entry is not None:
            self.require_loaded_optimizer(entry.optimizer)
            writer.add_tensors("optimizer", self.optimizer_pieces(model, entry.optimizer))
            misc["has_optimizer"] = True
            misc["frozen_steps"] = critic_warmup.state_of(entry.optimizer)
            misc["grad_scaler"] = self.grad_scaler.state_dict()
            misc["scheduler"] = _plain_state(entry.scheduler) if entry.scheduler is not None else None
        writer.add_object(f"rng-rank{self.comm.rank:05d}-of-{self.comm.world:05d}.pt", _rng_state())
        if self.comm.is_main:
            writer.add_object("state.pt", misc)

    def pieces_of(self, named: list[tuple[str, Tensor]]) -> Iterator[Piece]:
        """What this rank writes of each tensor: its rows; gathered is only what is sharded in another way."""
        others = []
        for name, tensor in named:
            rows = own_rows(tensor)
            if rows is None:
                others.append((name, tensor))
                continue
            stop = rows.stop if rows.is_first_replica else rows.start
            yield Piece(name, local(tensor).detach(), (rows.start, stop), tensor.shape[0])
        for name, whole in self.gather_named(others):
            yield Piece(name, whole)

    def _saved_tensors(self, model: nn.Module) -> list[tuple[str, Tensor]]:
        """All that a checkpoint holds of a model: every parameter once, and the persistent buffers.

        With adapters only what trains: the rest is as it was loaded.
        """
        if lora.has_adapters(model):
            named = lora.trained_parameters(model)
            return [(name, self.readable(parameter)) for name, parameter in named]
        named = sorted(model.named_parameters())
        return [*((name, self.readable(parameter)) for name, parameter in named), *persistent_buffers(model)]

    def optimizer_pieces(self, model: nn.Module, optimizer: Optimizer) -> Iterator[Piece]:
        """Named parameter name / state key, in one order on all ranks; every rank must iterate it."""
        named = sorted(model.named_parameters())
        states = [(name, optimizer.state[parameter]) for name, parameter in named if parameter in optimizer.state]
        return self.pieces_of(state_files.state_tensors(states))

    def load_ckpt(
        self,
        model: nn.Module,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        companions: Mapping[str, nn.Module] | None = None,
    ) -> Any:
        """Returns (path, client_state); (None, None) if load_dir holds no complete checkpoint and no tag was given."""
        self.finish_saving()
        path = self._checkpoint_path(Path(load_dir), tag)
        if path is None:
            return None, None
        flags = (load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only)
        for name, companion in sorted((companions or {}).items()):
            if not (path / name / "state.pt").is_file():
                raise ValueError(f"{path} holds no {name}: it was saved by a run that had none.")
            self._load_state(path / name, companion, *flags)
        return path, self._load_state(path, model, *flags)  # last, since its RNG state is the one that stays

    def _load_state(
        self,
        path: Path,
        model: nn.Module,
        load_module_strict: bool,
        load_optimizer_states: bool,
        load_lr_scheduler_states: bool,
        load_module_only: bool,
    ) -> Any:
        """Reads what write_state wrote; returns the client_state."""
        misc = torch.load(path / "state.pt", weights_only=True, map_location="cpu")
        has_average = misc.get("has_average", False) and not load_module_only
        if model in self._averages:
            self._require_loaded_average(model)
        if model in self._averages and has_average:
            self._read_average(path, model)
        self._read_model(path, model, strict=load_module_strict)
        if model in self._averages and not has_average:
            self._averages[model].restart(self._trained_shards(model))
        if load_module_only:
            return misc["client_state"]
        entry = next((entry for entry in self._trained if entry.model is model), None)
        if load_optimizer_states and entry is not None:
            self._read_optimizer(path, model, entry.optimizer, misc)
        if load_lr_scheduler_states and entry is not None and entry.scheduler is not None:
            if misc.get("scheduler") is None:
                raise ValueError(
                    f"{path} holds no learning-rate schedule. Pass load_lr_scheduler_states=False to go on."
                )
            _restore_scheduler(entry.scheduler, misc["scheduler"])
        self.global_step = misc["global_step"]
        rng = path / f"rng-rank{self.comm.rank:05d}-of-{self.comm.world:05d}.pt"
        if rng.exists():  # at another world size the streams of the ranks are others anyway
            _set_rng_state(torch.load(rng, weights_only=True, map_location="cpu"))
        return misc["client_state"]

    def _checkpoint_path(self, load_dir: Path, tag: str | None) -> Path | None:
        """Rank 0 chooses, so that all ranks load the same one."""
        with self.comm.phase("checkpoint", local=True):
            path = None
            if self.comm.is_main:
                path = _find_checkpoint(load_dir, tag)
        return self.comm.broadcast_object(path)

    def _read_model(self, path: Path, model: nn.Module, *, strict: bool) -> None:
        reader = TensorReader(path, "model")
        self.require_loaded(model)
        self.after_forward_only(model)
        named = dict(self._saved_tensors(model))
        missing, unknown = sorted(set(named) - reader.names), sorted(reader.names - set(named))
        if strict and (missing or unknown):
            raise ValueError(
                f"{path} does not fit the model: missing {missing[:5] or 'nothing'}, "
                f"unknown {unknown[:5] or 'nothing'}."
            )
        for name in sorted(set(named) & reader.names):
            found, shape = reader.shape_of(name), self.whole_shape(named[name])
            if found != shape:
                raise ValueError(f"{path}: {name} has shape {list(found)}, the model's {list(shape)}.")
            self.read_into(named[name], reader, name)
        self.after_weights_loaded(model)

    def _read_optimizer(self, path: Path, model: nn.Module, optimizer: Optimizer, misc: dict[str, Any]) -> None:
        if not misc.get("has_optimizer"):
            raise ValueError(f"{path} holds no optimizer states. Pass load_optimizer_states=False to go on without.")
        self.require_loaded_optimizer(optimizer)
        reader = TensorReader(path, "optimizer")
        optimizer.state.clear()
        critic_warmup.restore(optimizer, misc.get("frozen_steps", []))
        self.grad_scaler.load_state_dict(misc.get("grad_scaler", {}))
        self.load_optimizer_states(model, optimizer, reader)

    @torch.no_grad()
    def read_into(self, target: Tensor, reader: TensorReader, name: str) -> None:
        """This rank's part of a saved tensor, and no more of the file where the part is rows."""
        rows = own_rows(target)
        if rows is None:
            self.copy_whole(target, reader[name])
        else:
            local(target).copy_(reader.rows(name, rows.start, rows.stop))

    def load_optimizer_states(self, model: nn.Module, optimizer: Optimizer, reader: TensorReader) -> None:
        """What optimizer_pieces gave, into an optimizer whose state is empty."""
        for name, parameter in sorted(model.named_parameters()):
            for key in reader.keys_of(name):
                saved = f"{name}/{key}"
                if reader.shape_of(saved) == parameter.shape:
                    state = torch.zeros_like(parameter, dtype=reader.dtype_of(saved))
                    self.read_into(state, reader, saved)
                else:  # a step counter lives where a fused kernel reads it: beside the parameter
                    state = reader[saved].to(local(parameter).device)
                optimizer.state[parameter][key] = state


def _find_checkpoint(load_dir: Path, tag: str | None) -> Path | None:
    """A tag is what save_ckpt was given, or the name of one step's folder; None takes the newest of all."""
    if tag is None:
        own = CheckpointDirectory(load_dir, keep=1).latest()
        return max([*([own] if own else []), *_tagged_checkpoints(load_dir)], key=_commit_time, default=None)
    path = CheckpointDirectory(load_dir / tag, keep=1).latest()
    if path is not None:
        return path
    if tag.startswith("step-") and tag.removeprefix("step-").isdigit():
        return CheckpointDirectory(load_dir, keep=1).path(int(tag.removeprefix("step-")))
    raise FileNotFoundError(f"{load_dir} holds no complete checkpoint of the tag {tag!r}.")


def _tagged_checkpoints(root: Path) -> list[Path]:
    """The newest complete checkpoint of every tag, the oldest first."""
    folders = [path for path in sorted(root.iterdir()) if path.is_dir()] if root.is_dir() else []
    found = [CheckpointDirectory(folder, keep=1).latest() for folder in folders if not _is_step(folder)]
    return sorted((path for path in found if path is not None), key=_commit_time)


def _is_step(folder: Path) -> bool:
    return folder.name.startswith(("step-", "."))


def _commit_time(checkpoint: Path) -> int:
    return (checkpoint / MARKER_NAME).stat().st_mtime_ns


def _drop_old_tags(root: Path, max_num: int) -> None:
    for checkpoint in _tagged_checkpoints(root)[:-max_num]:
        shutil.rmtree(checkpoint.parent)


@torch.no_grad()
def broadcast_from_main(model: nn.Module, device: torch.device, comm: Comm) -> None:
    """Puts the model on the device with rank 0's parameters and buffers; the other ranks' may be on the meta device."""
    _materialize(model, device)
    for _, parameter in sorted(model.named_parameters()):
        parameter.data = parameter.data.to(device)
        comm.broadcast_tensor(parameter.data)
    broadcast_buffers(model, device, comm)


@torch.no_grad()
def broadcast_buffers(model: nn.Module, device: torch.device, comm: Comm) -> None:
    """Also those that no checkpoint holds: rotary frequencies are garbage in a model that was on the meta device."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            real = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
            module._buffers[name] = real
    for _, buffer in sorted(model.named_buffers()):
        comm.broadcast_tensor(buffer)


def _materialize(model: nn.Module, device: torch.device) -> None:
    """Module.to_empty() would make two parameters of a tied one."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    empty = torch.empty_like(parameter, device=device)
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]


def ensure_process_group(comm: Comm, device: torch.device) -> Comm:
    """For a back end that needs a group even in one process without torchrun."""
    if dist.is_initialized():
        return comm
    dist.init_process_group(backend_for(device), store=HashStore(), rank=0, world_size=1)
    return Comm(device=device, owns_group=True)


def _scale_gradients(parameters: list[Tensor], factor: float) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def _checked_client_state(client_state: dict[str, Any]) -> dict[str, Any]:
    """Refuses now what could never be loaded again without running code from the file."""
    for name, value in client_state.items():
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        try:
            torch.load(buffer, weights_only=True, map_location="cpu")
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"client_state[{name!r}] is a {type(value).__name__}, which cannot be loaded safely. Give tensors, "
                "numbers, text, and lists or dicts of them."
            ) from error
    return client_state


def _restore_scheduler(scheduler: Any, state: dict[str, Any]) -> None:
    """How far it is, not what it is: the peak rate and the length are those that this run was given."""
    if not isinstance(scheduler, LambdaLR):
        scheduler.load_state_dict(state)
        return
    scheduler.last_epoch, scheduler._step_count = state["last_epoch"], state["_step_count"]
    rates = [base * f(scheduler.last_epoch) for base, f in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates


def _plain_state(scheduler: Any) -> dict[str, Any]:
    """Without the lambdas, which LambdaLR leaves as None for functions and torch.load would refuse otherwise."""
    state = scheduler.state_dict()
    return {key: value for key, value in state.items() if key != "lr_lambdas"} | {
        "lr_lambdas": [None] * len(state.get("lr_lambdas", []))
    }


def _rng_state() -> dict[str, Any]:
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": [version, list(internal), gauss]}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = [name, [int(key) for key in keys], *[float(item) for item in rest]]
    return state


def _set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    numpy = sys.modules.get("numpy")
    if "numpy" in state and numpy is not None:
        name, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype="uint32"), int(position), int(has_gauss), cached))
