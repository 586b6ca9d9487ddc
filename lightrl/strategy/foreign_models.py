"""Models as code for other trainers passes them to a strategy: (model, optimizer, scheduler), by role.

lightrl's own trainers call prepare_trained() and prepare_frozen(), and never run this code.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightrl.comm import Comm
from lightrl.config import OptimConfig, StrategyOptions
from lightrl.engines.colocated import SyncReport
from lightrl.metrics import Statistics
from lightrl.strategy.optim.grad_scaler import GradScaler
from lightrl.strategy.optim.optimizers import TrainedModels
from lightrl.strategy.optim.value_head import has_value_head
from lightrl.strategy.results import TrainedModel
from lightrl.strategy.serving import foreign_inputs
from lightrl.strategy.serving.colocated_serving import ColocatedServing
from lightrl.strategy.serving.residency import Residency


def is_actor(model: Any) -> bool:
    """Returns whether this is the policy that is trained, and not a critic, reward or reference model."""
    return bool(getattr(model, "is_actor", False))


class NotSetUpError(RuntimeError, AttributeError):
    """Raised when a member is used before setup_distributed() has made what it needs."""


class NotInitializedError(ValueError, AttributeError):
    """Raised when a strategy of the user's is used although StrategyBase.__init__() has not run."""


def require_world(comm: Comm, name: str) -> None:
    """Raises NotSetUpError if torchrun started several ranks and this one has not joined them yet."""
    if not comm.is_distributed and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise NotSetUpError(f"{name} before setup_distributed(): the ranks do not know each other. Call that first.")


def refuse_attribute(owner: Any, name: str) -> NoReturn:
    """Explains an attribute that is missing because a call was forgotten; raises AttributeError for any other."""
    if "seed" not in vars(owner):  # which StrategyBase.__init__() sets first
        raise NotInitializedError(
            f"{type(owner).__name__} has no {name!r}, because StrategyBase.__init__() has not run. Begin "
            f"{type(owner).__name__}.__init__(self, **settings) with super().__init__(**settings)."
        )
    if any(name in vars(kind).get("__annotations__", ()) for kind in type(owner).__mro__):
        raise NotSetUpError(f"{type(owner).__name__} was used before setup_distributed(). Call that first.")
    raise AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}")


class Native(Protocol):
    """The attributes and methods of StrategyBase that the foreign names stand for."""

    args: Any
    seed: int
    tokenizer: foreign_inputs.Decoder | None
    trained: TrainedModels
    statistics: Statistics
    grad_scaler: GradScaler | None
    num_generations: int

    @property
    def options(self) -> StrategyOptions: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def comm(self) -> Comm: ...
    @property
    def serving(self) -> ColocatedServing: ...
    @property
    def residency(self) -> Residency: ...
    def prepare_model(self, model: nn.Module) -> nn.Module: ...
    def report_memory(self, prefix: str = "") -> dict[str, float]: ...
    def prepare_frozen(self, model: nn.Module) -> nn.Module: ...
    def create_optimizer(self, model: nn.Module) -> Optimizer: ...
    def register(self, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None = None) -> None: ...
    def unwrap_model(self, model: Any) -> nn.Module: ...
    def forward(self, data: Sequence[Any], *, model: nn.Module | None = None) -> list[Any]: ...
    def full_parameters(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]: ...
    def set_global_step(self, global_step: int) -> None: ...
    def sync_weights(self, model: nn.Module) -> SyncReport: ...
    def save_ckpt(self, model: nn.Module, save_dir: str, *, max_mem: int = 1000) -> None: ...
    def load_ckpt(self, model: nn.Module, load_dir: str) -> Any: ...
    def prepare_trained(
        self,
        model: nn.Module,
        *,
        lr: float | None,
        schedule_length: int,
        head_lr: float | None,
        frozen_head_steps: int,
        optim: OptimConfig | None,
    ) -> TrainedModel: ...


def options_of(strategy: Native, args: Any) -> StrategyOptions:
    """Returns the options of foreign arguments, or the strategy's own if none or the same arguments were given."""
    return strategy.options if args is None or args is strategy.args else StrategyOptions.from_args(args)


def prepare_item(strategy: Native, item: Any, *, freeze_lone: bool) -> Any:
    """Prepares None, a module, (module, optimizer) or (module, optimizer, scheduler)."""
    if item is None:
        return None
    if isinstance(item, nn.Module):
        return strategy.prepare_frozen(item) if freeze_lone else strategy.prepare_model(item)
    model, optimizer, *rest = item
    if model is None:
        return item
    old_names = {id(parameter): name for name, parameter in model.named_parameters()}
    model = strategy.prepare_model(model)
    if optimizer is not None:
        _repoint_optimizer(optimizer, old_names, model)
        strategy.register(model, optimizer, rest[0] if rest else None)
    return (model, optimizer, *rest)


def prepare_frozen_models(strategy: Native, models: Any) -> Any:
    """Prepares a model that is not trained, or a list, tuple, dict, ModuleList or ModuleDict of such models."""
    if isinstance(models, Mapping | nn.ModuleDict):
        prepared = {name: prepare_frozen_models(strategy, model) for name, model in models.items()}
        return nn.ModuleDict(prepared) if isinstance(models, nn.ModuleDict) else prepared
    if isinstance(models, list | tuple | nn.ModuleList):
        several = [prepare_frozen_models(strategy, model) for model in models]
        return nn.ModuleList(several) if isinstance(models, nn.ModuleList) else several
    return prepare_item(strategy, models, freeze_lone=True)


def _repoint_optimizer(optimizer: Optimizer, old_names: Mapping[int, str], model: nn.Module) -> None:
    """Makes an optimizer that was created before the model was sharded step the parameters of the sharded model."""
    new = dict(model.named_parameters())
    if optimizer.state and any(name in new and id(new[name]) != key for key, name in old_names.items()):
        raise ValueError("The optimizer has taken steps before prepare(). Prepare first, then train.")
    for group in optimizer.param_groups:
        group["params"] = [new.get(old_names.get(id(item), ""), item) for item in group["params"]]


def prepare_slot(
    strategy: Native, model: Any, options: StrategyOptions, lr: float, max_steps: int
) -> tuple[Any, Any, Any]:
    """Prepares the model that was passed as the actor or the critic, with its optimizer and schedule."""
    if model is None:
        return None, None, None
    has_head = has_value_head(model)
    head_lr = options.critic_lr if has_head and is_actor(model) else None
    frozen_steps = options.critic_warmup_steps if has_head or not is_actor(model) else 0
    trained = strategy.prepare_trained(
        model,
        lr=lr,
        schedule_length=max_steps,
        head_lr=head_lr,
        frozen_head_steps=frozen_steps,
        optim=options.optim,
    )
    return trained.model, trained.optimizer, trained.scheduler
