"""StrategyBase: how a model is spread over ranks, trained, saved, and served by the engine beside it.

A strategy holds its parts: `comm` (collectives), `layout` (where a parameter lies), `trained` (models with their
optimizers), `saver` (training state on disk), `residency` (what is on the device), `serving` (the engine).
"""

from __future__ import annotations

import math
import os
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import lightrl.comm as comm_module
from lightrl.config import OptimConfig, RunConfig, StrategyOptions, check_own_options
from lightrl.engines.base import Completion, EngineGroup, EnginePrompt, SamplingParams, check_engine_name
from lightrl.engines.colocated import ColocatedEngine, EngineStatus, SyncReport
from lightrl.engines.weights.fingerprint import KnownWeights
from lightrl.imports import load_object
from lightrl.metrics import Statistics
from lightrl.models.multimodal import MediaProcessor
from lightrl.models.policy import persistent_buffers
from lightrl.strategy import foreign_steps
from lightrl.strategy.computation import check_compiler, compile_blocks, use_deterministic_kernels
from lightrl.strategy.contract import ForeignNames
from lightrl.strategy.foreign_models import is_actor
from lightrl.strategy.layout.plain import PlainLayout, innermost
from lightrl.strategy.optim.accumulation import accumulation_steps
from lightrl.strategy.optim.optimizers import TrainedModels, build_lr_scheduler, checked_max_norm
from lightrl.strategy.optim.parameter_kinds import apply_lr_scales
from lightrl.strategy.optim.value_head import set_up_value_head
from lightrl.strategy.own_class import check_optimizer, checked_class, no_model, no_step
from lightrl.strategy.results import (
    Batches,
    GroupBatches,
    LossFn,
    OptimizerStep,
    TrainBatchResult,
    TrainedModel,
    WeightFn,
)
from lightrl.strategy.saving.background_save import BackgroundSaver
from lightrl.strategy.saving.saver import TrainingStateSaver
from lightrl.strategy.saving.state_files import complete_folder, write_folder_hash
from lightrl.strategy.serving.colocated_serving import ColocatedServing, OffloadingServing
from lightrl.strategy.serving.foreign_inputs import Decoder
from lightrl.strategy.serving.residency import Residency
from lightrl.strategy.skipped import drop_update, explained, nothing_to_train
from lightrl.strategy.stats import once_each
from lightrl.strategy.user_batch import token_logprobs, train_on_dict

__all__ = ["EngineStatus", "OptimizerStep", "StrategyBase", "TrainBatchResult", "TrainedModel", "is_actor"]

BUILTIN_STRATEGIES = {
    "single": "lightrl.strategy.torch_native:SingleStrategy",
    "ddp": "lightrl.strategy.ddp:DDPStrategy",
    "fsdp": "lightrl.strategy.fsdp:FSDPStrategy",
    "deepspeed": "lightrl.strategy.deepspeed:DeepSpeedStrategy",
    "megatron": "lightrl.strategy.megatron.strategy:MegatronStrategy",
}


class StrategyBase(ForeignNames, ABC):
    """The interface of every strategy; docs/adding_a_strategy.md says what a back end must write.

    ForeignNames adds the names of other trainers' interfaces, each a one-line wrapper of a method of this class, and
    save_ckpt and load_ckpt, which a back end writes.
    """

    splits_models: ClassVar[bool] = False  # whether it supports --tp_size and --sp_size

    def __init__(
        self, seed: int, max_norm: float, micro_train_batch_size: int, train_batch_size: int, args: Any | None = None
    ) -> None:
        self.seed, self.args = seed, args
        self.micro_train_batch_size, self.train_batch_size = micro_train_batch_size, train_batch_size
        self.options = options = StrategyOptions.from_args(args)
        exact = options.exact_batches  # a run's options, which are checked: then train_batch accepts any sizes
        self.max_norm = max_norm if exact else checked_max_norm(max_norm)
        self.accumulation_steps = 1 if exact else self._accumulation_steps(comm_module.known_world())
        self.device = torch.device("cpu")
        self.comm = comm_module.found_world()
        self.layout = PlainLayout(self.comm)
        self.trained = TrainedModels()
        self.saver = BackgroundSaver(self) if options.checkpoint.asynchronous else TrainingStateSaver(self)
        offloads = options.offload_while_generating
        self.serving = OffloadingServing(self, options, self.residency) if offloads else ColocatedServing(self, options)
        self.tokenizer: Decoder | None = None  # gives gather_and_generate its text
        self.media: MediaProcessor | None = None  # for a vision-language model: the canary scores images with it
        self.global_step = 0
        self.statistics = Statistics()  # what `stats` and a trainer record; the trainer reduces them in every step

    # ---- Back end: what a subclass writes ----------------------------------------------------------------------

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Places (and shards) the model; every rank ends with the weights of rank 0. By default it stays whole."""
        return foreign_steps.place_whole(self, model)

    @abstractmethod
    def create_optimizer(self, model: nn.Module, **kwargs: Any) -> Optimizer:
        """Returns an optimizer over the model's trainable parameters; kwargs win over the options."""

    @abstractmethod
    def backward(self, loss: Tensor, model: nn.Module, optimizer: Optimizer, **kwargs: Any) -> None:
        """Adds the gradient of the loss.

        With weight=w, the added gradient is w times the gradient of the loss, SUMMED over ranks. Without a weight, the
        loss is a mean over this rank's micro-batch, and the update uses the mean over all ranks and accumulation steps.
        """

    @abstractmethod
    def optimizer_step(
        self, optimizer: Optimizer, model: nn.Module, scheduler: Any, name: str = "model", **kwargs: Any
    ) -> OptimizerStep:
        """Updates the model at the end of an accumulation, or now with is_boundary=True; all ranks decide alike."""

    def full_parameters(self, model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yields (Hugging Face name, whole tensor), sorted, tied ones once; every rank must iterate to the end."""
        return foreign_steps.whole_parameters(self, model, dtype)

    def weight_fingerprints(self, model: nn.Module, dtype: torch.dtype | None) -> KnownWeights | None:
        """Returns a fingerprint of each tensor of full_parameters(), computed from shards; None means no proof."""
        return None

    def before_micro_batch(self, model: nn.Module, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        """Returns a context for the forward and backward of a micro-batch; gradients are reduced in the last one."""
        return nullcontext()

    def after_forward_only(self, model: nn.Module) -> None:
        """Frees what passes without a backward leave in the model; called after such passes."""

    @property
    def materializes_weights(self) -> bool:
        """Whether this rank should load real weights before prepare; the others may build on the meta device."""
        return True

    def group_batches(self, data: Sequence[Any]) -> GroupBatches:
        """Returns the micro-batches that this rank must run, its own among them; every rank must call it.

        Ranks that split a model or its tokens (--tp_size, --sp_size) together run the micro-batches of all of them.
        train_batch and forward call this; code that calls such a model directly must call it too.
        """
        return GroupBatches(list(data), range(len(data)))

    def make_layout(self) -> PlainLayout:
        """Returns the layout of this strategy's parameters, over self.comm."""
        return PlainLayout(self.comm)

    def check_model_config(self, config: Any) -> None:
        """Raises ValueError for the transformers config of a model that cannot be spread with these options."""

    # ---- Setup -------------------------------------------------------------------------------------------------

    def set_seed(self, seed: int) -> None:
        """Seeds Python, NumPy and torch alike on all ranks; use random_stream for draws that must differ."""
        self.seed = seed
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        if self.options.distributed.deterministic:
            use_deterministic_kernels()

    def setup_distributed(self, timeout: timedelta | None = None, num_gpu_per_node: int = 8) -> None:
        """Joins the world that torchrun describes (or is a world of one) and picks the device."""
        check_engine_name(self.options.engine)
        self.device = comm_module.pick_device(self.options.distributed.device, num_gpu_per_node)
        if not self.splits_models and (self.options.tp_size, self.options.sp_size) != (1, 1):
            _refuse_to_split(self)
        self.comm = comm_module.connect(self.device, timeout or timedelta(seconds=self.options.distributed.timeout_s))
        if not self.options.exact_batches:
            self.accumulation_steps = self._accumulation_steps(self.comm.world)
        size = self.options.engine_tp_size
        self.serving.group = EngineGroup(self.comm) if size == 1 else EngineGroup.shared(self.comm, size)
        self.layout = self.make_layout()
        self.set_seed(self.seed)

    def _accumulation_steps(self, world: int) -> int:
        """Returns how many calls of backward() make up an update; raises ValueError if the sizes do not fit."""
        ranks_apart = max(1, world // (self.options.tp_size * self.options.sp_size))
        return accumulation_steps(self.train_batch_size, self.micro_train_batch_size, world_size=ranks_apart)

    def prepare_trained(
        self,
        model: nn.Module,
        *,
        lr: float | None = None,
        schedule_length: int = 1,
        head_lr: float | None = None,
        frozen_head_steps: int = 0,
        optim: OptimConfig | None = None,
    ) -> TrainedModel:
        """Places a model and gives it an optimizer and a learning-rate schedule.

        Args:
            model: a policy, critic, reward model or any other module.
            lr: the peak rate; None means --lr.
            schedule_length: the length of the schedule, in units of --optim.schedule_unit.
            head_lr: the rate of a value head on the model's body; None means the body's rate.
            frozen_head_steps: how many updates at first train the value head alone, with the body frozen.
            optim: options that the caller has checked; None means those of the strategy.
        """
        if optim is None:
            optim = self.options.optim
            if optim.lr_scales:
                apply_lr_scales([model], optim, must_match=not self.trained.entries)  # a critic comes later
        lr = self.options.lr if lr is None else lr
        model = self.prepare_model(model)
        if not isinstance(model, nn.Module):
            raise no_model(type(self), model)
        optimizer = self.create_optimizer(
            model, lr=lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay
        )
        if not type(self).__module__.startswith("lightrl."):
            check_optimizer(self, optimizer, model)
        if head_lr is not None or frozen_head_steps:
            set_up_value_head(optimizer, model, head_lr, frozen_head_steps)
        scheduler = build_lr_scheduler(optimizer, optim, schedule_length)
        self.register(model, optimizer, scheduler)
        return TrainedModel(model, optimizer, scheduler)

    def prepare_frozen(self, model: nn.Module) -> nn.Module:
        """Places a model that is never trained, such as a reference or reward model, in evaluation mode."""
        model = self.prepare_model(model.eval().requires_grad_(False))
        if not isinstance(model, nn.Module):
            raise no_model(type(self), model)
        self.trained.placed[model] = None
        return model

    def unwrap_model(self, model: Any) -> nn.Module:
        """Returns the model underneath every wrapper (actor, DDP, compiled, PEFT), with Hugging Face names."""
        return innermost(model)

    def register(self, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None = None) -> None:
        """Makes this the model's optimizer for train_batch, checkpoints and offload."""
        self.trained.add(model, optimizer, scheduler)
        if self.options.compile:
            check_compiler(self.device)
            compile_blocks(model)

    def set_global_step(self, global_step: int) -> None:
        """Sets the trainer's step; the next weight sync is stamped with it."""
        self.global_step = global_step

    def close(self) -> None:
        """Completes a checkpoint that is being written, ends the engine, then leaves the process group."""
        try:
            self.saver.finish()
        finally:
            self.serving.close()
            self.comm.close()

    # ---- Training ----------------------------------------------------------------------------------------------

    def train_batch(
        self, data: Batches, loss_fn: LossFn, loss_weight_fn: WeightFn, *, model: nn.Module | None = None
    ) -> TrainBatchResult:
        """Takes one optimizer step over any number of micro-batches of any size on each rank.

        loss_fn(model(mb), mb) is the mean over the loss_weight_fn(mb) trained tokens of the micro-batch. With W the sum
        of the weights over micro-batches and ranks, the gradient is that of sum(loss * weight) / W: the mean over all
        trained tokens, however they are split. The update is skipped on all ranks if W is 0, or if the loss or the norm
        of its gradient is not finite. A dictionary of tensors is packed, and loss_fn gets logits: docs/user_batches.md.
        """
        if isinstance(data, Mapping):
            return train_on_dict(self, data, loss_fn, loss_weight_fn, model)
        trained = self.trained.entry(model)
        self.trained.require_on_device(trained.optimizer)  # checked first: a later error would leave gradients behind
        batches, mine = self.group_batches(data)
        weights = [float(loss_weight_fn(micro_batch)) for micro_batch in batches]
        own = sum((weights[index] for index in mine), 0.0)
        counts, totals = zip(*self.comm.all_gather_object((len(batches), own)), strict=True)
        batches, total = self._filled_up(batches, counts), sum(totals)
        if not 0 < total < math.inf:
            return nothing_to_train(self, trained, total)
        trained.model.train()
        shares = [weight / total for weight in weights] + [0.0] * (len(batches) - len(weights))
        if len(batches) > len(weights):
            loss_fn = once_each(self, loss_fn, len(weights))
        loss_sum = self.comm.all_reduce(self._add_gradients(trained, batches, shares, loss_fn, mine), "sum")
        if math.isfinite(loss_sum):
            step = self.optimizer_step(trained.optimizer, trained.model, trained.scheduler, is_boundary=True)
            if not isinstance(step, OptimizerStep):
                raise no_step(type(self), step)
        else:
            step = drop_update(self, trained.optimizer, trained.model)
        result = TrainBatchResult(
            loss=loss_sum,
            grad_norm=step.grad_norm,
            lr=step.lr_list[0],
            skipped=step.skipped,
            total_weight=total,
            num_micro_batches=len(batches),
        )
        return explained(self, result, trained.model, data) if result.skipped else result

    def _filled_up(self, batches: list[Any], counts: Sequence[int]) -> list[Any]:
        """Repeats the last micro-batch until there are as many as on any rank, as every rank must run every pass."""
        if not all(counts):
            raise _no_micro_batch(self.comm.rank, len(batches))
        return [*batches, *batches[-1:] * (max(counts) - len(batches))]

    def _add_gradients(
        self, trained: TrainedModel, batches: list[Any], shares: list[float], loss_fn: LossFn, mine: range
    ) -> float:
        """Adds each micro-batch's gradient, weighted by its share; returns this rank's part of the mean loss."""
        losses = []  # read at the end, so that a device need not wait for the next micro-batch to be started
        for index, (micro_batch, share) in enumerate(zip(batches, shares, strict=True)):
            with self.before_micro_batch(trained.model, index == len(batches) - 1):
                loss = loss_fn(trained.model(micro_batch), micro_batch)
                self.backward(loss, trained.model, trained.optimizer, weight=share)
            losses.append(loss.detach())
        return sum((float(losses[index]) * shares[index] for index in mine if shares[index]), 0.0)

    @torch.no_grad()
    def forward(self, data: Batches, *, model: nn.Module | None = None) -> Any:
        """Returns model(mb) for each micro-batch, without gradients, in order."""
        if isinstance(data, Mapping):
            return token_logprobs(self, data, model)
        chosen = model if model is not None else self.trained.entry(None).model
        was_training = chosen.training
        batches, mine = self.group_batches(data)
        try:
            chosen.eval()
            passes = enumerate(map(chosen, self._filled_up(batches, self.comm.all_gather_object(len(batches)))))
            return [output for index, output in passes if index in mine]
        finally:
            self.after_forward_only(chosen)
            chosen.train(was_training)

    def keep_average(self, model: nn.Module, decay: float) -> None:
        """Averages the model's weights after each optimizer step from now on, and in checkpoints of the model."""
        raise NotImplementedError(f"{type(self).__name__} keeps no average of the weights: leave out --ema_decay.")

    @contextmanager
    def averaged_weights(self, model: nn.Module) -> Iterator[None]:
        """Gives the model the average of its weights inside the context; every rank must enter it."""
        raise NotImplementedError(f"{type(self).__name__} keeps no average of the weights.")
        yield

    # ---- Memory ------------------------------------------------------------------------------------------------

    @cached_property
    def residency(self) -> Residency:
        """What is on the device and what is in host memory; created when the first model or optimizer has to move."""
        return Residency(self)

    # ---- Saving ------------------------------------------------------------------------------------------------

    def save_pretrained(self, model: nn.Module, path: str | Path) -> None:
        """Writes a Hugging Face folder that from_pretrained loads; every rank must call it, rank 0 writes."""
        full = {name: tensor.cpu() if self.comm.is_main else None for name, tensor in self.full_parameters(model)}
        unwrapped: Any = self.unwrap_model(model)
        full |= {name: buffer.cpu() for name, buffer in persistent_buffers(unwrapped)}
        if self.comm.is_main:
            unwrapped.save_pretrained(path, state_dict=full)
            complete_folder(unwrapped, Path(path), full)
            write_folder_hash(Path(path), full)
        self.comm.barrier()

    # ---- Serving -----------------------------------------------------------------------------------------------

    @property
    def engine(self) -> ColocatedEngine | None:
        """The engine beside the trainer; None before it is set up."""
        return self.serving.engine

    def generate(
        self, prompts: Sequence[EnginePrompt], params: Sequence[SamplingParams], *, sleep_engine: bool = True
    ) -> list[Completion]:
        """Samples this rank's prompts on its group's engine; every rank must call it, even with no prompts.

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


# ---- Strategies by name ------------------------------------------------------------------------------------------


def create_strategy(config: RunConfig | Any, kind: type[StrategyBase] | None = None) -> StrategyBase:
    """Creates the strategy that config.strategy names, or a `kind`; its setup_distributed() connects the ranks."""
    kind = kind or strategy_class(config.strategy)
    check_own_options(config, kind)
    return kind(
        seed=config.seed,
        max_norm=config.optim.max_norm,
        micro_train_batch_size=config.micro_batch_size or 1,
        train_batch_size=config.samples_per_update,
        args=config,
    )


def strategy_class(name: str) -> type[StrategyBase]:
    """Returns a built-in class by name, or a user's own by module or file, which must be a subclass that can run."""
    if name == "auto":
        name = "single" if int(os.environ.get("WORLD_SIZE", "1")) == 1 else "fsdp"
    if name in BUILTIN_STRATEGIES:
        return cast("type[StrategyBase]", resolve_name(BUILTIN_STRATEGIES[name]))
    own = load_object(name, builtin=BUILTIN_STRATEGIES, what="strategy", example="MyStrategy")
    return checked_class(name, own, StrategyBase)


# ---- Parts -------------------------------------------------------------------------------------------------------


def _refuse_to_split(strategy: StrategyBase) -> None:
    name = "sp_size" if strategy.options.tp_size == 1 else "tp_size"
    raise ValueError(
        f"--{name} {getattr(strategy.options, name)} needs --strategy fsdp; {type(strategy).__name__} does not split a "
        f"model or its tokens. Use --strategy fsdp, or --{name} 1."
    )


def _no_micro_batch(rank: int, count: int) -> ValueError:
    return ValueError(
        f"rank {rank} has {count} micro-batches and some rank has none. Give every rank at least one: "
        "lightrl.data.packing.dummy_batch() trains nothing."
    )
