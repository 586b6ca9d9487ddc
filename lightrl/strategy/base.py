"""StrategyBase: how a model is spread over ranks, trained, saved, and served by the engine beside it.

A back end writes a few hooks; everything else is written here once and delegates to what the strategy holds:
`comm` (collectives), `engine` (state machine around the inference engine), `options`.
"""

from __future__ import annotations

import logging
import os
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from lightrl import comm as comm_module
from lightrl.comm import Comm
from lightrl.config import OptimConfig, StrategyOptions
from lightrl.data.sampler import ResumableSampler
from lightrl.engines.base import Completion, EngineGroup, EnginePrompt, SamplingParams, check_engine_name
from lightrl.engines.colocated import ColocatedEngine, EngineStatus, SyncReport
from lightrl.engines.weight_sync import Fingerprint
from lightrl.metrics import memory_in_use
from lightrl.models.multimodal import MediaProcessor
from lightrl.seeding import mix_seed
from lightrl.strategy import critic_warmup, schedules
from lightrl.strategy.background_save import BackgroundSave
from lightrl.strategy.compilation import check_compiler, compile_blocks
from lightrl.strategy.contract import ForeignNames
from lightrl.strategy.grad_scaler import GradScaler
from lightrl.strategy.parameter_groups import check_lr_scales
from lightrl.strategy.serving import residency
from lightrl.strategy.serving.colocated_serving import ColocatedServing, OffloadingServing
from lightrl.strategy.serving.foreign_inputs import Decoder
from lightrl.strategy.weight_average import WeightAverage

logger = logging.getLogger(__name__)

__all__ = ["EngineStatus", "OptimizerStep", "StrategyBase", "TrainBatchResult", "TrainedModel", "is_actor"]


class OptimizerStep(NamedTuple):
    """What optimizer_step did."""

    grad_norm: float  # before clipping, over all ranks
    lr_list: list[float]  # used for this update, one per parameter group
    stepped: bool = True  # False between the boundaries of an accumulation
    skipped: bool = False  # the norm was not finite: nothing was changed, on any rank


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatchResult:
    """What train_batch did, over all ranks."""

    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    total_weight: float
    num_micro_batches: int  # on each rank


class SharedBatches(NamedTuple):
    """The micro-batches that a rank runs: those of all ranks that split a model or its tokens, in one order."""

    batches: list[Any]
    own: range  # the places of those that this rank brought


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model that is trained, with what updates it."""

    model: Any  # the class that prepare_trained was given, such as Policy
    optimizer: Optimizer
    scheduler: LRScheduler | None


def is_actor(model: Any) -> bool:
    """Whether this is the policy that is trained, as opposed to a critic, reward or reference model."""
    return bool(getattr(model, "is_actor", False))


class StrategyBase(ForeignNames, ABC):
    """The public contract; see docs/adding_a_strategy.md for what a back end writes."""

    splits_models: ClassVar[bool] = False  # whether it honours --tp_size and --sp_size

    def __init__(
        self, seed: int, max_norm: float, micro_train_batch_size: int, train_batch_size: int, args: Any | None = None
    ) -> None:
        self.seed = seed
        self.max_norm = max_norm
        self.micro_train_batch_size = micro_train_batch_size
        self.train_batch_size = train_batch_size
        self.args = args
        self.options = StrategyOptions.from_args(args)
        self.accumulation_steps = 1
        if not self.options.exact_batches:  # train_batch takes any sizes; accumulation by calls needs them to fit
            # A group of --tp_size x --sp_size ranks runs the micro-batches of all its ranks, one after the other.
            num_groups = int(os.environ.get("WORLD_SIZE", "1")) // (self.options.tp_size * self.options.sp_size)
            self.accumulation_steps = accumulation_steps(train_batch_size, micro_train_batch_size, max(1, num_groups))
        self.device = torch.device("cpu")
        self.comm = Comm()
        self.residency = residency.Residency(self)
        self.serving = ColocatedServing(self, self.options)
        if self.options.offload_while_generating:
            self.serving = OffloadingServing(self, self.options, self.residency)
        self.tokenizer: Decoder | None = None  # gives gather_and_generate its text
        self.media: MediaProcessor | None = None  # of a vision-language model: the canary scores images with it
        self.global_step = 0
        self.grad_scaler = GradScaler(enabled=False)
        self._trained: list[TrainedModel] = []
        self._pending_micro_batches: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._averages: WeakKeyDictionary[nn.Module, WeightAverage] = WeakKeyDictionary()
        self._saving: BackgroundSave | None = None  # None on all ranks or on none

    # ---- Back end: what a subclass writes ----------------------------------------------------------------------

    @abstractmethod
    def create_optimizer(self, model: nn.Module, **kwargs: Any) -> Optimizer:
        """An optimizer over the model's trainable parameters; kwargs win over the options."""

    @abstractmethod
    def backward(self, loss: Tensor, model: nn.Module, optimizer: Optimizer, **kwargs: Any) -> None:
        """Adds the loss's gradient.

        weight=None: the loss is a mean over this rank's micro-batch, and the update uses the mean over all ranks and
        accumulation steps. weight=w: the gradient added is w times the loss's, SUMMED over ranks.
        """

    @abstractmethod
    def optimizer_step(
        self, optimizer: Optimizer, model: nn.Module, scheduler: Any, name: str = "model", **kwargs: Any
    ) -> OptimizerStep:
        """Updates at the end of an accumulation, or now with is_boundary=True; agreed by all ranks."""

    @abstractmethod
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
        """Writes model, optimizer, scheduler, RNG state, counters and client_state atomically.

        companions: models that belong to it, such as a critic, saved with their optimizers in the same moment.
        max_num and max_mem (MB, 0 = no limit) bound what is kept; the newest always stays.
        """

    @abstractmethod
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
        """Reads the tag, or the newest complete checkpoint; returns (path, client_state)."""

    def poll_saving(self) -> None:
        """Completes a checkpoint that is being written if all ranks have done so; raises on all what failed on one."""

    def finish_saving(self) -> None:
        """The same, but waits for it; every rank must call it."""

    @abstractmethod
    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Places (and shards) the model; every rank ends with the weights of rank 0."""

    @abstractmethod
    def full_parameters(self, model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """(HF name, full tensor) for every parameter, sorted by name, tied ones once. Every rank must iterate it."""

    def before_micro_batch(self, model: nn.Module, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        """Wraps the forward and backward of a micro-batch; gradients are reduced in the last one only."""
        return nullcontext()

    def after_forward_only(self, model: nn.Module) -> None:
        """Called after passes without a backward, for what they leave behind."""

    @property
    def materializes_weights(self) -> bool:
        """Whether this rank should load real weights before prepare; the others may build on the meta device."""
        return True

    def share(self, data: Sequence[Any]) -> SharedBatches:
        """What this rank has to run so that its own micro-batches are run; every rank calls it.

        Ranks that split a model or its tokens (--tp_size, --sp_size) run the same micro-batches together: those that
        each of them brought. train_batch and forward do so; who calls a model himself must share first.
        """
        return SharedBatches(list(data), range(len(data)))

    def check_model_config(self, config: Any) -> None:
        """Raises ValueError for a transformers config of a model that these options cannot spread."""

    # ---- Setup -------------------------------------------------------------------------------------------------

    def set_seed(self, seed: int) -> None:
        """Seeds Python, NumPy and torch, the same on all ranks; random_stream gives what must differ."""
        self.seed = seed
        random.seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        if self.options.distributed.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS refuses to be deterministic without
            torch.use_deterministic_algorithms(True)

    def random_stream(self, role: str, per_rank: bool = True) -> torch.Generator:
        """A CPU generator of its own for (seed, role, rank)."""
        parts = (self.seed, *role.encode(), self.comm.rank if per_rank else -1)
        return torch.Generator().manual_seed(mix_seed(*parts))

    def setup_distributed(self, timeout: timedelta | None = None, num_gpu_per_node: int = 8) -> None:
        """Joins the world torchrun describes (or is a world of one) and picks the device."""
        check_engine_name(self.options.engine)
        self.device = pick_device(self.options.distributed.device, num_gpu_per_node)
        wait = timeout or timedelta(seconds=self.options.distributed.timeout_s)
        self._check_model_parallelism()
        self.comm = comm_module.connect(self.device, wait)
        self._check_engine_groups()
        size = self.options.engine_tp_size
        self.serving.group = EngineGroup(self.comm, self.comm.new_groups(size), size)
        self.set_seed(self.seed)

    def _check_model_parallelism(self) -> None:
        for name, size in (("tp_size", self.options.tp_size), ("sp_size", self.options.sp_size)):
            if size != 1 and not self.splits_models:
                raise ValueError(
                    f"--{name} {size} needs --strategy fsdp; {type(self).__name__} does not split a model or its "
                    f"tokens. Use --strategy fsdp, or --{name} 1."
                )

    def _check_engine_groups(self) -> None:
        size, world = self.options.engine_tp_size, self.comm.world
        if size < 1 or world % size:
            valid = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
            raise ValueError(f"--engine_tp_size {size} does not divide {world} ranks. Valid: {valid}.")

    def prepare(self, *models_or_model_optim_pairs: Any, is_rlhf: bool = False) -> Any:
        """Prepares each item: None, a module, (module, optimizer) or (module, optimizer, scheduler).

        A single item comes back as a single item. is_rlhf: a lone module is a reference or reward model, so it is
        frozen and put in evaluation mode.
        """
        prepared = [self._prepare_item(item, freeze_lone=is_rlhf) for item in models_or_model_optim_pairs]
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepare_item(self, item: Any, *, freeze_lone: bool) -> Any:
        if item is None:
            return None
        if isinstance(item, nn.Module):
            return self.prepare_frozen(item) if freeze_lone else self.prepare_model(item)
        model, optimizer, *rest = item
        if model is None:
            return item
        old_names = {id(parameter): name for name, parameter in model.named_parameters()}
        model = self.prepare_model(model)
        if optimizer is not None:
            _repoint_optimizer(optimizer, old_names, model)
            self.register(model, optimizer, rest[0] if rest else None)
        return (model, optimizer, *rest)

    def prepare_frozen(self, model: nn.Module) -> nn.Module:
        """Places a model that is never trained, such as a reference or reward model, in evaluation mode."""
        model = self.prepare_model(model.eval().requires_grad_(False))
        self.residency.add(model)
        return model

    def register(self, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None = None) -> None:
        """Makes this the model's optimizer for train_batch, checkpoints and offload."""
        self.residency.add(model, optimizer)
        if self.options.compile:
            check_compiler(self.device)
            compile_blocks(model)
        self._trained = [entry for entry in self._trained if entry.model is not model]
        self._trained.append(TrainedModel(model, optimizer, scheduler))

    def prepare_trained(
        self,
        model: nn.Module,
        *,
        lr: float | None = None,
        schedule_length: int = 1,
        head_lr: float | None = None,
        frozen_head_steps: int = 0,
    ) -> TrainedModel:
        """Places a model and gives it an optimizer and a learning-rate schedule.

        Args:
            model: a policy, critic, reward model or any other module.
            lr: the peak rate; None takes --lr.
            schedule_length: the length of the schedule, in units of --optim.schedule_unit.
            head_lr: the rate of a value head on the model's body; None gives it the body's rate.
            frozen_head_steps: the number of first updates that train the value head alone.
        """
        if not self._trained:  # a model that comes later, such as a critic, need not fit the patterns
            check_lr_scales([model], self.options.optim)
        return self._prepare_trained(
            model,
            self.options.optim,
            self.options.lr if lr is None else lr,
            schedule_length,
            head_lr,
            frozen_head_steps,
        )

    def _prepare_trained(
        self,
        model: nn.Module,
        optim: OptimConfig,
        lr: float,
        schedule_length: int,
        head_lr: float | None,
        frozen_head_steps: int,
    ) -> TrainedModel:
        model = self.prepare_model(model)
        optimizer = self.create_optimizer(
            model, lr=lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay
        )
        if head_lr is not None:
            critic_warmup.set_head_rate(optimizer, model, head_lr)
        if frozen_head_steps:
            critic_warmup.freeze_all_but_value_head(optimizer, model, frozen_head_steps)
        scheduler = schedules.build_lr_scheduler(optimizer, optim, schedule_length)
        self.register(model, optimizer, scheduler)
        return TrainedModel(model, optimizer, scheduler)

    def prepare_models_and_optimizers(
        self, actor: Any, critic: Any, reward_models: Any, initial_model: Any, args: Any, max_steps: int
    ) -> tuple[Any, Any, Any, Any]:
        """((actor, optimizer, scheduler), (critic, optimizer, scheduler), reward_models, initial_model).

        A value head on the actor's own body learns at critic_lr; critic_warmup_steps updates train a head alone.
        max_steps is the length of the schedules, in units of --optim.schedule_unit. critic, reward_models (one, a list,
        or None) and initial_model may be None.
        """
        options = self.options if args is None or args is self.args else StrategyOptions.from_args(args)
        if actor is not None or (critic is not None and not self._trained):  # a critic that comes later has no say
            check_lr_scales([actor, critic], options.optim)
        if actor is not None:
            actor.is_actor = True
        several = isinstance(reward_models, list | tuple)
        frozen = [self.prepare(model, is_rlhf=True) for model in (reward_models if several else [reward_models])]
        return (
            self._prepare_slot(actor, options, options.lr, max_steps),
            self._prepare_slot(critic, options, options.critic_lr, max_steps),
            frozen if several else frozen[0],
            self.prepare(initial_model, is_rlhf=True),
        )

    def _prepare_slot(self, model: Any, options: StrategyOptions, lr: float, max_steps: int) -> tuple[Any, Any, Any]:
        if model is None:
            return None, None, None
        has_head = critic_warmup.has_value_head(model)
        head_lr = options.critic_lr if has_head and is_actor(model) else None
        frozen_steps = options.critic_warmup_steps if has_head or not is_actor(model) else 0
        trained = self._prepare_trained(model, options.optim, lr, max_steps, head_lr, frozen_steps)
        return trained.model, trained.optimizer, trained.scheduler

    def build_optimizer(self, model: nn.Module, enable_critic_warmup: bool = False) -> Optimizer:
        """The optimizer of the options. With the warm-up it trains a critic's value head alone for its first
        critic_warmup_steps updates."""
        optimizer = self.create_optimizer(model)
        if enable_critic_warmup:
            critic_warmup.freeze_all_but_value_head(optimizer, model, self.options.critic_warmup_steps)
        return optimizer

    def build_grad_scaler(self, enabled: bool, **kwargs: Any) -> GradScaler:
        """Scales the losses of backward() from now on, and unscales before the clip; kwargs as of GradScaler."""
        self.grad_scaler = GradScaler(enabled, **kwargs)
        return self.grad_scaler

    def build_lr_scheduler(self, optimizer: Optimizer, optim_config: Any = None, total_steps: int = 1) -> LRScheduler:
        """The schedule of the options (or of optim_config) over total_steps optimizer steps."""
        return schedules.build_lr_scheduler(optimizer, optim_config or self.options.optim, total_steps)

    def setup_dataloader(
        self,
        replay_buffer: Any,
        batch_size: int,
        pin_memory: bool = False,
        shuffle: bool = True,
        collate_fn: Callable[..., Any] | None = None,
        drop_last: bool = True,
        sampler: Any | None = None,
        consumed_samples: int = 0,
    ) -> DataLoader[Any]:
        """A loader of this rank's share. consumed_samples counts over all ranks: it resumes at any world size.

        drop_last=False gives every sample exactly once, without padding, so ranks may differ by a batch.
        """
        if sampler is None:
            sampler = ResumableSampler(
                len(replay_buffer),
                rank=self.comm.rank,
                world=self.comm.world,
                shuffle=shuffle,
                seed=self.seed,
                drop_last=drop_last,
                consumed_samples=consumed_samples,
            )
        return DataLoader(
            replay_buffer,
            batch_size=batch_size,
            sampler=sampler,
            drop_last=drop_last,
            collate_fn=collate_fn,
            pin_memory=pin_memory and torch.cuda.is_available(),
        )

    @contextmanager
    def init_model_context(self) -> Iterator[None]:
        """Wraps the construction of a model."""
        yield
        self.report_memory("model built")

    def unwrap_model(self, model: Any) -> nn.Module:
        """The model underneath every wrapper: actor, DDP, compiled, PEFT. Its parameter names are the HF names."""
        for attribute in ("hf", "module", "_orig_mod"):
            inner = getattr(model, attribute, None)
            if isinstance(inner, nn.Module):
                return self.unwrap_model(inner)
        get_base_model = getattr(model, "get_base_model", None)  # PEFT
        if callable(get_base_model):
            return self.unwrap_model(get_base_model())
        module: nn.Module = model
        return module

    def set_global_step(self, global_step: int) -> None:
        """The trainer's step; it is the version that the next weight sync stamps."""
        self.global_step = global_step

    def close(self) -> None:
        """Completes a checkpoint under way, ends the engine, then leaves the process group."""
        try:
            self.finish_saving()
        finally:
            self.serving.close()
            self.comm.close()

    # ---- Training ----------------------------------------------------------------------------------------------

    def train_batch(
        self,
        data: Sequence[Any],
        loss_fn: Callable[[Any, Any], Tensor],
        loss_weight_fn: Callable[[Any], float | Tensor],
        *,
        model: nn.Module | None = None,
    ) -> TrainBatchResult:
        """One optimizer step over micro-batches of any number and size per rank.

        loss_fn(model(mb), mb) is the mean over the loss_weight_fn(mb) trained tokens of the micro-batch. With W the sum
        of the weights over micro-batches and ranks, the gradient is that of sum(loss * weight) / W: the mean over all
        trained tokens, however they are split. This is the only place where a loss is scaled.
        """
        trained = self._trained_entry(model)
        self.poll_saving()
        self.require_loaded_optimizer(trained.optimizer)  # now: later there would be gradients left over
        batches, own = self.share(data)
        weights = [float(loss_weight_fn(micro_batch)) for micro_batch in batches]
        total = self.comm.all_reduce(sum((weights[index] for index in own), 0.0), "sum")
        num_micro_batches = self._equal_count(len(batches))
        loss_sum = 0.0
        trained.model.train()
        for index in range(num_micro_batches):
            # A rank that has fewer repeats its last one at weight 0, since every rank must run every backward.
            micro_batch = batches[min(index, len(batches) - 1)]
            weight = weights[index] / total if index < len(batches) and total > 0 else 0.0
            with self.before_micro_batch(trained.model, index == num_micro_batches - 1):
                loss = loss_fn(trained.model(micro_batch), micro_batch)
                self.backward(loss, trained.model, trained.optimizer, weight=weight)
            loss_sum += float(loss.detach()) * weight if weight and index in own else 0.0
        step = self.optimizer_step(trained.optimizer, trained.model, trained.scheduler, is_boundary=True)
        return TrainBatchResult(
            loss=self.comm.all_reduce(loss_sum, "sum"),
            grad_norm=step.grad_norm,
            lr=step.lr_list[0],
            skipped=step.skipped,
            total_weight=total,
            num_micro_batches=num_micro_batches,
        )

    def _equal_count(self, count: int) -> int:
        if self.comm.any(count == 0):
            raise ValueError(
                f"rank {self.comm.rank} has {count} micro-batches and some rank has none. Give every rank at least "
                "one: lightrl.data.packing.dummy_batch() trains nothing."
            )
        return self.comm.max_int(count)

    def _trained_entry(self, model: nn.Module | None) -> TrainedModel:
        """The model's entry; None means the only one, or the only actor among several."""
        if model is not None:
            found = [entry for entry in self._trained if entry.model is model]
        elif len(self._trained) > 1:
            found = [entry for entry in self._trained if is_actor(entry.model)]
        else:
            found = self._trained
        if not found:
            raise ValueError("This model has no optimizer yet. Pass (model, optimizer, scheduler) to prepare() first.")
        if len(found) > 1:
            raise ValueError(f"{len(found)} models are trained here: say which one by model=... .")
        return found[0]

    @torch.no_grad()
    def forward(self, data: Sequence[Any], *, model: nn.Module | None = None) -> list[Any]:
        """model(mb) for each micro-batch, without gradients, in order."""
        chosen = model if model is not None else self._trained_entry(None).model
        was_training = chosen.training
        chosen.eval()
        batches, own = self.share(data)
        outputs = []
        for index in range(self._equal_count(len(batches))):
            output = chosen(batches[min(index, len(batches) - 1)])
            outputs += [output] if index in own else []
        self.after_forward_only(chosen)
        chosen.train(was_training)
        return outputs

    def eval_batch(
        self,
        data: Sequence[Any],
        loss_fn: Callable[[Any, Any], Tensor],
        loss_weight_fn: Callable[[Any], float | Tensor],
        *,
        model: nn.Module | None = None,
    ) -> float:
        """The loss that train_batch would report, without training."""
        outputs = self.forward(data, model=model)
        weights = [float(loss_weight_fn(micro_batch)) for micro_batch in data]
        losses = [float(loss_fn(output, micro_batch)) for output, micro_batch in zip(outputs, data, strict=True)]
        weighted = sum(loss * weight for loss, weight in zip(losses, weights, strict=True) if weight)
        total = self.comm.all_reduce({"loss": weighted, "weight": sum(weights)}, "sum")
        return total["loss"] / total["weight"] if total["weight"] else 0.0

    def step_lr_scheduler(self, model: nn.Module | None = None) -> None:
        """Steps the schedule once more; train_batch already does so after each real update."""
        scheduler = self._trained_entry(model).scheduler
        if scheduler is not None:
            scheduler.step()

    def step_schedules(self) -> None:
        """Of all trained models: a trainer calls it after each of its steps, where --optim.schedule_unit is rl_step."""
        for entry in self._trained:
            if entry.scheduler is not None:
                entry.scheduler.step()

    def keep_average(self, model: nn.Module, decay: float) -> None:
        """Averages the model's weights from now on, updated after each optimizer step, saved and loaded with it."""
        raise NotImplementedError(f"{type(self).__name__} keeps no average of the weights: leave out --ema_decay.")

    @contextmanager
    def averaged_weights(self, model: nn.Module) -> Iterator[None]:
        """The model has the average of its weights in here; every rank must enter it."""
        raise NotImplementedError(f"{type(self).__name__} keeps no average of the weights.")
        yield

    # ---- Communication -----------------------------------------------------------------------------------------

    def all_reduce(self, data: Any, op: str = "mean") -> Any:
        """Reduces a tensor, a number, or a dict of them; same format out, input untouched. op: mean, sum, max, min."""
        return self.comm.all_reduce(data, op)

    def all_gather(self, data: Any) -> Any:
        """Concatenates along dim 0 over the ranks; lengths may differ."""
        return self.comm.all_gather(data)

    @classmethod
    def print(cls, *msg: Any) -> None:
        """On rank 0 only, with the time."""
        if cls.is_rank_0():
            sys.stdout.write(f"[{datetime.now():%m-%d %H:%M:%S}] {' '.join(map(str, msg))}\n")
            sys.stdout.flush()

    @classmethod
    def is_rank_0(cls) -> bool:
        return comm_module.current().is_main

    def get_rank(self) -> int:
        return self.comm.rank

    @classmethod
    def report_memory(cls, prefix: str = "") -> dict[str, float]:
        """GB in use, as min / mean / max over the ranks; every rank must call it."""
        comm = comm_module.current()
        used = memory_in_use()
        report = {
            f"{name}/{op}": comm.all_reduce(dict(used), op)[name] for name in used for op in ("min", "mean", "max")
        }
        if comm.is_main:
            text = ", ".join(f"{name} {value:.2f} GB" for name, value in report.items() if name.endswith("max"))
            logger.info("memory %s: %s", prefix, text)
        return report

    @classmethod
    def sync_and_clear_cache(cls) -> None:
        """Waits for the device and for every rank, then gives cached device memory back."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        comm_module.current().barrier()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # ---- Serving -----------------------------------------------------------------------------------------------

    @property
    def engine(self) -> ColocatedEngine | None:
        """The engine beside the trainer; None before it is set up."""
        return self.serving.engine

    @property
    def last_sync(self) -> SyncReport | None:
        """What the last weight sync did; None before the first."""
        return self.serving.last_sync

    def generate(
        self, prompts: Sequence[EnginePrompt], params: Sequence[SamplingParams], *, sleep_engine: bool = True
    ) -> list[Completion]:
        """Samples this rank's prompts on the engine that its group shares; every rank calls it, also with no prompt.

        Returns n completions per prompt, in the prompts' order. An error on one rank is raised on all. The engine
        sleeps afterwards unless sleep_engine is False.
        """
        return self.serving.generate(prompts, params, sleep_engine=sleep_engine)

    def sync_weights(self, model: nn.Module) -> SyncReport:
        """Sends the model's weights to the engine, stamped with the global step, and proves that they arrived."""
        return self.serving.sync_weights(model)

    def sleep_engine(self) -> None:
        """Frees the engine's memory if there is an engine; a second call changes nothing."""
        self.serving.sleep()

    def wake_engine(self) -> None:
        """Makes the engine ready to generate if there is one; a second call changes nothing."""
        self.serving.wake()

    def weight_fingerprints(self, model: nn.Module, dtype: torch.dtype | None) -> dict[str, Fingerprint] | None:
        """Returns those of the tensors that full_parameters yields, computed from the shards; None proves nothing."""
        return None

    def sync_model_to_rollout(self, actor: nn.Module | None = None) -> None:
        self.sync_weights(actor if actor is not None else self._trained_entry(None).model)

    # ---- Residency ---------------------------------------------------------------------------------------------

    def parameter_tensors(self, model: nn.Module) -> list[Tensor]:
        """Returns this rank's storages of weights and buffers: what an offload moves."""
        return residency.parameter_tensors(model)

    def gradient_tensors(self, model: nn.Module) -> list[Tensor]:
        """Returns this rank's storages of gradients."""
        return residency.gradient_tensors(model)

    def optimizer_tensors(self, optimizer: Optimizer) -> list[Tensor]:
        """Returns this rank's storages of optimizer states."""
        return residency.optimizer_tensors(optimizer)

    def average_tensors(self, optimizer: Optimizer) -> list[Tensor]:
        """Returns the averages of the weights that this optimizer steps."""
        return []

    def drop_gradients(self, model: nn.Module) -> None:
        """Forgets the gradients of an accumulation."""
        for parameter in model.parameters():
            parameter.grad = None

    def require_loaded(self, model: nn.Module) -> None:
        """Raises RuntimeError while the model's weights are offloaded."""
        self.residency.require_parameters(model)

    def require_loaded_optimizer(self, optimizer: Optimizer) -> None:
        """Raises RuntimeError while the optimizer's states are offloaded."""
        self.residency.require_optimizer(optimizer)

    # ---- The trained state ----------------------------------------------------------------------------------------

    def get_model_state_dict(
        self, cpu_offload: bool = False, full_state_dict: bool = True, model: nn.Module | None = None
    ) -> dict[str, Tensor]:
        """The trained model's state under HF names.

        full_state_dict: whole tensors on every rank, else this rank's shards. cpu_offload: copies in host memory.
        """
        if not full_state_dict:
            raise NotImplementedError(f"{type(self).__name__} gives no sharded state: pass full_state_dict=True.")
        chosen = model if model is not None else self._trained_entry(None).model
        device = torch.device("cpu") if cpu_offload else self.device
        return {name: tensor.to(device, copy=True) for name, tensor in self.full_parameters(chosen)}

    # ---- Checkpoints under the other seed's names ----------------------------------------------------------------

    def save_checkpoint(self, save_path: str, step: int = 0) -> None:
        self.set_global_step(step)
        self.save_ckpt(self._trained_entry(None).model, save_path, max_mem=0)

    def load_checkpoint(self, load_path: str) -> Any:
        return self.load_ckpt(self._trained_entry(None).model, load_path)

    def save_pretrained(self, model: nn.Module, path: str | Path) -> None:
        """Writes a HF folder that from_pretrained loads; every rank must call it, rank 0 writes."""
        full = {name: tensor.cpu() if self.comm.is_main else None for name, tensor in self.full_parameters(model)}
        unwrapped: Any = self.unwrap_model(model)
        full |= {name: buffer.cpu() for name, buffer in persistent_buffers(unwrapped)}
        if self.comm.is_main:
            unwrapped.save_pretrained(path, state_dict=full)
        self.comm.barrier()


def persistent_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """(name, buffer) of those that belong to a saved model, sorted by name."""
    found = []
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found.append((f"{prefix}.{name}" if prefix else name, buffer))
    return sorted(found, key=lambda item: item[0])


def accumulation_steps(train_batch_size: int, micro_train_batch_size: int, world_size: int) -> int:
    """Micro-batches a rank runs per update."""
    for name, value in (("train_batch_size", train_batch_size), ("micro_train_batch_size", micro_train_batch_size)):
        if value < 1:
            raise ValueError(f"{name} is {value}: it must be at least 1.")
    at_once = micro_train_batch_size * world_size
    if train_batch_size % at_once:
        low = train_batch_size // at_once * at_once
        nearest = f"{low} or {low + at_once}" if low else f"{at_once}"
        raise ValueError(
            f"train_batch_size {train_batch_size} is not a multiple of micro_train_batch_size {micro_train_batch_size} "
            f"x world size {world_size} = {at_once}. Nearest valid train_batch_size: {nearest}."
        )
    return train_batch_size // at_once


def pick_device(wanted: str, num_gpu_per_node: int) -> torch.device:
    """This process's device; with several GPUs the one of LOCAL_RANK, or without that of RANK % num_gpu_per_node."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("The device is set to 'cuda', but torch sees no GPU. Use --distributed.device cpu or auto.")
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", rank % num_gpu_per_node))
    visible = torch.cuda.device_count()
    if local_rank >= visible:
        raise ValueError(
            f"Local rank {local_rank} has no GPU: {visible} usable here. Start at most that many processes."
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _repoint_optimizer(optimizer: Optimizer, old_names: Mapping[int, str], model: nn.Module) -> None:
    """Sharding replaces the parameters; an optimizer made before must hold the new ones."""
    new = dict(model.named_parameters())
    if optimizer.state and any(name in new and id(new[name]) != key for key, name in old_names.items()):
        raise ValueError("The optimizer has taken steps before prepare(). Prepare first, then train.")
    for group in optimizer.param_groups:
        group["params"] = [new.get(old_names.get(id(item), ""), item) for item in group["params"]]
