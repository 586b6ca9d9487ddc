"""The account of one weight sync: which parameters arrived, their problems, and whether the engine holds them.

Two accounts are kept. WeightProof watches the tensors on their way to the engine: each of the trainer's names must come
once, with the trainer's values. On several ranks, RankAgreement also checks that they are the same on all ranks. The
engine's own WeightAccount tells whether the engine holds what it was given. Engines differ in where a tensor ends up
(placement.py), but all report the same about it. The canary (strategy/serving/colocated_serving.py) checks the result
by its logprobs.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import compress, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightrl.comm import Comm
from lightrl.engines.base import NamedTensors, WeightSyncError
from lightrl.engines.weights.fingerprint import KnownWeight, KnownWeights, Placed, Sums, fingerprint_of

Shape = tuple[int, ...]
Window = tuple[tuple[int, int, int], ...]  # (dim, start, length) each

_NUM_SHOWN = 20  # number of problems that an error lists
_NUM_SAMPLED = 32  # values compared of a tensor, or of each part of it
_FEWEST_SAMPLED = 8  # values from a matrix's diagonal; one with fewer rows or columns is sampled all over
_STRIDE = 2_654_435_761  # a prime, so that every row and column of a matrix is sampled


class Place(NamedTuple):
    """A part of an engine's parameter, and the part of the given tensor that belongs there."""

    parameter: str
    held: Window = ()
    given: Window = ()


class _Sample(NamedTuple):
    name: str
    parameter: Tensor
    place: Place
    shape: Shape
    where: tuple[Tensor, ...]
    values: Tensor


class WeightAccount:
    """Records which of the expected parameters arrived, and every problem with them."""

    def __init__(self, shapes: Mapping[str, Shape | None], tied: Iterable[frozenset[str]] = ()) -> None:
        """Takes `shapes` of every parameter under each of its names (None accepts any), and groups of `tied` names."""
        self._shapes = shapes
        self._names_of = {name: group for group in tied for name in group}
        self._arrived: set[str] = set()
        self._problems: list[str] = []
        self._samples: list[_Sample] = []
        self._copies: list[tuple[str, Tensor, Tensor]] = []  # names, a few values given, parameters

    @classmethod
    def of_model(cls, model: nn.Module) -> WeightAccount:
        """Returns an account that expects every parameter of a model; a tied one may come under any of its names."""
        return cls(*named_shapes(model))

    @property
    def num_events(self) -> int:
        """A count that grows with every accepted tensor and every problem."""
        return len(self._arrived) + len(self._problems)

    def accept(self, name: str, tensor: Tensor) -> bool:
        """Returns whether the engine should load the tensor; if not, records a problem."""
        is_new = name in self._shapes and name not in self._arrived
        if not (is_good := is_new and self._shapes[name] in (None, tuple(tensor.shape))):
            self.add_problem(self._describe_problem(name, tensor))
        self._arrived.add(name)
        return is_good

    def _describe_problem(self, name: str, tensor: Tensor) -> str:
        if name not in self._shapes:
            return f"unknown {name}"
        if name in self._arrived:
            return f"{name} came twice"
        return f"misshapen {name}: got {tuple(tensor.shape)}, the model has {self._shapes[name]}"

    def add_problem(self, problem: str) -> None:
        """Records a problem that an engine's loader found."""
        self._problems.append(problem)

    def remember_values(self, name: str, tensor: Tensor, parameter: Tensor, place: Place | None = None) -> None:
        """Keeps a few values of a tensor that is being loaded, to compare them with the parameter afterwards."""
        place = place or Place(name)
        is_square = tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1]  # it may be kept transposed
        where = sampled_indices(tuple(tensor.shape), () if is_square else place.given, tensor.device)
        values = tensor.detach()[where].to(parameter.device, parameter.dtype)
        self._samples.append(_Sample(name, parameter, place, tuple(tensor.shape), where, values))

    def follow(self, parameters: Mapping[str, Tensor]) -> None:
        """Compares with these parameters, for loaders that make new ones under the same names."""
        self._samples = [
            item._replace(parameter=parameters.get(item.place.parameter, item.parameter)) for item in self._samples
        ]

    def remember_copy(self, name: str, tensor: Tensor, parameter: Tensor) -> None:
        """Remembers values in less time for a parameter of the same shape that keeps its memory."""
        if (values := few_values(tensor)) is None:
            self.remember_values(name, tensor, parameter)
        else:
            self._copies.append((name, values.to(parameter.device, parameter.dtype, copy=True), parameter))

    def _lost_copies(self) -> list[str]:
        held = [few_values(parameter) for _, _, parameter in self._copies]
        found = [values for values in held if values is not None]  # None: it was emptied meanwhile
        given = [values for _, values, _ in self._copies]
        if not given or (len(found) == len(given) and torch.equal(torch.cat(found), torch.cat(given))):
            return []
        return self._names_of_lost(held)

    def _names_of_lost(self, held: list[Tensor | None]) -> list[str]:
        pairs = zip(self._copies, held, strict=True)
        return [name for (name, given, _), values in pairs if values is None or not _are_equal(values, given)]

    def problems(self) -> list[str]:
        """Returns a line for each refused, missing or lost tensor."""
        missing = [name for name in self._shapes if self._arrived.isdisjoint(self._names_of.get(name, (name,)))]
        lost = {*self._lost_copies(), *(item.name for item in self._samples if not is_held(*item[1:]))}
        return [
            *self._problems,
            *(f"missing {name}" for name in missing and self._one_of_each(missing)),
            *(f"the engine does not hold {name} as it was given" for name in sorted(lost)),
        ]

    def _one_of_each(self, names: list[str]) -> list[str]:
        """Returns the first of each parameter's tied names."""
        first: dict[str | frozenset[str], str] = {}
        for name in names:
            first.setdefault(self._names_of.get(name, name), name)
        return list(first.values())


def raise_problems(problems: list[str], what: str) -> None:
    """Raises a WeightSyncError that lists the first problems, if there are any."""
    if problems:
        more = f"; and {len(problems) - _NUM_SHOWN} more" if len(problems) > _NUM_SHOWN else ""
        raise WeightSyncError(f"{what} failed: {'; '.join(problems[:_NUM_SHOWN])}{more}.")


def named_shapes(model: nn.Module) -> tuple[dict[str, Shape], list[frozenset[str]]]:
    """Returns the shape of every parameter under each of its names, and the groups of tied names."""
    named = dict(model.named_parameters(remove_duplicate=False))
    by_identity: dict[int, list[str]] = {}
    for name, parameter in named.items():
        by_identity.setdefault(id(parameter), []).append(name)
    shapes = {name: tuple(parameter.shape) for name, parameter in named.items()}
    return shapes, [frozenset(names) for names in by_identity.values() if len(names) > 1]


# ---- Values that are compared


def sampled_indices(shape: Shape, window: Window = (), device: torch.device | None = None) -> tuple[Tensor, ...]:
    """Returns indices of a few values of a tensor or a window of it, as one index tensor per dimension."""
    sizes, starts = list(shape), [0] * len(shape)
    for dim, start, length in window:
        sizes[dim], starts[dim] = length, start
    numel = torch.Size(sizes).numel()
    flat = torch.arange(min(_NUM_SAMPLED, numel), device=device) * _STRIDE % max(1, numel)
    return tuple(index + start for index, start in zip(torch.unravel_index(flat, sizes), starts, strict=True))


def few_values(tensor: Tensor) -> Tensor | None:
    """Returns a view of values from all over a vector, or of a large enough matrix: a few rows at other columns."""
    shape, strides = tensor.shape, tensor.stride()
    if not 0 < len(shape) < 3 or min(shape) < _FEWEST_SAMPLED:
        return None
    count = min(_NUM_SAMPLED, *shape)
    step = shape[0] // count * strides[0] + (shape[1] // count * strides[1] if len(shape) == 2 else 0)
    return tensor.detach().as_strided((count,), (step,))


def is_held(parameter: Tensor, place: Place, shape: Shape, where: tuple[Tensor, ...], values: Tensor) -> bool:
    """Returns whether a parameter has the values of a tensor, to the bit; values outside the place are not compared.

    shape: that of the whole tensor. where: the indices of the values in it.
    """
    held = parameter.detach()
    if held.shape == shape and not place.held and not place.given:
        has_values = _are_equal(held[tuple(index.to(held.device) for index in where)], values)
    else:
        has_values = _has_values(held, place, shape, where, values)
    return has_values or _is_held_transposed(held, place, shape, where, values)


def _is_held_transposed(held: Tensor, place: Place, shape: Shape, where: tuple[Tensor, ...], values: Tensor) -> bool:
    """Returns whether a layer keeps its matrix transposed (Conv1D), which a square shape cannot show."""
    if len(shape) != 2 or place.held or (shape[0] != shape[1] and tuple(held.shape) != shape[::-1]):
        return False
    return _has_values(held, place, shape[::-1], where[::-1], values)


def _has_values(held: Tensor, place: Place, shape: Shape, where: tuple[Tensor, ...], values: Tensor) -> bool:
    for dim, start, length in place.held:
        if dim >= held.dim() or start + length > held.shape[dim]:
            return False  # it was emptied or replaced meanwhile
        held = held.narrow(dim, start, length)
    indices, sizes = list(where), list(shape)
    is_inside = torch.ones_like(values, dtype=torch.bool)
    for dim, start, length in place.given:
        indices[dim], sizes[dim] = where[dim] - start, length
        is_inside &= (indices[dim] >= 0) & (indices[dim] < length)
    if held.numel() != torch.Size(sizes).numel():
        return False
    local = tuple(index[is_inside].to(held.device) for index in indices)
    return _are_equal(held.reshape(sizes)[local], values[is_inside])


def _are_equal(held: Tensor, values: Tensor) -> bool:
    return torch.allclose(held, values.to(held.device, held.dtype), rtol=0, atol=0, equal_nan=True)


# ---- The proof that the tensors are the trainer's


def is_same_memory(tensor: Tensor, known: KnownWeight) -> bool:
    """Returns whether a tensor is a view of the same elements in the same order as a known one."""
    known = known.memory if isinstance(known, Placed) else known
    if not isinstance(known, Tensor) or tensor.data_ptr() != known.data_ptr() or tensor.stride() != known.stride():
        return False
    return (tensor.shape, tensor.dtype, tensor.device) == (known.shape, known.dtype, known.device)


class WeightProof:
    """Watches pairs on their way to the engine and afterwards reports those that are not the trainer's.

    The trainer takes a fingerprint of each parameter from its shards; the tensors take a different path.
    """

    def __init__(self, expected: KnownWeights | None) -> None:
        """Takes the fingerprints or tensors of all the trainer's parameters; with None, only counts bytes."""
        self._expected = expected
        self._account = WeightAccount(dict.fromkeys(expected or ()))
        self._sums: Sums | None = None  # read at the end, so that a device does not wait for each
        self._summed: list[tuple[str, int]] = []  # names and numbers of elements
        self.num_bytes = 0

    def watched(self, weights: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        """Yields the pairs unchanged, taking a fingerprint of each that is not the trainer's own tensor."""
        accept, expected = self._account.accept, self._expected
        for name, tensor in weights:
            self.num_bytes += tensor.nbytes
            if expected is not None and accept(name, tensor) and not is_same_memory(tensor, expected[name]):
                self._add(name, tensor)
            yield name, tensor

    def _add(self, name: str, tensor: Tensor) -> None:
        known = (self._expected or {})[name]
        if isinstance(known, Placed) and known.has_beside(tensor):  # what is written to `name` may be read as another
            self._account.add_problem(f"{name} differs from the trainer's")
            return
        self._sums = self._sums or Sums()
        self._sums.add(tensor, is_lent=True)
        self._summed.append((name, tensor.numel()))

    def finish(self, version: int) -> None:
        """Raises WeightSyncError that names every parameter that was lost, added, repeated or changed on the way."""
        if self._sums and self._expected is not None:
            self._compare(self._sums, self._expected)
        raise_problems(self._account.problems(), f"Weight sync to version {version}")

    def _compare(self, sums: Sums, expected: KnownWeights) -> None:
        for (name, numel), total in zip(self._summed, sums.totals().tolist(), strict=True):
            if (total, numel) != fingerprint_of(expected[name]):
                self._account.add_problem(f"{name} differs from the trainer's")
        self._sums, self._summed = None, []


# ---- The proof that all ranks send the same


def require_same_names(comm: Comm, names: Iterable[str] | None) -> None:
    """Raises ValueError on every rank unless all have fingerprints of the same weights, or none; a collective."""
    own = None if names is None else list(names)
    if len(set(comm.all_gather_object(zlib.crc32(repr(own).encode())))) == 1:
        return
    first, *others = comm.all_gather_object(own)
    rank, other = next((rank, part) for rank, part in enumerate(others, start=1) if part != first)
    differing = [pair for pair in zip_longest(first or (), other or (), fillvalue="nothing") if pair[0] != pair[1]]
    where = f". The first difference is {differing[0][1]} in place of {differing[0][0]}" if first and other else ""
    raise ValueError(
        "weight_fingerprints() of the strategy must cover the same weights in the same order on every rank, or return "
        f"None on all. Rank 0 has {_number_of(first)}, and rank {rank} has {_number_of(other)}{where}."
    )


def _number_of(names: list[str] | None) -> str:
    return "none" if names is None else str(len(names))


class RankAgreement:
    """Reads the whole tensors that each rank sends by itself, and reports where ranks differ.

    A tensor is read when the engine is about to copy it, which then finds it in a cache.
    """

    def __init__(self, comm: Comm, expected: KnownWeights | None) -> None:
        """Takes the known values of the trainer's parameters, of the same kind and in the same order on every rank."""
        self._order = [name for name, known in (expected or {}).items() if isinstance(known, Tensor)]
        self._comm = comm
        self._sums = Sums()
        self._read: list[str] = []

    def watched(self, weights: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        """Yields the pairs unchanged."""
        own = set(self._order)
        for name, tensor in weights:
            if name in own:
                self._sums.add(tensor)
                self._read.append(name)
            yield name, tensor

    def problems(self) -> list[str]:
        """Returns a line for each tensor that differs, the same on every rank; a collective if any was expected."""
        if not self._order:
            return []
        found = dict(zip(self._read, self._sums.totals().tolist(), strict=True))
        totals = torch.tensor([found.get(name, 0) for name in self._order])
        largest, smallest = self._comm.all_reduce(torch.stack([totals, ~totals]), "max")  # ~x falls as x grows
        return [f"{name} differs between the ranks" for name in compress(self._order, (largest != ~smallest).tolist())]
