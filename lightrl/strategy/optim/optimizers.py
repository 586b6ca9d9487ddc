"""The optimizer of a model: its kind, its parameter groups, its learning rate over time, and clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Size, Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from lightrl.config import OptimConfig
from lightrl.strategy.optim.hooks import HOOKS, UpdateHook
from lightrl.strategy.optim.muon import MuonWithAdamW
from lightrl.strategy.optim.parameter_kinds import VECTORS, Kind, special_kinds
from lightrl.strategy.results import TrainedModel

MAIN_COPIES = "main copies"  # the float32 weights that an optimizer steps, where other weights compute


def build_optimizer(
    model: nn.Module, optim: OptimConfig, *, lr: float, shape_of: Callable[[Tensor], Size], **settings: Any
) -> Optimizer:
    """Builds the optimizer that the options name; settings such as betas override the options."""
    weight_decay = settings.pop("weight_decay", optim.weight_decay)
    groups = parameter_groups(model, optim, lr=lr, weight_decay=weight_decay, shape_of=shape_of)
    settings = {"betas": optim.betas, "eps": optim.eps, "fused": True, **settings}
    if optim.name == "muon":
        return MuonWithAdamW(groups, momentum=optim.momentum, **settings)
    return torch.optim.AdamW(groups, **settings)


# ---- Which optimizer trains which model --------------------------------------------------------------------------


@dataclass(eq=False)
class TrainedModels:
    """The models of a strategy: which are placed, which optimizer trains which, and what is in host memory."""

    entries: list[TrainedModel] = field(default_factory=list)  # registered by prepare() and the like
    seen: list[TrainedModel] = field(default_factory=list)  # known only because they were updated
    placed: dict[nn.Module, Optimizer | None] = field(default_factory=dict)  # prepared; with its optimizer if it trains
    offloaded: set[Any] = field(default_factory=set)  # by residency: a model, an optimizer, (MAIN_COPIES, optimizer)
    scheduled: set[Optimizer] = field(default_factory=set)  # those whose last update stepped the schedule
    hooks: list[UpdateHook] = field(default_factory=list)  # called in the updates of every optimizer

    def add(self, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None = None) -> None:
        """Makes this the model's optimizer, replacing an earlier one."""
        self.placed[model] = optimizer
        self.entries = [entry for entry in self.entries if entry.model is not model]
        self.entries.append(TrainedModel(model, optimizer, scheduler))
        self.seen = [entry for entry in self.seen if entry.model is not model]

    def see(self, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None = None) -> None:
        """Notes what is updated, since checkpoints must hold it even if it was never registered."""
        known = [entry for entry in (*self.entries, *self.seen) if entry.optimizer is optimizer]
        if not known or scheduler not in (None, known[0].scheduler):
            self._take_in(known, TrainedModel(model, optimizer, scheduler))

    def _take_in(self, known: list[TrainedModel], new: TrainedModel) -> None:
        if known:  # only its schedule is new
            new = replace(known[0], scheduler=new.scheduler)
        else:
            self.placed.setdefault(new.model, new.optimizer)
        if known and known[0] in self.entries:
            self.entries[self.entries.index(known[0])] = new
        else:
            self.seen = [entry for entry in self.seen if entry.optimizer is not new.optimizer] + [new]

    def entry(self, model: nn.Module | None) -> TrainedModel:
        """Returns the entry of a model; None means the only trained model, or the only actor among several."""
        chosen = [entry for entry in self.entries or self.seen if model is None or entry.model is model]
        if len(chosen) > 1:
            chosen = [entry for entry in chosen if getattr(entry.model, "is_actor", False)] or chosen
        return chosen[0] if len(chosen) == 1 else _refuse_to_choose(len(chosen))

    def hooks_of(self, optimizer: Optimizer | None) -> list[UpdateHook]:
        """Returns the optional parts of an optimizer's updates, in the order in which they were asked for."""
        return [*self.hooks, *getattr(optimizer, HOOKS, ())]

    def rates(self, optimizer: Optimizer) -> list[float]:
        """Returns the learning rate of each parameter group for the update to come."""
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        for hook in self.hooks_of(optimizer):
            rates = hook.reported_rates(optimizer, rates)
        return rates

    def step_schedules(self) -> None:
        """Steps all schedules; a trainer calls it after each of its steps if --optim.schedule_unit is rl_step."""
        for entry in (*self.entries, *self.seen):
            if entry.scheduler is not None:
                entry.scheduler.step()

    def require_on_device(self, *items: nn.Module | Optimizer) -> None:
        """Raises RuntimeError while the weights of a model or the states of an optimizer are in host memory."""
        if self.offloaded:
            self._refuse_offloaded(items)

    def _refuse_offloaded(self, items: Sequence[nn.Module | Optimizer]) -> None:
        for item in items:
            if item in self.offloaded:
                refuse_offloaded(item)
            if (MAIN_COPIES, item) in self.offloaded:
                refuse_without_main_copies()


def refuse_offloaded(item: nn.Module | Optimizer) -> NoReturn:
    """Raises RuntimeError, because reading an emptied storage would crash the process."""
    if isinstance(item, nn.Module):
        raise RuntimeError("The model's weights are offloaded. Call load_param_and_grad() before using it.")
    raise RuntimeError("The optimizer's states are offloaded. Call maybe_load_optimizer() before using them.")


def _refuse_to_choose(num_models: int) -> NoReturn:
    if num_models:
        raise ValueError(f"{num_models} models are trained here: say which one by model=... .")
    raise ValueError("This model has no optimizer yet. Pass (model, optimizer, scheduler) to prepare() first.")


def refuse_without_main_copies() -> NoReturn:
    """Raises RuntimeError, because the float32 weights that are needed are in host memory."""
    raise RuntimeError(
        "The model's float32 weights are offloaded. Call load_megatron_copy_params() before using them, or "
        "load_param_and_grad() if they left with the others."
    )


# ---- Parameter groups --------------------------------------------------------------------------------------------


def parameter_groups(
    model: nn.Module, optim: OptimConfig, *, lr: float, weight_decay: float, shape_of: Callable[[Tensor], Size]
) -> list[dict[str, Any]]:
    """Puts every trainable parameter in a group; shape_of returns the shape of a whole parameter."""
    is_plain = optim.name == "adamw" and optim.decay_embeddings and not optim.lr_scales
    special = {} if is_plain else special_kinds(model, optim, shape_of)
    groups: dict[Kind, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind = special.get(parameter) or Kind(is_undecayed=len(shape_of(parameter)) < 2 or name.endswith(VECTORS))
            groups.setdefault(kind, []).append(parameter)
    decays = {True: 0.0, False: weight_decay}
    return [
        {"params": groups[kind], "lr": lr * kind.lr_scale, "weight_decay": decays[kind.is_undecayed], **kind._asdict()}
        for kind in sorted(groups)
    ]


# ---- Learning rate -----------------------------------------------------------------------------------------------


def lr_factor(step: int, *, kind: str, warmup_steps: int, total_steps: int, min_ratio: float) -> float:
    """Returns the factor of the peak rate after `step` steps: (step + 1) / warmup_steps, then the schedule's."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return 1.0 if kind == "constant" else _decayed(kind, progress, min_ratio)


def _decayed(kind: str, progress: float, min_ratio: float) -> float:
    if kind not in ("linear", "cosine"):
        raise ValueError(f"Unknown learning-rate schedule {kind!r}. Choose one of constant, linear, cosine.")
    shape = 1 - progress if kind == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return min_ratio + (1 - min_ratio) * shape


def build_lr_scheduler(optimizer: Optimizer, config: OptimConfig, total_steps: int) -> LambdaLR:
    """Builds the schedule that the options name over total_steps; --optim.schedule_unit says what a step is.

    The factor of a group's rate (--optim.lr_scales) applies at every step, including the end of the schedule.
    """
    first = optimizer.param_groups[0]
    peak = float(first["lr"]) / (first.get("lr_scale", 1.0) or 1.0)
    factor = partial(
        lr_factor,
        kind=config.schedule,
        warmup_steps=config.warmup_steps or int(config.warmup_ratio * total_steps + 1e-9),  # 0.57 x 100 is 56.99...
        total_steps=total_steps,
        min_ratio=config.min_lr / peak if config.min_lr and peak else config.min_lr_ratio,
    )
    return LambdaLR(optimizer, factor)


# ---- The norm of the gradients, over plain tensors, DTensors, and both in one model ------------------------------


def checked_max_norm(max_norm: float) -> float:
    """Returns the limit; raises ValueError for one that would turn the gradients around or make them NaN."""
    if max_norm is not None and not max_norm >= 0:
        raise ValueError(f"max_norm is {max_norm}: it must be 0 or above. 0 and None do not clip.")
    return max_norm


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], max_norm: float | None) -> Tensor:
    """Scales gradients to a global norm of at most max_norm (0, None: no limit); returns the norm before that."""
    given = [parameter for parameter in parameters if parameter.grad is not None]
    if any(isinstance(parameter.grad, DTensor) for parameter in given):
        return _clip_by_mesh(given, max_norm)
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in given]).float()  # type: ignore[misc]
    if max_norm:
        torch.nn.utils.clip_grads_with_norm_(given, max_norm, norm)
    return norm


def _clip_by_mesh(parameters: Iterable[Tensor], max_norm: float | None) -> Tensor:
    """Clips gradients of which some are DTensors, perhaps on several meshes."""
    groups = _by_mesh(parameters)
    norms = [torch.nn.utils.get_total_norm([parameter.grad for parameter in group]) for group in groups]  # type: ignore[misc]
    squares = [(norm.full_tensor() if isinstance(norm, DTensor) else norm).float() ** 2 for norm in norms]
    norm = torch.stack(squares).sum().sqrt()
    if max_norm:
        for group in groups:
            torch.nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    return norm


def _by_mesh(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Groups parameters that torch's fused norms accept together: all plain tensors, or all DTensors of one mesh."""
    groups: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        grad = parameter.grad
        groups.setdefault(grad.device_mesh if isinstance(grad, DTensor) else None, []).append(parameter)
    return list(groups.values())
