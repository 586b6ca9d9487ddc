"""TorchStrategy: the update, the weights and the checkpoints of torch modules; SingleStrategy is its plainest form."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightrl.comm import known_world
from lightrl.engines.weights.fingerprint import KnownWeights
from lightrl.strategy.base import StrategyBase
from lightrl.strategy.computation import compute_in_bfloat16, enable_gradient_checkpointing
from lightrl.strategy.layout.adapters import MergedWeights, save_adapter
from lightrl.strategy.layout.dtensor import DTensorLayout
from lightrl.strategy.layout.plain import PlainLayout, Weights, has_adapters
from lightrl.strategy.optim.accumulation import accumulation_of
from lightrl.strategy.optim.hooked_step import hooked_step
from lightrl.strategy.optim.hooks import attach, detach, hooks_of
from lightrl.strategy.optim.optimizers import build_optimizer, clip_gradients
from lightrl.strategy.optim.weight_average import AverageOfModel
from lightrl.strategy.results import OptimizerStep, TrainedModel
from lightrl.strategy.saving.saver import SaveRequest, Wanted


class TorchStrategy(StrategyBase):
    """Everything but where a model lies: a subclass writes prepare_model, its layout, and how gradients are reduced."""

    steps_whole_matrices: ClassVar[bool] = True  # False if an optimizer sees only a shard of each parameter

    # ---- What a subclass must write, and what it may write -----------------------------------------------------------

    @abstractmethod
    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Places (and shards) the model; every rank ends with the weights of rank 0."""

    @property
    def averaging_ranks(self) -> int:
        """The number of ranks over which the back end averages a gradient; 1 if it has no reduction."""
        return 1

    @property
    def gradient_parts(self) -> int:
        """The number of ranks that each contribute a part of one micro-batch's gradient."""
        return 1

    def run_backward(self, loss: Tensor, model: nn.Module) -> None:
        """Runs the backward of a loss that has been scaled."""
        loss.backward()

    def reduce_gradients(self, model: nn.Module, parameters: list[Tensor]) -> None:
        """Reduces gradients over the ranks once per update, before the clip, unless run_backward() has done so."""

    def apply_gradients(self, optimizer: Optimizer, model: nn.Module, divisor: float) -> tuple[float, bool]:
        """Divides and clips the gradients, steps if their norm is finite on every rank, and drops them.

        Returns the norm over all ranks before the clip, and whether the optimizer stepped.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.reduce_gradients(model, parameters)
        if divisor != 1:
            _divide_gradients(parameters, divisor)
        for hook in self.trained.hooks_of(optimizer):
            hook.before_clip(optimizer)
        grad_norm = float(clip_gradients(parameters, self.max_norm))
        is_finite = self.comm.agree(math.isfinite(grad_norm))
        if is_finite:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return grad_norm, is_finite

    def make_layout(self) -> PlainLayout:
        """Returns a layout for DTensors and plain parameters; a subclass that shards nothing returns PlainLayout."""
        return DTensorLayout(self.comm, device=self.device, bucket_bytes=self.options.sync_bucket_mb << 20)

    def set_up_computation(self, model: nn.Module) -> None:
        """Turns on --gradient_checkpointing and --dtype for a model that is whole on this rank."""
        if self.options.gradient_checkpointing:
            enable_gradient_checkpointing(self.unwrap_model(model))
        if self.options.dtype == "bfloat16":
            compute_in_bfloat16(model, self.device)

    # ---- An update ---------------------------------------------------------------------------------------------

    def create_optimizer(self, model: nn.Module, **kwargs: Any) -> Optimizer:
        """Builds the optimizer that the options name; kwargs such as lr and betas override them."""
        if self.options.optim.name == "muon" and not self.steps_whole_matrices:
            raise _cuts_matrices(self)
        settings = {"lr": self.options.lr, **kwargs}
        return build_optimizer(model, self.options.optim, shape_of=self.layout.whole_shape, **settings)

    def backward(self, loss: Tensor, model: nn.Module, optimizer: Optimizer, **kwargs: Any) -> None:
        """Adds the gradient of the loss times `weight`, summed over the ranks.

        Without a weight, the loss is a mean over a micro-batch, and accumulation_steps micro-batches make an update.
        """
        weight = kwargs.pop("weight", None)
        if weight is None or kwargs:
            self._backward_of_a_call(loss, model, optimizer, kwargs)
        else:
            self.run_backward(self.scale_loss(loss, weight, optimizer), model)

    def _backward_of_a_call(
        self, loss: Tensor, model: nn.Module, optimizer: Optimizer, unknown: Mapping[str, Any]
    ) -> None:
        if unknown:
            raise TypeError(f"backward() takes no {', '.join(sorted(unknown))}; known: weight.")
        mean = self.gradient_parts / (self.accumulation_steps * self.averaging_ranks)
        if self.averaging_ranks == 1 and not self.splits_models:
            mean /= self.comm.world  # the gradients of all ranks are added up
        with self.before_micro_batch(model, True):  # only optimizer_step() knows which micro-batch is the last
            self.run_backward(self.scale_loss(loss, mean, optimizer), model)
        self.trained.see(model, optimizer)
        accumulation_of(optimizer).count(self.accumulation_steps, loss)

    def scale_loss(self, loss: Tensor, weight: float, optimizer: Optimizer) -> Tensor:
        """Returns the loss whose backward gives the wanted gradient; losses are scaled nowhere else.

        The weight is the micro-batch's share in the update. A back end that averages gradients over ranks divides by
        their number, so the loss is multiplied by it here. apply_gradients() takes out the factor of a gradient scaler.
        """
        factors = [hook.loss_factor(optimizer) for hook in self.trained.hooks_of(optimizer)]
        return loss * (weight * self.averaging_ranks * math.prod(factors))

    def optimizer_step(
        self, optimizer: Optimizer, model: nn.Module, scheduler: Any, name: str = "model", **kwargs: Any
    ) -> OptimizerStep:
        """Clips the gradients and updates the model, unless the norm or a loss is not finite; all ranks decide alike.

        is_boundary=True updates now, False never; by default, the calls of backward() are counted.
        """
        trained, hooks = TrainedModel(model, optimizer, scheduler), self.trained.hooks_of(optimizer)
        if hooks or kwargs != {"is_boundary": True} or trained not in self.trained.entries:
            return hooked_step(self, trained, hooks, **kwargs)
        return self.update(trained)

    def update(self, trained: TrainedModel, divisor: float = 1.0) -> OptimizerStep:
        """Divides and clips the gradients and, if they are finite, steps the optimizer and the schedule."""
        model, optimizer, scheduler = trained.model, trained.optimizer, trained.scheduler
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.trained.require_on_device(model, optimizer)
        grad_norm, is_finite = self.apply_gradients(optimizer, model, divisor)
        if scheduler is not None and self.options.optim.schedule_unit == "optimizer_step":
            self.trained.scheduled.add(optimizer)
            if is_finite:
                scheduler.step()
        return OptimizerStep(grad_norm=grad_norm, lr_list=rates, skipped=not is_finite)

    # ---- Weights -----------------------------------------------------------------------------------------------

    def weights_of(self, model: nn.Module) -> Weights:
        """Returns the parameters under their Hugging Face names, with adapters merged into them."""
        self.after_forward_only(model)
        self.trained.require_on_device(model)
        unwrapped = self.unwrap_model(model)
        named = sorted(unwrapped.named_parameters())
        return MergedWeights(unwrapped, self.layout) if has_adapters(unwrapped) else Weights(named, self.layout)

    def full_parameters(self, model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yields (Hugging Face name, whole tensor), sorted, tied ones once; every rank must iterate to the end."""
        return self.layout.gather_named(self.weights_of(model).tensors(), dtype)

    def weight_fingerprints(self, model: nn.Module, dtype: torch.dtype | None) -> KnownWeights:
        """Returns a fingerprint of each tensor of full_parameters(), computed from shards and not from the gather."""
        return self.layout.fingerprints(self.weights_of(model).shards(), dtype)

    def get_model_state_dict(
        self, cpu_offload: bool = False, full_state_dict: bool = True, model: nn.Module | None = None
    ) -> dict[str, Tensor]:
        """Returns the trained model's state under Hugging Face names.

        full_state_dict: whole tensors on every rank; if False, this rank's shards. cpu_offload: copies in host memory;
        if False, references to the live tensors wherever no gather was needed.
        """
        weights = self.weights_of(model if model is not None else self.trained.entry(None).model)
        if full_state_dict:
            state = ((name, self.layout.gather(tensor)) for name, tensor in weights.tensors())
        else:
            state = ((name, shard) for name, _, shard in weights.shards())
        return {name: tensor.to("cpu", copy=True) if cpu_offload else tensor for name, tensor in state}

    def save_pretrained(self, model: nn.Module, path: str | Path) -> None:
        """Writes a Hugging Face folder; with adapters, it holds the merged model, and adapter/ is a folder for peft."""
        if has_adapters(model):
            save_adapter(model, self.layout, Path(path) / "adapter")
        super().save_pretrained(model, path)  # last: its hash says that the folder is whole

    # ---- The average of the weights ----------------------------------------------------------------------------

    def keep_average(self, model: nn.Module, decay: float) -> None:
        """Averages the weights from now on, after each update and in checkpoints; a second call starts over."""
        optimizer = self.trained.entry(model).optimizer
        for hook in hooks_of(optimizer):
            if isinstance(hook, AverageOfModel) and hook.model is model:
                detach(optimizer, hook)
        attach(optimizer, AverageOfModel(model, self.layout, decay, before_writing=self.after_forward_only))

    @contextmanager
    def averaged_weights(self, model: nn.Module) -> Iterator[None]:
        """Gives the model the average of its weights inside the context; every rank must enter it."""
        trained = self.trained.entry(model)
        averages = [hook for hook in self.trained.hooks_of(trained.optimizer) if isinstance(hook, AverageOfModel)]
        if not averages:
            raise ValueError("No average of this model's weights is kept. Call keep_average(model, 0.99) first.")
        self.trained.require_on_device(model, trained.optimizer)  # the average moves with the optimizer's states
        with averages[-1].lent():
            yield

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
        """Writes a checkpoint of everything that the run needs to continue; see TrainingStateSaver.save."""
        request = SaveRequest(Path(save_dir), tag, max_num, max_mem << 20, client_state, save_latest, companions or {})
        self.saver.save(model, request)

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
        """Reads a checkpoint that any strategy wrote at any world size; see TrainingStateSaver.load."""
        wanted = Wanted(load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only)
        return self.saver.load(model, Path(load_dir), tag=tag, wanted=wanted, companions=companions)


class SingleStrategy(TorchStrategy):
    """Keeps the whole model on the device of one process: the plain reference that every other strategy must equal."""

    def setup_distributed(self, timeout: timedelta | None = None, num_gpu_per_node: int = 8) -> None:
        """Picks the device; refuses a world of several processes."""
        if known_world() > 1:
            raise _several_ranks(known_world())
        super().setup_distributed(timeout, num_gpu_per_node)

    def make_layout(self) -> PlainLayout:
        """Returns the layout of whole parameters."""
        return PlainLayout(self.comm)

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Moves the model to the device."""
        model = model.to(self.device)
        self.set_up_computation(model)
        return model


def _cuts_matrices(strategy: TorchStrategy) -> ValueError:
    return ValueError(
        f"--optim.name muon needs whole matrices, which {type(strategy).__name__} does not keep on a rank. Use "
        "--strategy ddp or single, or --optim.name adamw."
    )


def _several_ranks(count: int) -> ValueError:
    return ValueError(
        f"--strategy single runs in one process, but torchrun started {count}. Use --strategy fsdp, or "
        "start one process."
    )


def _divide_gradients(parameters: list[Tensor], divisor: float) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(1 / divisor)
