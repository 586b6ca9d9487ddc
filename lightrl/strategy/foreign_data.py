"""Data in the forms that code for other trainers passes: NumPy values and lists to reduce, batches of all samples.

lightrl's own trainers use comm and their own samplers, and never run this code.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from lightrl.comm import Comm
from lightrl.data.sampler import ResumableSampler
from lightrl.metrics import memory_in_use
from lightrl.strategy.foreign_models import Native, require_world
from lightrl.trees import leaves_of, rebuilt

logger = logging.getLogger(__name__)


def reduced(comm: Comm, data: Any, op: str) -> Any:
    """Reduces tensors, numbers, NumPy values, and lists, tuples and dicts of them; the result has the same types."""
    plain = _plain(data)
    leaves = leaves_of(plain)
    tensors = {f"{index:09d}": leaf for index, leaf in enumerate(leaves) if torch.is_tensor(leaf)}
    found = iter(comm.all_reduce(tensors, op).values())  # refuses an unknown op even if there is no tensor
    numbers = iter(_reduced_numbers(comm, [leaf for leaf in leaves if not torch.is_tensor(leaf)], op))
    return _as_given(data, rebuilt(plain, (next(found if torch.is_tensor(leaf) else numbers) for leaf in leaves)))


def _reduced_numbers(comm: Comm, numbers: list[Any], op: str) -> list[Any]:
    """Reduces in one collective what may be an integer on one rank and a float on another, as 0 for a sum of none."""
    rows = comm.all_gather_object(numbers) if numbers else []
    for number in chain.from_iterable(rows):
        if not isinstance(number, int | float):
            raise TypeError(f"all_reduce takes tensors, numbers and dicts of them, not {type(number).__name__}.")
    return [getattr(np, op)(column).item() for column in zip(*rows, strict=True)]


def gathered(comm: Comm, data: Any) -> Any:
    """Concatenates the ranks' tensors, NumPy arrays, numbers, and dicts of them."""
    if isinstance(data, Mapping):
        parts = {key: gathered(comm, data[key]) for key in sorted(data)}  # ranks may insert keys in different orders
        return {key: parts[key] for key in data}
    whole = comm.all_gather(_plain(data))
    return whole.numpy() if isinstance(data, np.ndarray) else whole


def _plain(data: Any) -> Any:
    """Converts values to what Comm takes: tensors, numbers and dicts."""
    if isinstance(data, Mapping):
        return {key: _plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return {f"{index:09d}": _plain(value) for index, value in enumerate(data)}
    if isinstance(data, np.ndarray):
        return torch.from_numpy(data)
    return data.item() if isinstance(data, np.generic) else data


def _as_given(data: Any, result: Any) -> Any:
    if isinstance(data, Mapping):
        return {key: _as_given(value, result[key]) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return type(data)(_as_given(*pair) for pair in zip(data, result.values(), strict=True))
    if isinstance(data, np.ndarray):
        return result.numpy()
    if isinstance(data, np.generic):
        return data.dtype.type(result) if data.dtype.type(result) == result else np.asarray(result)[()]
    return result


# ---- Batches -----------------------------------------------------------------------------------------------------


def make_loader(
    strategy: Native,
    data: Any,
    batch_size: int,
    sampler: Any | None,
    shuffle: bool,
    consumed_samples: int,
    *,
    pin_memory: bool,
    drop_last: bool,
    collate_fn: Callable[..., Any] | None,
) -> DataLoader[Any]:
    """Returns a loader over the caller's sampler, or of this rank's samples in as many batches as on other ranks."""
    comm = strategy.comm
    require_world(comm, "setup_dataloader()")
    common: dict[str, Any] = {
        "batch_size": batch_size,
        "drop_last": drop_last,
        "collate_fn": collate_fn,
        "pin_memory": pin_memory and torch.cuda.is_available(),
    }
    if sampler is not None:
        return DataLoader(data, sampler=sampler, **common)
    own = ResumableSampler(
        len(data),
        rank=comm.rank,
        world=comm.world,
        shuffle=shuffle,
        seed=strategy.seed,
        drop_last=drop_last,
        consumed_samples=consumed_samples,
    )
    return rank_loader(data, own, **common)


def rank_loader(
    data: Any,
    sampler: ResumableSampler,
    *,
    batch_size: int,
    drop_last: bool,
    collate_fn: Callable[..., Any] | None,
    pin_memory: bool,
) -> DataLoader[Any]:
    """Returns a loader of one rank's samples, with as many batches as the loaders of the other ranks."""
    common: dict[str, Any] = {"collate_fn": collate_fn, "pin_memory": pin_memory}
    if drop_last or sampler.world == 1:
        return DataLoader(data, batch_size=batch_size, sampler=sampler, drop_last=drop_last, **common)
    loader: DataLoader[Any] = DataLoader(data, batch_sampler=EqualBatches(sampler, batch_size), **common)
    # Loops read these two and call loader.sampler.set_epoch(); DataLoader itself refuses to set them.
    object.__setattr__(loader, "sampler", sampler)
    object.__setattr__(loader, "batch_size", batch_size)
    return loader


class EqualBatches(Sampler[list[int]]):
    """Cuts the samples of one rank into as many batches as the rank with most samples has.

    Otherwise, ranks that train or reduce in each batch would wait forever. A rank with one batch less halves its last
    one. If that holds at most one sample, a sample is given a second time, with a warning.
    """

    def __init__(self, sampler: ResumableSampler, batch_size: int) -> None:
        self.sampler = sampler
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[list[int]]:
        own, size = list(self.sampler), self.batch_size
        batches = [own[start : start + size] for start in range(0, len(own), size)]
        if len(batches) < len(self):
            *batches, last = batches or [[]]
            batches += self._two_of(last)[-(len(self) - len(batches)) :]
        return iter(batches)

    def __len__(self) -> int:
        return -(-self.sampler.most_samples // self.batch_size)

    def _two_of(self, batch: list[int]) -> list[list[int]]:
        middle = -(-len(batch) // 2)
        if len(batch) > 1:
            return [batch[:middle], batch[middle:]]
        repeated = batch or [self.sampler.first_sample]
        logger.warning("Sample %d is given twice, so that all ranks have as many batches.", repeated[0])
        return [batch, repeated]


# ---- Memory ------------------------------------------------------------------------------------------------------


def report_memory(prefix: str, say: Callable[..., None]) -> dict[str, float]:
    """Returns the GB that this rank uses, and reports them after the prefix."""
    used = memory_in_use()
    say(f"{prefix}:", ", ".join(f"{name} {value:.2f}" for name, value in used.items()))
    return used


def iterators_of(batches: Iterator[Any], count: int, *, counts_tokens: bool) -> list[Iterator[Any]]:
    """Returns `count` iterators over the same micro-batches; counts_tokens adds the tokens of the largest to each."""
    items = list(batches)
    if counts_tokens:
        longest = max((int(item["attention_mask"].sum()) for item in items), default=0)
        items = [{**item, "max_batch_seqlen": longest} for item in items]
    return [iter(items) for _ in range(count)]
