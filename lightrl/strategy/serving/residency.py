"""Residency: which parts of a strategy's models are on the device and which wait in host memory.

Storages move in place, so that parameters, optimizers and views stay valid.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightrl.strategy.layout.plain import PlainLayout
from lightrl.strategy.optim.optimizers import MAIN_COPIES, TrainedModels, refuse_offloaded


class OffloadedStrategy(Protocol):
    """The members of a strategy that residency needs to move its models."""

    @property
    def device(self) -> torch.device: ...

    @property
    def trained(self) -> TrainedModels: ...

    @property
    def layout(self) -> PlainLayout: ...

    def after_forward_only(self, model: nn.Module) -> None: ...


class ModelResidency:
    """One model's parameters, gradients, optimizer states and average, each on the device or in host memory."""

    def __init__(self, model: nn.Module | None, optimizer: Optimizer | None, strategy: OffloadedStrategy) -> None:
        """Creates the residency of a model, of a model with its optimizer, or only of an optimizer's states."""
        self.model = model
        self.optimizer = optimizer
        self._strategy = strategy
        self._offloaded = strategy.trained.offloaded  # the model while its weights are away; likewise the optimizer
        self._moved: dict[str, StorageOffloader] = {}
        self._guard: RemovableHandle | None = None

    def offload_parameters(self) -> int:
        """Moves weights and buffers to host memory; returns the bytes freed, or 0 if they are there already."""
        if self.model is None:
            return 0
        self._strategy.after_forward_only(self.model)
        freed = self._offload("parameters", self._strategy.layout.parameter_tensors(self.model))
        if freed:
            self._offloaded.add(self.model)
            self._guard = self.model.register_forward_pre_hook(lambda module, _: refuse_offloaded(module), prepend=True)
        return freed

    def load_parameters(self) -> int:
        """Brings weights and buffers back to the device; returns the bytes loaded."""
        loaded = self._restore("parameters")  # first: if there is no memory for them, they stay refused
        if self._guard is not None:
            self._guard.remove()
            self._guard = None
        self._offloaded.discard(self.model)
        return loaded

    def offload_main_copies(self) -> int:
        """Moves the float32 copies of weights that compute in bfloat16 to host memory; returns the bytes freed."""
        if self.model is None or self.model in self._offloaded:  # they have left with the weights
            return 0
        freed = self._offload(MAIN_COPIES, self._strategy.layout.main_copies(self.model))
        if freed:
            self._offloaded.add((MAIN_COPIES, self.optimizer))
        return freed

    def load_main_copies(self) -> int:
        """Brings the float32 copies back to the device; returns the bytes loaded."""
        loaded = self._restore(MAIN_COPIES)
        self._offloaded.discard((MAIN_COPIES, self.optimizer))
        return loaded

    def offload_gradients(self) -> int:
        """Moves the gradients to host memory; returns the bytes freed."""
        return (
            0 if self.model is None else self._offload("gradients", self._strategy.layout.gradient_tensors(self.model))
        )

    def load_gradients(self, *, keep: bool) -> int:
        """Brings offloaded gradients back and returns the bytes; keep=False drops them and returns 0."""
        if self.model is None or "gradients" not in self._moved:
            return 0
        num_bytes = self._restore("gradients")
        if keep:
            return num_bytes
        self._strategy.layout.drop_gradients(self.model)
        return 0

    def offload_optimizer(self) -> int:
        """Moves the optimizer's states and the average of the weights to host memory; returns the bytes freed."""
        if self.optimizer is None:
            return 0
        states = self._strategy.layout.optimizer_tensors(self.model, self.optimizer)
        kept_by_hooks = [
            tensor for hook in self._strategy.trained.hooks_of(self.optimizer) for tensor in hook.tensors()
        ]
        freed = self._offload("optimizer states", [*states, *kept_by_hooks])
        if freed:
            self._offloaded.add(self.optimizer)
        return freed

    def load_optimizer(self) -> int:
        """Brings the optimizer's states and the average back to the device; returns the bytes loaded."""
        loaded = self._restore("optimizer states")
        self._offloaded.discard(self.optimizer)
        return loaded

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Brings everything to the device inside the context; afterwards, what was in host memory leaves again."""
        away = {part for part, offloader in self._moved.items() if offloader.is_offloaded}
        try:
            self.load_main_copies()
            self.load_parameters()
            self.load_gradients(keep=True)
            self.load_optimizer()
            yield
        finally:
            leave = {
                MAIN_COPIES: self.offload_main_copies,  # first, since weights take their copies along
                "parameters": self.offload_parameters,
                "gradients": self.offload_gradients,
                "optimizer states": self.offload_optimizer,
            }
            for part in [part for part in leave if part in away]:
                leave[part]()

    def _offload(self, part: str, tensors: list[Tensor]) -> int:
        """Offloads storages, except those that an option of the back end keeps in host memory anyway."""
        offloader = self._moved.setdefault(part, StorageOffloader())
        device = self._strategy.device
        return offloader.offload(tensor for tensor in tensors if tensor.device.type == device.type)

    def _restore(self, part: str) -> int:
        loaded = self._moved[part].restore() if part in self._moved else 0
        self._moved.pop(part, None)
        return loaded


class Residency:
    """The residencies of all models of a strategy, and the calls that concern several of them."""

    def __init__(self, strategy: OffloadedStrategy) -> None:
        self._strategy = strategy
        self._entries: list[ModelResidency] = []
        self.offloaded_bytes = 0  # on this rank, when the trainer last left the device to the engine

    def add(self, model: nn.Module | None, optimizer: Optimizer | None = None) -> ModelResidency:
        """Returns the residency of a model, created at the first call; a model with an optimizer counts as trained."""
        for entry in self._entries:
            if (model is not None and entry.model is model) or (optimizer is not None and entry.optimizer is optimizer):
                entry.model = entry.model if model is None else model
                entry.optimizer = entry.optimizer if optimizer is None else optimizer
                return entry
        self._entries.append(ModelResidency(model, optimizer, self._strategy))
        return self._entries[-1]

    def of_optimizer(self, optimizer: Optimizer) -> ModelResidency:
        """Returns the residency of the model that this optimizer steps."""
        self._models()
        return self.add(None, optimizer)

    def _models(self) -> list[ModelResidency]:
        """Returns the residencies of all models, including those prepared since the last call."""
        for model, optimizer in self._strategy.trained.placed.items():
            self.add(model, optimizer)
        return self._entries

    @property
    def trained(self) -> list[ModelResidency]:
        """The residencies of the models that have an optimizer."""
        return [entry for entry in self._models() if entry.optimizer is not None]

    def offload_optimizers(self) -> int:
        """Offloads the optimizer states of every trained model; returns the bytes freed on this rank."""
        return sum(entry.offload_optimizer() for entry in self.trained)

    def load_optimizers(self) -> int:
        """Loads the optimizer states of every trained model; returns the bytes loaded on this rank."""
        return sum(entry.load_optimizer() for entry in self.trained)

    def offload_parameters(self, *, with_gradients: bool) -> int:
        """Offloads the weights, and perhaps the gradients, of every trained model; returns the bytes freed."""
        freed = sum(entry.offload_parameters() for entry in self.trained)
        return freed + sum(entry.offload_gradients() for entry in self.trained if with_gradients)

    def load_parameters(self, *, keep_gradients: bool) -> int:
        """Loads the weights of every trained model, and perhaps its gradients; returns the bytes loaded."""
        loaded = sum(entry.load_parameters() for entry in self.trained)
        return loaded + sum(entry.load_gradients(keep=keep_gradients) for entry in self.trained)

    def leave_device(self) -> None:
        """Moves everything to host memory, including models that do not train."""
        freed = self.offload_optimizers() + self.offload_parameters(with_gradients=True)
        freed += sum(entry.offload_parameters() for entry in self._models() if entry.optimizer is None)
        if freed:  # 0 if everything had left before
            self.offloaded_bytes = freed

    def return_to_device(self) -> None:
        """Brings everything back to the device."""
        for entry in self._models():
            if entry.optimizer is None:
                entry.load_parameters()
        self.load_parameters(keep_gradients=True)
        self.load_optimizers()


class StorageOffloader:
    """Frees the device memory behind tensors and restores it bit for bit; repeated calls change nothing.

    A call that finds no memory moves nothing, so it can be repeated when there is some.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}

    @property
    def is_offloaded(self) -> bool:
        """Whether any storage is in host memory now."""
        return bool(self._kept)

    @torch.no_grad()
    def offload(self, tensors: Iterable[Tensor]) -> int:
        """Copies the storages to host memory and empties them; returns the bytes freed."""
        if self._kept:
            return 0
        kept: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0 or storage.data_ptr() in kept:  # tied weights and views share a storage
                continue
            if not storage.resizable():  # a mapped file, as of a model loaded into host memory, is not ours to free
                continue
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=tensor.is_cuda)
            host.copy_(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
            kept[storage.data_ptr()] = (storage, host)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._kept = kept  # only now, or the copies of a call that failed would later overwrite newer values
        freed = sum(host.numel() for _, host in self._kept.values())
        for storage, _ in self._kept.values():
            storage.resize_(0)
        return freed

    @torch.no_grad()
    def restore(self) -> int:
        """Fills the storages again; returns the bytes brought back."""
        try:
            for storage, host in self._kept.values():
                storage.resize_(host.numel())
                torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(host)
        except BaseException:
            for storage, _ in self._kept.values():
                storage.resize_(0)
            raise
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        restored = sum(host.numel() for _, host in self._kept.values())
        self._kept = {}
        return restored
