"""The mixins that `--exact` adds to a strategy: gradients, norm and loss become sums that no split changes.

A micro-batch is a tile (tiles.py). The gradient of its share of the loss is added to a GradientSum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightrl.config import RunConfig
from lightrl.exact.policy import ExactServing
from lightrl.exact.step_statistics import ExactStatistics
from lightrl.exact.sums import GradientSum, from_units, sum_of_squares, to_units
from lightrl.strategy.base import StrategyBase, TrainBatchResult, create_strategy, strategy_class
from lightrl.strategy.fsdp import FSDPStrategy
from lightrl.strategy.layout.buckets import buckets
from lightrl.strategy.torch_native import TorchStrategy

_BUCKET_BYTES = 64 << 20
_EPSILON = 1e-6  # added to the norm, as in torch's clip


def exact_strategy(config: RunConfig) -> StrategyBase:
    """Creates the strategy that the config names with exact sums; setup_distributed() still has to be called."""
    kind = strategy_class(config.strategy)
    front = ExactShards if issubclass(kind, FSDPStrategy) else ExactGradients
    made: type[StrategyBase] = type(f"Exact{kind.__name__}", (ExactServing, front, kind), {})
    strategy = create_strategy(config, made)
    strategy.statistics = ExactStatistics()
    return strategy


class ExactGradients(TorchStrategy):
    """Mixin that makes the sums of a strategy exact if it keeps parameters whole."""

    _loss = 0  # of the current update, in units of exact sums

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sums: dict[Tensor, GradientSum] = {}  # by parameter

    @property
    def averaging_ranks(self) -> int:
        """Always 1, since dividing by, say, 3 ranks and multiplying again would round."""
        return 1

    # ---- The loss ----------------------------------------------------------------------------------------------

    def train_batch(self, *args: Any, **kwargs: Any) -> TrainBatchResult:
        """Takes one optimizer step over tiles; the reported loss is their exact sum."""
        self._loss = 0
        result = super().train_batch(*args, **kwargs)
        for total in self._sums.values():
            total.is_empty = True  # even if the update was dropped
        loss = sum(self.comm.all_gather_object(self._loss))
        return result if result.skipped else replace(result, loss=from_units(loss))

    def backward(self, loss: Tensor, model: nn.Module, optimizer: Optimizer, **kwargs: Any) -> None:
        """Adds the gradient of a tile and its share of the loss."""
        share = float(loss.detach()) * kwargs.get("weight", 1.0)
        self._loss += to_units(share) if math.isfinite(share) else 0
        super().backward(loss, model, optimizer, **kwargs)

    # ---- The gradient ------------------------------------------------------------------------------------------

    def create_optimizer(self, model: nn.Module, **kwargs: Any) -> Optimizer:
        """Builds the optimizer unfused, since a fused one rounds the last elements of a shard differently."""
        return super().create_optimizer(model, **{"fused": False, "foreach": True, **kwargs})

    def run_backward(self, loss: Tensor, model: nn.Module) -> None:
        """Runs the backward of a tile and moves its gradients into the sums."""
        super().run_backward(loss, model)
        for parameter in model.parameters():
            if parameter.grad is not None:
                gradient = _local(parameter.grad)
                self._sum_of(parameter, gradient.numel()).add(gradient.reshape(-1))
                parameter.grad = None

    def _sum_of(self, parameter: Tensor, num_elements: int) -> GradientSum:
        if parameter not in self._sums:
            self._sums[parameter] = GradientSum(num_elements)
        return self._sums[parameter]

    def _has_gradient(self, parameter: Tensor) -> bool:
        return parameter in self._sums and not self._sums[parameter].is_empty

    @torch.no_grad()
    def reduce_gradients(self, model: nn.Module, parameters: list[Tensor]) -> None:
        """Adds the sums of all ranks; a parameter that no rank's tiles used gets no gradient."""
        is_used = torch.tensor([self._has_gradient(parameter) for parameter in parameters], dtype=torch.int64)
        is_used = self.comm.all_reduce(is_used, "max")
        used = [parameter for parameter, flag in zip(parameters, is_used.tolist(), strict=True) if flag]
        named = ((str(index), parameter) for index, parameter in enumerate(used))
        for bucket in buckets(named, lambda parameter: 4 * parameter.nbytes, _BUCKET_BYTES):
            sums = {name: self._sum_of(parameter, parameter.numel()) for name, parameter in bucket}
            if self.comm.world > 1:
                for total in sums.values():
                    total.add_nothing()
                halves = {name: {"high": total.high, "low": total.low} for name, total in sums.items()}
                for name, half in self.comm.all_reduce(halves, "sum").items():
                    sums[name].high, sums[name].low = half["high"], half["low"]
            for name, parameter in bucket:
                parameter.grad = sums[name].total().view(parameter.shape)

    def apply_gradients(self, optimizer: Optimizer, model: nn.Module, divisor: float) -> tuple[float, bool]:
        """Clips by the exact norm, steps if the norm is finite, and drops the gradients."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.reduce_gradients(model, parameters)
        for hook in self.trained.hooks_of(optimizer):
            hook.before_clip(optimizer)
        gradients = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        if divisor != 1:
            torch._foreach_mul_(gradients, 1 / divisor)
        grad_norm = self._norm(gradients, sum(parameter.numel() for parameter in parameters))
        is_finite = math.isfinite(grad_norm)
        if is_finite:
            if self.max_norm and self.max_norm < grad_norm + _EPSILON:
                torch._foreach_mul_(gradients, self.max_norm / (grad_norm + _EPSILON))
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return grad_norm, is_finite

    def _norm(self, gradients: list[Tensor], num_elements: int) -> float:
        """Returns the norm over all ranks; ranks with whole gradients need no communication."""
        ends = [float(end) for gradient in gradients if gradient.numel() for end in torch.aminmax(gradient)]
        is_finite = all(math.isfinite(end) for end in ends)
        largest = self._over_shards(max(map(abs, ends), default=0.0) if is_finite else math.inf, "max")
        if not math.isfinite(largest):
            return math.nan
        high, low = sum_of_squares(gradients, largest, num_elements)
        return math.sqrt(self._over_shards(high, "sum") + self._over_shards(low, "sum"))

    def _over_shards(self, value: float, operation: str) -> float:
        """Reduces a number over the ranks that hold different parts of a gradient."""
        return value


# ---- FSDP ------------------------------------------------------------------------------------------------------------


class ExactReduceScatter:
    """Sends each rank its shard of all ranks' gradients, and adds these up there; one for each FSDP unit.

    It is a ReduceScatter of torch.distributed.fsdp for FSDPModule.set_custom_reduce_scatter().
    """

    def __init__(self) -> None:
        self.is_last = False  # whether the tile is the last of the update
        self._sum: GradientSum | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns memory for a flat gradient."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Adds this rank's shard of every rank's gradient; outputs 0, or the sum for the last tile.

        FSDP adds the outputs to the gradients of the parameters.
        """
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        self._sum = self._sum or GradientSum(output_tensor.numel())
        for gradient in received.view(-1, output_tensor.numel()):
            self._sum.add(gradient)
        if not self.is_last:
            output_tensor.zero_()
            return
        output_tensor.copy_(self._sum.total())


class ExactShards(ExactGradients):
    """Mixin that makes FSDP's sums exact; FSDP reduces the gradients of each tile."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reductions: dict[nn.Module, list[ExactReduceScatter]] = {}  # for the units of each model

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Shards the model and gives every unit its own reduction."""
        model = super().prepare_model(model)  # type: ignore[safe-super]
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._reductions[model] = [ExactReduceScatter() for _ in units]
        for unit, reduction in zip(units, self._reductions[model], strict=True):
            unit.set_custom_reduce_scatter(reduction)  # type: ignore[arg-type]
        return model

    def before_micro_batch(self, model: nn.Module, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        """Makes FSDP reduce the gradients of each tile, and tells the reductions which tile is the last."""
        for reduction in self._reductions[model]:
            reduction.is_last = is_last_micro_batch
        return nullcontext()

    def run_backward(self, loss: Tensor, model: nn.Module) -> None:
        """Runs the backward of a tile; in one process, also adds its gradients, since FSDP does not reduce then."""
        loss.backward()
        if self.comm.world > 1:
            return
        for parameter in model.parameters():
            if parameter.grad is not None:
                gradient = _local(parameter.grad)
                self._sum_of(parameter, gradient.numel()).add(gradient.reshape(-1))
                gradient.zero_()

    @torch.no_grad()
    def reduce_gradients(self, model: nn.Module, parameters: list[Tensor]) -> None:
        """Takes the sums in one process; on several ranks, the last backward has left them as gradients."""
        for parameter in parameters:
            if self._has_gradient(parameter):
                gradient = _local(parameter.grad)
                gradient.copy_(self._sums[parameter].total().view(gradient.shape))

    def _over_shards(self, value: float, operation: str) -> float:
        return self.comm.all_reduce(value, operation)


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local
