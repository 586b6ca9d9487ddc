"""ForeignNames: the names of other trainers' strategy interfaces, over lightrl's own.

Code written for those interfaces runs on a lightrl strategy; lightrl's own trainers need none of these names.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from easydict import EasyDict
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

import lightrl.comm as comm_module
from lightrl.engines.base import InferenceEngine, check_engine_name
from lightrl.seeding import mix_seed
from lightrl.strategy import foreign_data
from lightrl.strategy.foreign_forward import ForwardNames
from lightrl.strategy.foreign_models import (
    Native,
    options_of,
    prepare_frozen_models,
    prepare_item,
    prepare_slot,
    refuse_attribute,
    require_world,
)
from lightrl.strategy.foreign_pretrained import find_tokenizer, first_model, named_policy, set_up_trained
from lightrl.strategy.optim.grad_scaler import GradScaler
from lightrl.strategy.optim.optimizers import build_lr_scheduler
from lightrl.strategy.optim.parameter_kinds import apply_lr_scales
from lightrl.strategy.optim.value_head import freeze_all_but_value_head
from lightrl.strategy.results import Batches, LossFn, WeightFn
from lightrl.strategy.serving import foreign_inputs
from lightrl.strategy.serving.foreign_media import build_multimodal_inputs
from lightrl.strategy.stats import Stats
from lightrl.strategy.user_batch import evaluate


class ForeignNames(ForwardNames, ABC):
    """Mixin of StrategyBase that offers its methods and parts under the names of other trainers."""

    grad_scaler: GradScaler | None = None
    num_generations: int = 0  # calls of engine_generate_local and gather_and_generate; checkpoints keep it

    if not TYPE_CHECKING:  # hidden from type checkers, which would then accept any name

        def __getattr__(self, name: str) -> Any:
            """Explains a missing attribute: usually one that setup_distributed() would have made."""
            refuse_attribute(self, name)

    @cached_property
    def stats(self: Native) -> Stats:
        """Numbers that your own code records, by scope; a trainer logs them with those of its step."""
        return Stats(self)

    # ---- Models and optimizers ---------------------------------------------------------------------------------

    def prepare(self: Native, *models_or_model_optim_pairs: Any, is_rlhf: bool = False) -> Any:
        """Prepares each item: None, a module, (module, optimizer) or (module, optimizer, scheduler).

        A single item is returned as a single item. With is_rlhf, a module without an optimizer is a reference or
        reward model, so it is frozen and put in evaluation mode.
        """
        require_world(self.comm, "prepare()")
        prepared = [prepare_item(self, item, freeze_lone=is_rlhf) for item in models_or_model_optim_pairs]
        return prepared[0] if len(prepared) == 1 else prepared

    def prepare_models_and_optimizers(
        self: Native, actor: Any, critic: Any, reward_models: Any, initial_model: Any, args: Any, max_steps: int
    ) -> tuple[Any, Any, Any, Any]:
        """Returns ((actor, optimizer, scheduler), (critic, optimizer, scheduler), reward_models, initial_model).

        A value head on the actor's own body learns at critic_lr; critic_warmup_steps updates train a head alone.
        max_steps is the length of the schedules, in units of --optim.schedule_unit. critic, reward_models (one, a list
        or a dict of them, a ModuleList) and initial_model may be None.
        """
        require_world(self.comm, "prepare_models_and_optimizers()")
        options = options_of(self, args)
        is_first = not self.trained.entries  # the patterns need not match a critic that comes later
        must_match = actor is not None or (critic is not None and is_first)
        apply_lr_scales([actor, critic], options.optim, must_match=must_match)
        if actor is not None:
            actor.is_actor = True
        return (
            prepare_slot(self, actor, options, options.lr, max_steps),
            prepare_slot(self, critic, options, options.critic_lr, max_steps),
            prepare_frozen_models(self, reward_models),
            prepare_item(self, initial_model, freeze_lone=True),
        )

    def build_optimizer(self: Native, model: nn.Module, enable_critic_warmup: bool = False) -> Optimizer:
        """Returns the optimizer of the options; the first critic_warmup_steps updates train a value head alone."""
        optimizer = self.create_optimizer(model)
        if enable_critic_warmup:
            freeze_all_but_value_head(optimizer, model, self.options.critic_warmup_steps)
        return optimizer

    def build_grad_scaler(self: Native, enabled: bool, **kwargs: Any) -> GradScaler:
        """Makes backward() scale losses from now on, and undoes it before the clip; kwargs are those of GradScaler."""
        self.grad_scaler = GradScaler(enabled, **kwargs)
        others = [hook for hook in self.trained.hooks if not isinstance(hook, GradScaler)]
        self.trained.hooks = [*others, self.grad_scaler] if enabled else others
        return self.grad_scaler

    def build_lr_scheduler(
        self: Native, optimizer: Optimizer, optim_config: Any = None, total_steps: int | None = None
    ) -> LRScheduler:
        """Returns the schedule of the options (or of optim_config) over total_steps, or over the run's steps."""
        length = getattr(self.options, "schedule_length", 0) if total_steps is None else total_steps
        config = optim_config or self.options.optim
        if not length and (config.schedule != "constant" or config.warmup_ratio):
            raise _without_length(config.schedule)  # over one step, the rate would be 0 from the second step on
        return build_lr_scheduler(optimizer, config, length or 1)

    def model_provider_func(self: Native, pre_process: bool = True, post_process: bool = True) -> nn.Module:
        """Returns the whole policy that args name; a subclass may make its own. Stages are cut from it later."""
        return named_policy(self)

    def setup_model_and_optimizer(self: Native, model_type: Any = None) -> None:
        """Prepares the model of model_provider_func(); sets model, optimizer, lr_scheduler and grad_scaler."""
        set_up_trained(self)

    def random_stream(self: Native, role: str, per_rank: bool = True) -> torch.Generator:
        """Returns a CPU generator that depends on the seed, the role and, unless per_rank is False, the rank."""
        parts = (self.seed, *role.encode(), self.comm.rank if per_rank else -1)
        return torch.Generator().manual_seed(mix_seed(*parts))

    # ---- Data --------------------------------------------------------------------------------------------------

    def setup_dataloader(
        self: Native,
        replay_buffer: Any,
        batch_size: int,
        pin_memory: bool = False,
        shuffle: bool = True,
        collate_fn: Callable[..., Any] | None = None,
        drop_last: bool = True,
        sampler: Any | None = None,
        consumed_samples: int = 0,
    ) -> DataLoader[Any]:
        """Returns a loader of this rank's samples; consumed_samples counts all ranks', to resume at any world size.

        With drop_last=False, every sample is given once, in equally many batches on all ranks; the last may be smaller.
        """
        settings: dict[str, Any] = {"pin_memory": pin_memory, "drop_last": drop_last, "collate_fn": collate_fn}
        return foreign_data.make_loader(self, replay_buffer, batch_size, sampler, shuffle, consumed_samples, **settings)

    @classmethod
    def make_data_iterator_list(
        cls, data_iterator: Iterator[Any], padding: bool = False, vpp_size: int = 1
    ) -> list[Iterator[Any]]:
        """Returns vpp_size iterators over the same micro-batches, one for each chunk of a pipeline stage.

        padding: micro-batches are dictionaries, and each gets max_batch_seqlen, the tokens of the largest micro-batch.
        """
        return foreign_data.iterators_of(data_iterator, vpp_size, counts_tokens=padding)

    # ---- Training ----------------------------------------------------------------------------------------------

    def eval_batch(
        self: Native, data: Batches, loss_fn: LossFn, loss_weight_fn: WeightFn, *, model: nn.Module | None = None
    ) -> float:
        """Returns the loss that train_batch would report, without training."""
        return evaluate(self, data, loss_fn, loss_weight_fn, model)

    def step_lr_scheduler(self: Native, model: nn.Module | None = None) -> None:
        """Steps the schedule, unless an update since the last call has done so, as train_batch does."""
        trained = self.trained.entry(model)
        has_updated = trained.optimizer in self.trained.scheduled
        self.trained.scheduled.discard(trained.optimizer)
        is_counted = has_updated and self.options.optim.schedule_unit == "optimizer_step"
        if trained.scheduler is not None and not is_counted:
            trained.scheduler.step()

    # ---- Communication -----------------------------------------------------------------------------------------

    def all_reduce(self: Native, data: Any, op: str = "mean") -> Any:
        """Reduces a tensor, a number, a NumPy value, or a list or dict of them by op: mean, sum, max or min.

        The result has the format of the input, which is not changed.
        """
        require_world(self.comm, "all_reduce()")
        return foreign_data.reduced(self.comm, data, op)

    def all_gather(self: Native, data: Any) -> Any:
        """Concatenates the ranks' tensors along dim 0; lengths may differ, other dimensions may not."""
        require_world(self.comm, "all_gather()")
        return foreign_data.gathered(self.comm, data)

    @classmethod
    def print(cls, *msg: Any) -> None:
        """Prints a message with the time, on rank 0 only."""
        if cls.is_rank_0():
            sys.stdout.write(f"[{datetime.now():%m-%d %H:%M:%S}] {' '.join(map(str, msg))}\n")
            sys.stdout.flush()

    @classmethod
    def is_rank_0(cls) -> bool:
        """Returns whether this is rank 0."""
        return comm_module.current().is_main

    def get_rank(self: Native) -> int:
        """Returns this process's rank."""
        return self.comm.rank

    @classmethod
    def report_memory(cls, prefix: str = "") -> dict[str, float]:
        """Returns the GB that this rank uses and prints them on rank 0; no other rank need call it."""
        return foreign_data.report_memory(prefix, cls.print)

    @contextmanager
    def init_model_context(self: Native) -> Iterator[None]:
        """Wraps the construction of a model and reports the memory after it."""
        yield
        self.report_memory("model built")

    @classmethod
    def sync_and_clear_cache(cls) -> None:
        """Waits for the device and for every rank, then frees cached device memory."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        comm_module.current().barrier()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # ---- Checkpoints and weights -------------------------------------------------------------------------------

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
        """Writes model, optimizer, scheduler, random states, counters and client_state atomically.

        companions: models saved with their optimizers in the same checkpoint, such as a critic. A tag names one
        checkpoint; without one, folders are named by the step, or counted if set_global_step is never called.
        max_num and max_mem (MB, 0 = no limit) bound what is kept, separately for tags and steps. The newest always
        stays, and so does the newest saved with save_latest, which a load without a tag reads.
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

    def save_checkpoint(self: Native, save_path: str, step: int = 0) -> None:
        """Saves the trained model as the checkpoint of a step; offloaded parts are loaded for it."""
        self.set_global_step(step)
        trained = self.trained.entry(None)
        with self.residency.of_optimizer(trained.optimizer).on_device():
            self.save_ckpt(trained.model, save_path, max_mem=0)

    def load_checkpoint(self: Native, load_path: str) -> Any:
        """Loads the newest checkpoint into the trained model; offloaded parts are loaded for it."""
        trained = self.trained.entry(None)
        with self.residency.of_optimizer(trained.optimizer).on_device():
            return self.load_ckpt(trained.model, load_path)

    def get_model_state_dict(
        self: Native, cpu_offload: bool = False, full_state_dict: bool = True, model: nn.Module | None = None
    ) -> dict[str, Tensor]:
        """Returns the trained model's state under Hugging Face names.

        full_state_dict: whole tensors on every rank; if False, this rank's shards. cpu_offload: copies in host memory.
        """
        if not full_state_dict:
            raise NotImplementedError(f"{type(self).__name__} gives no sharded state: pass full_state_dict=True.")
        chosen = model if model is not None else self.trained.entry(None).model
        device = torch.device("cpu") if cpu_offload else self.device
        return {name: tensor.to(device, copy=True) for name, tensor in self.full_parameters(chosen)}

    # ---- Sampling ----------------------------------------------------------------------------------------------

    def setup_inference_engine(
        self: Native, args: Any, engine_type: str = "vllm", actor: nn.Module | None = None
    ) -> InferenceEngine:
        """Builds the engine beside the trainer and gives it the actor's weights.

        Without an actor, they are those of the model that trains, or of the folder that args name (pretrain, model).
        """
        check_engine_name(engine_type)
        options, model = options_of(self, args), first_model(self, args) if actor is None else actor
        return self.serving.start(engine_type, model=model, tokenizer=self.tokenizer, options=options)

    def engine_generate_local(
        self: Native,
        sampling_params: Any,
        prompt_token_ids: Any | None = None,
        multi_modal_inputs: list[dict[str, Any]] | None = None,
    ) -> list[EasyDict]:
        """Runs this rank's engine on exactly one kind of input; returns a flat list of n items per prompt, in order."""
        return foreign_inputs.generate_local(
            self, sampling_params, prompt_token_ids, multi_modal_inputs, partial(find_tokenizer, self)
        )

    def gather_and_generate(
        self: Native,
        sampling_params: Any,
        all_prompt_token_ids: Any | None = None,
        all_prompts: list[str] | None = None,
        all_images: Any | None = None,
        sleep_engine: bool = True,
        images_num: list[int] | None = None,
        all_videos: Any | None = None,
        videos_num: list[int] | None = None,
        *,
        for_training: bool = False,
    ) -> list[EasyDict]:
        """Samples this rank's prompts (any number, even none) on the engine that its group shares.

        Texts or token ids with images or videos hold one placeholder for each. If both are given, the text of a prompt
        with images or videos counts, and the token ids of any other. With shared sampling_params, draws depend on the
        prompt's position among those of all ranks, so results do not depend on the world size; give one SamplingParams
        per prompt to set each seed. Without a seed, every call draws anew. An error on one rank is raised on all.

        for_training: refuse settings such as top_p or a penalty, under which trainer and engine compute different
        logprobs; items sampled with such settings have is_trainable False.
        """
        return foreign_inputs.generate_gathered(
            self,
            sampling_params,
            token_ids=all_prompt_token_ids,
            texts=all_prompts,
            media=(all_images, images_num, all_videos, videos_num),
            sleep_engine=sleep_engine,
            for_training=for_training,
            find_tokenizer=partial(find_tokenizer, self),
        )

    @classmethod
    def _build_multimodal_inputs(
        cls, all_prompts: Any, all_images: Any, images_num: Any, all_videos: Any, videos_num: Any
    ) -> list[dict[str, Any]]:
        return build_multimodal_inputs(all_prompts, all_images, images_num, all_videos, videos_num)

    def update_engine_weights(self: Native, actor: nn.Module) -> None:
        """Calls sync_weights()."""
        self.serving.sync_weights(actor)

    def maybe_sleep_inference_engine(self: Native) -> None:
        """Calls sleep_engine()."""
        self.serving.sleep()

    def wakeup_inference_engine(self: Native) -> None:
        """Calls wake_engine()."""
        self.serving.wake()

    def sync_model_to_rollout(self: Native, actor: nn.Module | None = None) -> None:
        """Sends the weights of a model, or of the trained one, to the engine."""
        self.sync_weights(actor if actor is not None else self.trained.entry(None).model)

    # ---- Offload -----------------------------------------------------------------------------------------------

    def maybe_offload_optimizer(self: Native, optimizer: Optimizer) -> int:
        """Moves the optimizer's states, and the average of the weights, to host memory; returns the bytes freed."""
        return self.residency.of_optimizer(optimizer).offload_optimizer()

    def maybe_load_optimizer(self: Native, optimizer: Optimizer, device: torch.device | None = None) -> int:
        """Brings the states back to the device they left, the only one that may be named; returns the bytes loaded."""
        if device is not None and torch.device(device).type != self.device.type:
            raise ValueError(f"Optimizer states live on {self.device}; they cannot be loaded to {device}.")
        return self.residency.of_optimizer(optimizer).load_optimizer()

    def offload_optimizer(self: Native) -> int:
        """Moves all trained models' optimizer states to host memory; returns the bytes freed on this rank."""
        return self.residency.offload_optimizers()

    def load_optimizer(self: Native, device_id: Any = None) -> int:
        """Brings all states back to the device they left, whatever device_id says; returns the bytes loaded."""
        return self.residency.load_optimizers()

    def offload_param_and_grad(self: Native, offload_grad: bool = False) -> int:
        """Moves the trained models' weights (with offload_grad, gradients too) to host memory; returns bytes freed."""
        return self.residency.offload_parameters(with_gradients=offload_grad)

    def load_param_and_grad(self: Native, device_id: Any = None, load_grad: bool = False) -> int:
        """Brings the weights back, and with load_grad the gradients; otherwise offloaded gradients are dropped.

        They return to the device they left, whatever device_id says. Returns the bytes loaded on this rank.
        """
        return self.residency.load_parameters(keep_gradients=load_grad)

    def offload_megatron_copy_params(self: Native, optimizers: Optimizer | Sequence[Optimizer]) -> int:
        """Moves the float32 copies of bfloat16 weights to host memory, not those weights; returns the bytes freed.

        Passes without a backward still work. Strategies whose optimizers step the weights themselves free 0 bytes.
        """
        return sum(self.residency.of_optimizer(item).offload_main_copies() for item in _each(optimizers))

    def load_megatron_copy_params(self: Native, optimizers: Optimizer | Sequence[Optimizer]) -> int:
        """Brings the float32 copies back; returns the bytes loaded."""
        return sum(self.residency.of_optimizer(item).load_main_copies() for item in _each(optimizers))


def _each(optimizers: Optimizer | Sequence[Optimizer]) -> Sequence[Optimizer]:
    return [optimizers] if isinstance(optimizers, Optimizer) else optimizers


def _without_length(schedule: str) -> ValueError:
    return ValueError(
        f"build_lr_scheduler() was not told how many steps the schedule has, and --optim.schedule {schedule} depends "
        "on it: give total_steps, or a config that has a schedule_length."
    )
