"""The native engine on the trainer's own weights (--native.share_weights), which a sync need not copy.

Projections that share an input lie side by side in one storage, of which the trainer's parameters become views, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from lightrl.engines.base import Completion, NamedTensors
from lightrl.engines.native.engine import NativeEngine
from lightrl.engines.native.forward import FusedForward, ModelRunner
from lightrl.engines.native.products import PackedLinear
from lightrl.engines.weights.account import WeightAccount, is_same_memory, raise_problems


class LentLinear(PackedLinear):
    """Linear layers of one input as one product, with a weight [out, in], the layout that trainer modules read."""

    def _laid_out(self, weight: Tensor) -> Tensor:
        return weight


class LentForward(FusedForward):
    """The fused forward in the trainer's layout of weights."""

    make_linear = LentLinear


class LentRunner(ModelRunner):
    """Runs the fused forward, or the model's modules, on the trainer's weights."""

    replays_steps = False  # a graph would read the old memory after the trainer has moved its weights
    make_fused = LentForward


class LentEngine(NativeEngine):
    """Engine that reads the trainer's memory, and generates only with the weights of the last sync."""

    sleep_levels: tuple[int, ...] = (1,)  # it must not drop weights that are not its own
    make_runner = LentRunner
    lenders: Collection[Tensor] = ()  # the trainer's parameters
    _num_changes = 0

    def step(self) -> list[Completion]:
        """Runs one scheduling step; raises RuntimeError if the weights have changed since the last sync."""
        if self._count_changes() != self._num_changes:
            raise RuntimeError(
                f"The weights changed since the weight sync to version {self._version}, and the engine reads the same "
                "memory (--native.share_weights). Call update_engine_weights(actor) before generating."
            )
        return super().step()

    def placeable_parameters(self) -> Mapping[str, Tensor]:
        """Returns none: they are the trainer's."""
        return {}

    def load_weights(self, weights: NamedTensors, version: int) -> None:
        """Checks that it reads these tensors already; WeightSyncError names each one that lies elsewhere."""
        self._require_open("load_weights")
        account = WeightAccount(*self._expected)
        for name, tensor in weights:
            if account.accept(name, tensor) and not is_same_memory(tensor, self._parameters[name]):
                account.add_problem(f"{name} is not in the memory that the engine reads")
        self._runner.refresh()
        raise_problems(account.problems(), f"Weight sync to version {version}")
        self._version, self._num_changes = version, self._count_changes()

    def close(self) -> None:
        """Drops the requests, the cache and the model; the weights stay where they are."""
        super().close()
        self.lenders = ()

    def _count_changes(self) -> int:
        return sum(parameter._version for parameter in self.lenders)  # torch counts in-place writes


def engine_on(source: nn.Module, model: PreTrainedModel, **settings: Any) -> LentEngine:
    """Makes an engine whose model and source become views of the same memory."""
    lent = dict(source.named_parameters(remove_duplicate=False))
    held = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in held.items():
        _check_lent(name, lent.get(name), parameter)
        parameter.data = lent[name].data
    engine = LentEngine(model, **settings)
    for name, parameter in held.items():
        lent[name].data = parameter.data
    engine.lenders = [lent[name] for name in held]
    return engine


def _check_lent(name: str, lent: Tensor | None, held: Tensor) -> None:
    is_whole = lent is not None and type(lent.data) is Tensor and lent.shape == held.shape  # not a shard
    if lent is None or not is_whole or (lent.dtype, lent.device) != (held.dtype, held.device):
        given = "missing" if lent is None else f"{list(lent.shape)} {lent.dtype} on {lent.device}"
        raise ValueError(
            f"--native.share_weights True needs every weight whole, in the engine's type and on its device: {name} is "
            f"{given} in the trainer, {list(held.shape)} {held.dtype} on {held.device} in the engine. Use --strategy "
            "single or ddp with --dtype float32, or leave the option out."
        )
