"""PlainLayout: every rank holds every parameter whole. It is also the interface of the other layouts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from lightrl.comm import Comm
from lightrl.engines.base import NamedTensors
from lightrl.engines.weights.account import is_same_memory, require_same_names
from lightrl.engines.weights.fingerprint import Fingerprint, KnownWeight, KnownWeights, Span, Sums
from lightrl.models.router_biases import as_sent


class NamedShard(NamedTuple):
    """A parameter under its Hugging Face name, with this rank's values, which may be a changed copy."""

    name: str
    parameter: nn.Parameter
    shard: Tensor


class Piece(NamedTuple):
    """The part of a tensor that a rank can write: some rows, or the whole if every rank has it."""

    name: str
    tensor: Tensor
    rows: tuple[int, int] | None = None  # [first, last) of dim 0; None: the whole tensor
    num_rows: int = 0  # of the whole tensor, if rows are given


class Rows(NamedTuple):
    """A tensor's rows [start, stop) of dim 0 that this rank holds; the last ranks may hold none."""

    start: int
    stop: int
    is_first_replica: bool  # true on exactly one of the ranks that hold the same rows


class Share(NamedTuple):
    """A rank's part of a parameter whose fingerprint the ranks add up."""

    name: str
    numel: int  # of the whole parameter
    is_first: bool  # true on one of the ranks that hold the same values


class SavedTensors(Protocol):
    """Whole tensors on disk, which can be read in parts. An optimizer state is named parameter name / state key."""

    @property
    def names(self) -> set[str]: ...

    def shape_of(self, name: str) -> torch.Size: ...

    def dtype_of(self, name: str) -> torch.dtype: ...

    def keys_of(self, parameter_name: str) -> list[str]: ...

    def rows(self, name: str, start: int, stop: int) -> Tensor: ...

    def __getitem__(self, name: str) -> Tensor: ...


class PlainLayout:
    """Reads and writes parameters that are whole on every rank.

    A subclass overrides the methods that its way of sharding affects. Methods that gather are collectives: every rank
    must call them for the same tensors in the same order.
    """

    _has_compared_names = False  # of the fingerprints, over the ranks

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    # ---- One tensor --------------------------------------------------------------------------------------------

    def whole_shape(self, parameter: Tensor) -> torch.Size:
        """Returns the shape of the whole parameter."""
        return parameter.shape

    def is_whole(self, tensor: Tensor) -> bool:
        """Returns whether this rank holds the whole tensor."""
        return True

    def detached(self, parameter: Tensor) -> Tensor:
        """Returns the parameter detached, in the form that gather and write_whole take."""
        return parameter.detach()

    def shard(self, parameter: Tensor) -> Tensor:
        """Returns this rank's values of the parameter, by reference."""
        return parameter.detach()

    def shard_of_whole(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """Returns the shard() of the parameter as if it had the values of `whole`; no collective."""
        return whole

    def rows(self, tensor: Tensor) -> Rows | None:
        """Returns this rank's rows of a tensor that is sharded by rows, or None for every other tensor."""
        return None

    def pieces(self, named: NamedTensors) -> Iterator[Piece]:
        """Yields the piece of each tensor that this rank can write: its rows, or the whole, gathered if necessary."""
        for name, tensor in named:
            yield Piece(name, tensor)

    def span(self, parameter: Tensor) -> Span:
        """Returns the places of this rank's values in the flattened whole parameter."""
        return Span()

    def is_first_holder(self, parameter: Tensor) -> bool:
        """Returns true on exactly one of the ranks that hold the same values of the parameter."""
        return self.comm.rank == 0

    @torch.no_grad()
    def add(self, parameter: Tensor, delta: Tensor) -> Tensor:
        """Returns a copy of the parameter plus a whole tensor, in the form that gather takes."""
        return parameter.detach() + delta.to(parameter.device)

    # ---- Whole tensors -----------------------------------------------------------------------------------------

    def gather(self, tensor: Tensor) -> Tensor:
        """Returns the whole tensor on every rank."""
        ((_, whole),) = self.gather_named([("", tensor)])
        return whole

    def gather_named(self, named: NamedTensors, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, whole tensor) in the order given; every rank must iterate to the end."""
        for name, tensor in named:
            yield name, tensor if dtype in (None, tensor.dtype) else as_sent(name, tensor, dtype)

    @torch.no_grad()
    def write_whole(self, target: Tensor, whole: Tensor) -> None:
        """Writes this rank's part of a whole tensor that every rank holds; no collective."""
        self.shard(target).copy_(self.shard_of_whole(target, whole))

    @torch.no_grad()
    def write_shard(self, parameter: Tensor, shard: Tensor) -> None:
        """Writes a result of shard() back; every rank must call it."""
        self.shard(parameter).copy_(shard)

    @torch.no_grad()
    def read_into(self, target: Tensor, saved: SavedTensors, name: str) -> None:
        """Reads this rank's part of a saved tensor; if that is rows, reads only these from the file."""
        rows = self.rows(target)
        if rows is None:
            self.write_whole(target, saved[name])
        else:
            self.shard(target).copy_(saved.rows(name, rows.start, rows.stop))

    def finish_writing(self, model: nn.Module) -> None:
        """Updates a back end's copies of a model's parameters; called when all of them were written."""

    def fingerprints(self, shards: Iterable[NamedShard], dtype: torch.dtype | None) -> KnownWeights:
        """Returns the fingerprint of every whole tensor in dtype, summed over the ranks' shards without a gather.

        A tensor that this process sends by reference stands for itself and is not read.
        """
        known: dict[str, KnownWeight] = {}
        shares: list[Share] = []
        sums: Sums | None = None
        for name, parameter, shard in shards:
            values = shard if dtype in (None, shard.dtype) else as_sent(name, shard, dtype)
            if self.is_whole(parameter) and is_same_memory(values, self.shard(parameter)):
                known[name] = values
                continue
            sums = sums or Sums()
            sums.add(values, self.span(parameter))
            shares.append(Share(name, self.whole_shape(parameter).numel(), self.is_first_holder(parameter)))
        return known if sums is None else known | self.summed(shares, sums.totals())

    def summed(self, shares: Sequence[Share], own: Tensor) -> dict[str, Fingerprint]:
        """Adds up the shares of the first holders."""
        if not self._has_compared_names:  # gloo aborts on sums of different lengths
            require_same_names(self.comm, [share.name for share in shares])
            self._has_compared_names = True
        totals = self.comm.all_reduce(own * torch.tensor([share.is_first for share in shares]), "sum")
        return {
            share.name: Fingerprint(total, share.numel) for share, total in zip(shares, totals.tolist(), strict=True)
        }

    # ---- Optimizer states --------------------------------------------------------------------------------------

    def optimizer_states(self, model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
        """Yields (parameter name / state key, tensor) in one order on all ranks; every rank must iterate to the end."""
        for name, parameter in sorted(model.named_parameters()):
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                if not torch.is_tensor(value):
                    raise ValueError(f"The optimizer's state {key!r} of {name} is no tensor, so it cannot be saved.")
                yield f"{name}/{key}", value

    def load_optimizer_states(self, model: nn.Module, optimizer: Optimizer, saved: SavedTensors) -> None:
        """Reads saved optimizer_states() into an optimizer whose state is empty."""
        for name, parameter in sorted(model.named_parameters()):
            for key in saved.keys_of(name):
                full_name = f"{name}/{key}"
                if saved.shape_of(full_name) == parameter.shape:
                    state = torch.zeros_like(parameter, dtype=saved.dtype_of(full_name))
                    self.read_into(state, saved, full_name)
                else:  # a step counter, which a fused kernel reads on the parameter's device
                    state = saved[full_name].to(self.shard(parameter).device)
                optimizer.state[parameter][key] = state

    # ---- The memory behind a model -----------------------------------------------------------------------------

    def parameter_tensors(self, model: nn.Module) -> list[Tensor]:
        """Returns this rank's tensors of weights and buffers."""
        return [self.shard(tensor) for tensor in (*model.parameters(), *model.buffers())]

    def main_copies(self, model: nn.Module) -> list[Tensor]:
        """Returns the float32 copies that an optimizer steps in place of the weights that compute, if any."""
        return []

    def gradient_tensors(self, model: nn.Module) -> list[Tensor]:
        """Returns this rank's tensors of gradients."""
        return [self.shard(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]

    def optimizer_tensors(self, model: nn.Module | None, optimizer: Optimizer) -> list[Tensor]:
        """Returns this rank's optimizer states, without the step counters, which AdamW reads on the host."""
        states = [
            optimizer.state[parameter]
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter in optimizer.state
        ]
        values = [value for state in states for value in state.values()]
        return [self.shard(value) for value in values if torch.is_tensor(value) and value.dim()]

    def drop_gradients(self, model: nn.Module) -> None:
        """Drops the gradients of a model."""
        for parameter in model.parameters():
            parameter.grad = None


def pieces_of_shards(layout: PlainLayout, named: NamedTensors) -> Iterator[Piece]:
    """Yields the pieces() of a layout that shards, those that must be gathered last."""
    scattered = []
    for name, tensor in named:
        rows = layout.rows(tensor)
        if rows is not None:
            stop = rows.stop if rows.is_first_replica else rows.start
            yield Piece(name, layout.shard(tensor), (rows.start, stop), tensor.shape[0])
        elif layout.is_whole(tensor):
            yield Piece(name, tensor)
        else:
            scattered.append((name, tensor))
    for name, whole in layout.gather_named(scattered):
        yield Piece(name, whole)


@dataclass(eq=False)
class Weights:
    """The parameters of a model, unchanged, sorted by name, tied ones once."""

    named: Sequence[tuple[str, nn.Parameter]]
    layout: PlainLayout

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, tensor to be gathered); every rank must iterate to the end."""
        for name, parameter in self.named:
            yield name, self.layout.detached(parameter)

    def shards(self) -> Iterator[NamedShard]:
        """Yields this rank's values of every parameter; every rank must iterate to the end."""
        for name, parameter in self.named:
            yield NamedShard(name, parameter, self.layout.shard(parameter))


def has_adapters(model: nn.Module) -> bool:
    """Returns whether the model has LoRA adapters, which layout/adapters.py merges."""
    return any(".lora_A." in name for name, _ in model.named_parameters())


def innermost(model: Any) -> nn.Module:
    """Returns the model inside all wrappers: lightrl's, DDP, torch.compile, PEFT, another trainer's actor.

    An actor keeps its network in `.model`, but so do transformers' own models, which are not wrappers.
    """
    if isinstance(model, PreTrainedModel):
        return model
    for attribute in ("hf", "module", "_orig_mod"):
        if isinstance(inner := getattr(model, attribute, None), nn.Module):
            return innermost(inner)
    return _inside_peft_or_actor(model)


def _inside_peft_or_actor(model: Any) -> nn.Module:
    get_base_model = getattr(model, "get_base_model", None)  # PEFT
    if callable(get_base_model):
        return innermost(get_base_model())
    inner = getattr(model, "model", None)
    network = innermost(inner) if isinstance(inner, nn.Module) else None
    result: nn.Module = network if isinstance(network, PreTrainedModel) else model
    return result
