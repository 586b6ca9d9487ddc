"""MegatronStrategy: trains with megatron-core, whose layouts split matrices, layers, sequences and experts.

The trainer keeps its model, whose parameters are names and shapes on the meta device; the values lie in the stages that
megatron-core runs. Optimizers, checkpoints, weight syncs and averages see Hugging Face tensors, as everywhere.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightrl.strategy.foreign_forward import Step, temperature_of
from lightrl.strategy.layout.meshes import ensure_process_group
from lightrl.strategy.layout.plain import Weights
from lightrl.strategy.megatron import checks, deepseek, main_copies, updates
from lightrl.strategy.megatron.layout import MegatronLayout
from lightrl.strategy.megatron.parts import Sizes, sizes_of
from lightrl.strategy.megatron.placing import Placed, place, placed_of
from lightrl.strategy.megatron.ranks import Ranks, check_sizes, join_groups
from lightrl.strategy.megatron.schedule import forward_step, run_schedule
from lightrl.strategy.optim.accumulation import accumulation_steps
from lightrl.strategy.results import Batches, GroupBatches, LossFn, TrainBatchResult, TrainedModel, WeightFn
from lightrl.strategy.torch_native import TorchStrategy
from lightrl.strategy.user_batch import token_logprobs


class MegatronStrategy(TorchStrategy):
    """Overrides the update and the passes over a model, since a pipeline takes all micro-batches at once."""

    steps_whole_matrices = False
    own_options = ("megatron",)
    splits_models = True
    needs_gpu: ClassVar[bool] = True  # megatron-core creates its buffers on a GPU
    ranks: Ranks

    def __init__(
        self, seed: int, max_norm: float, micro_train_batch_size: int, train_batch_size: int, args: Any | None = None
    ) -> None:
        super().__init__(seed, max_norm, micro_train_batch_size, train_batch_size, args)
        checks.check_options(self.options)
        if importlib.util.find_spec("megatron") is None:
            raise ImportError('--strategy megatron needs megatron-core. Install it: pip install "lightrl[megatron]"')

    @property
    def sizes(self) -> Sizes:
        """The sizes that the options ask for."""
        return sizes_of(self.options)

    def _accumulation_steps(self, world: int) -> int:
        sizes = self.sizes
        ranks_apart = max(1, world // (sizes.tp * sizes.pp * sizes.cp))
        return accumulation_steps(self.train_batch_size, self.micro_train_batch_size, world_size=ranks_apart)

    def setup_distributed(self, timeout: timedelta | None = None, num_gpu_per_node: int = 8) -> None:
        """Joins the world that torchrun describes and builds the groups of the layout."""
        super().setup_distributed(timeout, num_gpu_per_node)
        if self.needs_gpu and self.device.type != "cuda":
            raise ValueError(
                "--strategy megatron needs GPUs: megatron-core puts its buffers there. Use --strategy fsdp on a CPU."
            )
        check_sizes(self.comm.world, self.sizes)
        self.comm = ensure_process_group(self.comm, self.device)
        self.ranks = join_groups(
            self.comm, self.sizes, sequence_parallel=self.options.megatron.sequence_parallel, seed=self.seed
        )
        self.layout = MegatronLayout(self.comm, device=self.device, bucket_bytes=self.options.sync_bucket_mb << 20)

    def check_model_config(self, config: Any) -> None:
        """Raises ValueError for a model that this layout cannot spread."""
        checks.check_config(config, self.sizes, sequence_parallel=self.options.megatron.sequence_parallel)
        deepseek.check_options(config, self.options)

    @property
    def averaging_ranks(self) -> int:
        """The number of replicas of the model: gradients are summed over them and divided by it."""
        sizes = self.sizes
        return self.comm.world // (sizes.tp * sizes.pp * sizes.cp)

    @property
    def materializes_weights(self) -> bool:
        """Only rank 0 loads weights; the others receive their parts."""
        return self.comm.is_main

    # ---- Placing a model ---------------------------------------------------------------------------------------

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Spreads rank 0's weights over the layout; on the other ranks, the model may be on the meta device."""
        source = {name: item.detach() for name, item in model.named_parameters()} if self.comm.is_main else {}
        chosen = self.options.megatron
        buffers = deepseek.take_buffers(model, self.device, self.comm)
        placed = place(
            model,
            self.ranks,
            device=self.device,
            recompute=chosen.recompute == "full",
            shards_states=chosen.distributed_optimizer,
        )
        deepseek.give_buffers(model, placed.stages, buffers)
        if self.options.dtype == "bfloat16":
            main_copies.compute_in_bfloat16(model, placed.stages)
        for name, parameter in sorted(model.named_parameters()):
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=self.device)
            if self.comm.is_main:
                whole.copy_(source.pop(name))
            self.comm.broadcast_tensor(whole)
            self.layout.write_whole(parameter, whole)
        return model

    def register(self, model: nn.Module, optimizer: Optimizer, scheduler: Any = None) -> None:
        """Makes the optimizer step this rank's parts of its parameters."""
        updates.give_local_parameters(optimizer)
        main_copies.follow_steps(optimizer, model)
        super().register(model, optimizer, scheduler)

    def group_batches(self, data: Sequence[Any]) -> GroupBatches:
        """Exchanges micro-batches with the ranks that hold other parts of the same replica."""
        if self.ranks.same_batches is None:
            return super().group_batches(data)
        return GroupBatches.of_group(data, self.comm, self.ranks.same_batches, self.device)

    def weights_of(self, model: nn.Module) -> Weights:
        """Returns the parameters under their Hugging Face names; any main copies must be on the device."""
        main_copies.require_on_device(model)
        return super().weights_of(model)

    # ---- Training ----------------------------------------------------------------------------------------------

    def train_batch(
        self, data: Batches, loss_fn: LossFn, loss_weight_fn: WeightFn, *, model: nn.Module | None = None
    ) -> TrainBatchResult:
        """Takes one optimizer step over micro-batches, as every strategy does; the last stage computes the losses."""
        self.trained.require_on_device(self.trained.entry(model).model)
        return super().train_batch(data, loss_fn, loss_weight_fn, model=model)

    def _add_gradients(
        self, trained: TrainedModel, batches: list[Any], shares: list[float], loss_fn: LossFn, mine: range
    ) -> float:
        losses: list[float] = []

        def scaled(index: int, outputs: Any) -> Tensor:
            loss = loss_fn(outputs, batches[index])
            losses.append(float(loss.detach()) * shares[index] if shares[index] else 0.0)
            return self.scale_loss(loss, shares[index], trained.optimizer)

        run_schedule(placed_of(trained.model), batches, scaled, trains=True)
        # A replica's ranks have the same losses, so one rank's count; but a loss that is not finite shows on all ranks.
        own = sum(losses)
        return own if self.ranks.reports or not math.isfinite(own) else 0.0

    def _filled_up(self, batches: list[Any], counts: Sequence[int]) -> list[Any]:
        """Repeats the last micro-batch until all ranks, and all chunks of a pipeline, have the same number."""
        batches = super()._filled_up(batches, counts)
        missing = -len(batches) % self.sizes.pp if self.sizes.vpp > 1 else 0
        return [*batches, *batches[-1:] * missing]

    @torch.no_grad()
    def forward(self, data: Batches, *, model: nn.Module | None = None) -> Any:
        """Returns model(mb) for each of this rank's own micro-batches, in order, without gradients."""
        if isinstance(data, Mapping):
            return token_logprobs(self, data, model)
        chosen = model if model is not None else self.trained.entry(None).model
        self.trained.require_on_device(chosen)
        placed = placed_of(chosen)
        batches, mine = self.group_batches(data)
        batches = self._filled_up(batches, self.comm.all_gather_object(len(batches)))
        was_training = chosen.training
        chosen.eval()
        outputs = run_schedule(placed, batches, lambda _, outputs: outputs, trains=False)
        chosen.train(was_training)
        return self._outputs_of_last_stage(placed, outputs)[mine.start : mine.stop]

    def get_forward_step_func(self, loss_fn: LossFn | None = None) -> Step:
        """Returns a step for megatron-core's own schedules, over the stages of the trained model."""
        placed = placed_of(self.trained.entry(None).model)
        return forward_step(placed, temperature_of(self.options), loss_fn)

    def _outputs_of_last_stage(self, placed: Placed, outputs: list[Any]) -> list[Any]:
        """Copies the last stage's outputs to every stage."""
        if placed.ranks.sizes.pp == 1:
            return outputs
        host = [_moved(item, torch.device("cpu")) for item in outputs] if self.ranks.reports else None
        found = self.comm.all_gather_object(host, self.ranks.same_batches)
        (whole,) = (items for items in found if items is not None)
        return [_moved(item, self.device) for item in whole]

    def apply_gradients(self, optimizer: Optimizer, model: nn.Module, divisor: float) -> tuple[float, bool]:
        """Sums, divides and clips the gradients, steps if their norm is finite, and then drops the gradients."""
        held = updates.stepped_parts(optimizer)
        updates.sum_gradients(held, divisor * self.averaging_ranks)
        for hook in self.trained.hooks_of(optimizer):
            hook.before_clip(optimizer)
        grad_norm = updates.gradient_norm(held, self.comm)
        is_finite = math.isfinite(grad_norm)  # the same number on all ranks
        if is_finite:
            if self.max_norm:
                parameters = [item.local for item in held if item.local.grad is not None]
                torch.nn.utils.clip_grads_with_norm_(parameters, self.max_norm, torch.tensor(grad_norm))
            updates.step_own(optimizer, held)
        updates.clear_gradients(item.local for item in held)
        return grad_norm, is_finite


def _moved(outputs: Any, device: torch.device) -> Any:
    """Moves a tensor, or a record of tensors, to another device."""
    if torch.is_tensor(outputs):
        return outputs.to(device)
    names = outputs.__dataclass_fields__
    moved = {name: getattr(outputs, name) for name in names}
    return replace(outputs, **{name: value.to(device) for name, value in moved.items() if torch.is_tensor(value)})
