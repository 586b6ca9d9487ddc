"""What every strategy shares whose models are torch modules with plain or DTensor parameters."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightrl.checkpoint import CheckpointDirectory
from lightrl.strategy import state_files
from lightrl.strategy.base import OptimizerStep, StrategyBase
from lightrl.strategy.gradients import clip_gradients
from lightrl.strategy.offload import local

_MEGABYTE = 1 << 20


class TorchStrategy(StrategyBase):
    """Optimizer, accumulation, clipping and checkpoints; a subclass says how a model is placed."""

    @property
    def averaging_ranks(self) -> int:
        """How many ranks the back end averages a gradient over; 1 if it has no reduction."""
        return 1

    # ---- Optimizer ---------------------------------------------------------------------------------------------

    def create_optimizer(self, model: nn.Module, **kwargs: Any) -> Optimizer:
        optim = self.options.optim
        weight_decay = kwargs.pop("weight_decay", optim.weight_decay)
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
        ]
        settings = {"lr": self.options.lr, "betas": optim.betas, "eps": optim.eps, "fused": True, **kwargs}
        return torch.optim.AdamW([group for group in groups if group["params"]], **settings)

    def backward(self, loss: Tensor, model: nn.Module, optimizer: Optimizer, **kwargs: Any) -> None:
        weight = kwargs.pop("weight", None)
        if kwargs:
            raise TypeError(f"backward() takes no {', '.join(sorted(kwargs))}; known: weight.")
        if weight is not None:
            (loss * (weight * self.averaging_ranks)).backward()
            return
        pending = self._pending_micro_batches.get(optimizer, 0)
        with self.before_micro_batch(model, (pending + 1) % self.accumulation_steps == 0):
            (loss / self.accumulation_steps).backward()

    def optimizer_step(
        self, optimizer: Optimizer, model: nn.Module, scheduler: Any, name: str = "model", **kwargs: Any
    ) -> OptimizerStep:
        is_boundary = kwargs.pop("is_boundary", None)
        if kwargs:
            raise TypeError(f"optimizer_step() takes no {', '.join(sorted(kwargs))}; known: is_boundary.")
        lr_list = [float(group["lr"]) for group in optimizer.param_groups]
        if is_boundary is None:
            pending = self._pending_micro_batches.get(optimizer, 0) + 1
            self._pending_micro_batches[optimizer] = pending % self.accumulation_steps
            if pending < self.accumulation_steps:
                return OptimizerStep(grad_norm=0.0, lr_list=lr_list, stepped=False)
        self.require_loaded(model)
        if self._offloader(f"optimizer {id(optimizer)}").is_offloaded:
            raise RuntimeError("The optimizer's states are offloaded. Call maybe_load_optimizer() before the step.")
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        grad_norm = float(clip_gradients(parameters, self.max_norm))
        is_finite = self.comm.agree(math.isfinite(grad_norm))
        if is_finite:
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        return OptimizerStep(grad_norm=grad_norm, lr_list=lr_list, skipped=not is_finite)

    # ---- Whole tensors -----------------------------------------------------------------------------------------

    def named_parameters_of(self, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """(HF name, parameter) sorted by name, tied ones once."""
        self.require_loaded(model)
        return sorted(self.unwrap_model(model).named_parameters())

    def full_parameters(self, model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.named_parameters_of(model):
            tensor = parameter.detach()
            # Cast before the gather: half the bytes travel.
            yield name, self.gather_whole(tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor)

    def gather_whole(self, tensor: Tensor) -> Tensor:
        """The whole of a sharded tensor on every rank; a collective."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    @torch.no_grad()
    def copy_whole(self, target: Tensor, whole: Tensor) -> None:
        """Writes this rank's part of a whole tensor that every rank holds; no collective."""
        if isinstance(target, DTensor):
            whole = distribute_tensor(
                whole.to(target.device), target.device_mesh, target.placements, src_data_rank=None
            ).to_local()
        local(target).copy_(whole)

    def get_model_state_dict(
        self, cpu_offload: bool = False, full_state_dict: bool = True, model: nn.Module | None = None
    ) -> dict[str, Tensor]:
        """The trained model's state under HF names.

        full_state_dict: whole tensors on every rank, else this rank's shards. cpu_offload: copies in host memory, else
        references to the live tensors wherever no gather was needed.
        """
        chosen = model if model is not None else self._trained_entry(None).model
        self.after_forward_only(chosen)
        named = self.named_parameters_of(chosen)
        tensors = {name: self.gather_whole(p.detach()) if full_state_dict else local(p.detach()) for name, p in named}
        return {name: t.to("cpu", copy=True) for name, t in tensors.items()} if cpu_offload else tensors

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
    ) -> None:
        """A tag is a folder of its own under save_dir, with its own rotation."""
        root = Path(save_dir) / tag if tag else Path(save_dir)
        directory = CheckpointDirectory(root, keep=max_num, max_bytes=max_mem * _MEGABYTE)
        with self.comm.phase("checkpoint", local=True):
            temporary = directory.begin(self.global_step) if self.comm.is_main else None
        path = self.comm.broadcast_object(temporary)
        assert path is not None
        self.write_state(path, model, client_state or {})
        self.comm.barrier()
        with self.comm.phase("checkpoint", local=True):
            if self.comm.is_main:
                directory.commit(self.global_step, is_latest=save_latest)

    def write_state(self, path: Path, model: nn.Module, client_state: dict[str, Any]) -> None:
        """Everything a run needs to go on; every rank calls it, each writes files of its own name."""
        self.after_forward_only(model)
        state_files.write_tensors(path, "model", self.full_parameters(model), self.comm)
        misc: dict[str, Any] = {"global_step": self.global_step, "client_state": client_state}
        entry = next((entry for entry in self._trained if entry.model is model), None)
        if entry is not None:
            states = state_files.optimizer_state_tensors(self._named_states(model, entry.optimizer), self.gather_whole)
            state_files.write_tensors(path, "optimizer", states, self.comm)
            misc["has_optimizer"] = True
            misc["param_group_lrs"] = [float(group["lr"]) for group in entry.optimizer.param_groups]
            misc["scheduler"] = _plain_state(entry.scheduler) if entry.scheduler is not None else None
        torch.save(_rng_state(), path / f"rng-rank{self.comm.rank:05d}-of-{self.comm.world:05d}.pt")
        if self.comm.is_main:
            torch.save(misc, path / "state.pt")

    def _named_states(self, model: nn.Module, optimizer: Optimizer) -> list[tuple[str, dict[str, Any]]]:
        named = self.named_parameters_of(model)
        return [(name, optimizer.state[parameter]) for name, parameter in named if parameter in optimizer.state]

    def load_ckpt(
        self,
        model: nn.Module,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> Any:
        """Returns (path, client_state); (None, None) if load_dir holds no complete checkpoint and no tag was given."""
        path = self._checkpoint_path(Path(load_dir), tag)
        if path is None:
            return None, None
        misc = torch.load(path / "state.pt", weights_only=True)
        self._read_model(path, model, strict=load_module_strict)
        if load_module_only:
            return path, misc["client_state"]
        entry = next((entry for entry in self._trained if entry.model is model), None)
        if load_optimizer_states and entry is not None:
            self._read_optimizer(path, model, entry.optimizer, misc)
        if load_lr_scheduler_states and entry is not None and entry.scheduler is not None:
            if misc.get("scheduler") is None:
                raise ValueError(
                    f"{path} holds no learning-rate schedule. Pass load_lr_scheduler_states=False to go on."
                )
            entry.scheduler.load_state_dict(misc["scheduler"])
        self.global_step = misc["global_step"]
        rng = path / f"rng-rank{self.comm.rank:05d}-of-{self.comm.world:05d}.pt"
        if rng.exists():  # at another world size the streams of the ranks are others anyway
            _set_rng_state(torch.load(rng, weights_only=True))
        return path, misc["client_state"]

    def _checkpoint_path(self, load_dir: Path, tag: str | None) -> Path | None:
        """Rank 0 chooses, so that all ranks load the same one."""
        with self.comm.phase("checkpoint", local=True):
            path = None
            if self.comm.is_main:
                path = _find_checkpoint(load_dir, tag)
        return self.comm.broadcast_object(path)

    def _read_model(self, path: Path, model: nn.Module, *, strict: bool) -> None:
        reader = state_files.TensorReader(path, "model")
        named = dict(self.named_parameters_of(model))
        missing, unknown = sorted(set(named) - reader.names), sorted(reader.names - set(named))
        if strict and (missing or unknown):
            raise ValueError(
                f"{path} does not fit the model: missing {missing[:5] or 'nothing'}, "
                f"unknown {unknown[:5] or 'nothing'}."
            )
        self.after_forward_only(model)
        for name in sorted(set(named) & reader.names):
            self.copy_whole(named[name], reader[name])

    def _read_optimizer(self, path: Path, model: nn.Module, optimizer: Optimizer, misc: dict[str, Any]) -> None:
        if not misc.get("has_optimizer"):
            raise ValueError(f"{path} holds no optimizer states. Pass load_optimizer_states=False to go on without.")
        reader = state_files.TensorReader(path, "optimizer")
        optimizer.state.clear()
        for name, parameter in self.named_parameters_of(model):
            keys = sorted(item.rpartition("/")[2] for item in reader.names if item.rpartition("/")[0] == name)
            for key in keys:
                whole = reader[f"{name}/{key}"]
                optimizer.state[parameter][key] = self._like_parameter(whole, parameter) if whole.dim() else whole
        for group, lr in zip(optimizer.param_groups, misc["param_group_lrs"], strict=True):
            group["lr"] = lr

    def _like_parameter(self, whole: Tensor, parameter: Tensor) -> Tensor:
        state = torch.zeros_like(parameter, dtype=whole.dtype)
        self.copy_whole(state, whole)
        return state


def _find_checkpoint(load_dir: Path, tag: str | None) -> Path | None:
    """A tag is what save_ckpt was given, or the name of one step's folder."""
    if tag is None:
        return CheckpointDirectory(load_dir, keep=1).latest()
    if tag.removeprefix("step-").isdigit():
        return CheckpointDirectory(load_dir, keep=1).path(int(tag.removeprefix("step-")))
    path = CheckpointDirectory(load_dir / tag, keep=1).latest()
    if path is None:
        raise FileNotFoundError(f"{load_dir / tag} holds no complete checkpoint of the tag {tag!r}.")
    return path


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
