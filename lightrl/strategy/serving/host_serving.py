"""HostServing: the native engine on ranks of one host that hold its weights in one memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext

from torch import Tensor, nn

from lightrl.config import StrategyOptions
from lightrl.engines.base import InferenceEngine, NamedTensors
from lightrl.engines.colocated import SyncReport
from lightrl.engines.native.engine import NativeEngine
from lightrl.engines.weights.account import raise_problems
from lightrl.engines.weights.fingerprint import Fingerprint, KnownWeight, KnownWeights, Placed
from lightrl.engines.weights.host_memory import is_mapped, move_together
from lightrl.strategy.layout.host_layout import CommonMemory, HostLayout
from lightrl.strategy.serving.colocated_serving import ColocatedServing, ServedStrategy


class HostServing(ColocatedServing):
    """Serving by ranks that hold shards on CPUs: in a sync, each writes its own and proves that they are there.

    On several hosts, and for engines that cannot place their weights, it does what ColocatedServing does.
    """

    def __init__(self, strategy: ServedStrategy, options: StrategyOptions, layout: Callable[[], HostLayout]) -> None:
        super().__init__(strategy, options)
        self._layout = layout
        self._together: InferenceEngine | None = None  # an engine whose weights were moved into common memory
        self._apart: InferenceEngine | None = None  # an engine whose weights cannot lie there

    def sync_weights(self, model: nn.Module, *, is_new: bool = True) -> SyncReport:
        """Sends the model's weights to the engine, through memory that all ranks map if there can be such memory."""
        places = self._common_places()
        with self._layout().writing_to(places) if places else nullcontext():
            return super().sync_weights(model, is_new=is_new)

    def _common_places(self) -> Mapping[str, Tensor]:
        """Returns the engine's parameters, which lie in common memory then; a collective that waits for every rank."""
        engine, comm = self.require_engine().engine, self.group.comm
        if engine is self._apart or comm.world == 1 or self._options.engine_sleep_level == 2:
            return {}
        places = engine.placeable_parameters() if isinstance(engine, NativeEngine) else {}
        # Weights that an engine was built with may be mapped, too: from a file, and by each rank for itself.
        is_there = comm.agree(engine is self._together and all(map(is_mapped, places.values())))
        if not is_there and not (places and move_together(places, comm)):
            self._apart = engine
            return {}
        self._together = engine
        return places

    def _update_alike(self, weights: NamedTensors, version: int, *, expected: KnownWeights | None) -> SyncReport:
        """Updates the engine's weights, and proves that those in common memory are the trainer's."""
        memory = self._layout().memory
        if memory is None or expected is None:
            return super()._update_alike(weights, version, expected=expected)
        report = super()._update_alike(weights, version, expected=_Known(expected, memory))
        wrong = [name for name, found in memory.found.items() if found != expected[name]]  # the same on every rank
        raise_problems([f"{name} differs from the trainer's" for name in wrong], f"Weight sync to version {version}")
        return report

    def close(self) -> None:
        """Ends the engine, if there is one."""
        super().close()
        self._together = self._apart = None  # an engine may hold what its weights were in


class _Known(Mapping[str, KnownWeight]):
    """What is known of the weights: for those in common memory, which only the sync itself shows, also their places."""

    def __init__(self, expected: KnownWeights, memory: CommonMemory) -> None:
        self._expected, self._memory = expected, memory

    def __getitem__(self, name: str) -> KnownWeight:
        known = self._expected[name]
        if name in self._memory.written and isinstance(known, Fingerprint):
            return Placed(known, self._memory.places[name])
        return known

    def __iter__(self) -> Iterator[str]:
        return iter(self._expected)

    def __len__(self) -> int:
        return len(self._expected)
