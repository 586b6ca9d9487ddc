"""Decides when and on which rank each sample is used. An order depends on seed, epoch and length alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from lightrl.seeding import mix_seed, prefix_state, prefix_states

Item = TypeVar("Item")

_SHUFFLE_STREAM = 0x5348554646  # separates these random draws from all others of the same seed


def permutation(length: int, seed: int, epoch: int) -> list[int]:
    """Returns the order of an epoch: the numbers 0 to length - 1, sorted by a hash of each."""
    order: list[int] = permutation_array(length, seed, epoch).tolist()
    return order


def permutation_array(length: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Returns permutation() as an array, which takes 8 bytes for each index."""
    epoch_state = np.uint64(prefix_state(mix_seed(_SHUFFLE_STREAM, seed, epoch)))
    return np.argsort(prefix_states(epoch_state, np.arange(length)), kind="stable")


def shard(items: Sequence[Item], rank: int, world: int) -> list[Item]:
    """Returns this rank's part of a global batch: index i belongs to rank i % world. Parts may be uneven or empty."""
    return list(items[rank::world])


class Draws:
    """Deals out prompts in the order of their tickets, 0, 1, ...; a subclass decides which prompt a ticket gets."""

    batch_size: int
    num_drawn = 0

    def next_batch(self) -> list[int]:
        """Returns the data indices of the step's global batch."""
        return self.draw(self.batch_size)

    def draw(self, count: int) -> list[int]:
        """Returns the data indices of the next `count` prompts."""
        drawn = [self.index_at(ticket) for ticket in range(self.num_drawn, self.num_drawn + count)]
        self.num_drawn += count
        return drawn

    def index_at(self, ticket: int) -> int:
        """Returns the data index of a ticket's prompt."""
        raise NotImplementedError


class PromptSampler(Draws):
    """Draws the global batch of each step, the same on every rank, epoch after epoch in a new order without repeats.

    Only a batch that spans two epochs can contain an index twice. The state is a single count, so a run continues
    exactly where it stopped, at any world size and with any batch size.
    """

    def __init__(self, num_prompts_in_data: int, batch_size: int, seed: int) -> None:
        if num_prompts_in_data < 1 or batch_size < 1:
            raise _nothing_to_draw(num_prompts_in_data, batch_size)
        self.num_prompts_in_data = num_prompts_in_data
        self.batch_size = batch_size
        self.seed = seed
        self._order: tuple[int, NDArray[np.int64]] | None = None  # (epoch, its permutation) used last

    def index_at(self, ticket: int) -> int:
        """Returns the data index of a ticket's prompt."""
        epoch, index = divmod(ticket, self.num_prompts_in_data)
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, permutation_array(self.num_prompts_in_data, self.seed, epoch))
        return int(self._order[1][index])

    def state_dict(self) -> dict[str, int]:
        """Returns the state for load_state_dict(), as plain integers."""
        return {"num_drawn": self.num_drawn, "num_prompts_in_data": self.num_prompts_in_data, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continues after the last batch of a saved sampler; raises ValueError if that one had a different order."""
        mine = self.state_dict()
        if set(state) != set(mine):
            raise ValueError(f"The sampler's state has the keys {sorted(state)}: it must have {sorted(mine)}.")
        for name in ("num_prompts_in_data", "seed"):
            if state[name] != mine[name]:
                raise ValueError(
                    f"The saved sampler had {name} {state[name]}, this one has {mine[name]}: the order of the prompts "
                    "would differ. Resume with the same data and seed, or start a new run."
                )
        self.num_drawn = state["num_drawn"]


def _nothing_to_draw(num_prompts_in_data: int, batch_size: int) -> ValueError:
    if num_prompts_in_data < 1:
        return ValueError(f"num_prompts_in_data is {num_prompts_in_data}: there must be at least 1 prompt.")
    return ValueError(f"batch_size is {batch_size}: a step takes at least 1 prompt.")


class ResumableSampler(Sampler[int]):
    """Yields one rank's part of each epoch and can start at any sample. Call set_epoch() before each pass.

    Without set_epoch() passes repeat. All ranks share one global order, so an interrupted epoch continues exactly, even
    at another world size.

    Args:
        drop_last: True leaves out the last (remaining % world) samples, so that all ranks have equally many. False
            gives every sample to exactly one rank; ranks may then differ by one, which training must allow for.
        consumed_samples: how many samples all ranks together have used of the first epoch: the one that set_epoch()
            names first, or epoch 0. Later epochs are whole.
    """

    def __init__(
        self,
        data_source_len: int,
        *,
        rank: int,
        world: int,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        consumed_samples: int = 0,
    ) -> None:
        if not 0 <= rank < world:
            raise ValueError(f"rank is {rank} of a world of {world}: it must be at least 0 and below the world size.")
        _check_consumed(consumed_samples, data_source_len)
        self._data_source_len = data_source_len
        self._rank = rank
        self.world = world
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self._consumed_samples = consumed_samples
        self._epoch = 0
        self._is_started = False

    def set_epoch(self, epoch: int, consumed_samples: int | None = None) -> None:
        """Sets the epoch of the next pass, and how many of its samples are used already; must be equal on all ranks."""
        if consumed_samples is not None:
            _check_consumed(consumed_samples, self._data_source_len)
            self._consumed_samples = consumed_samples
        elif self._is_started and epoch != self._epoch:
            self._consumed_samples = 0
        self._epoch = epoch
        self._is_started = True

    def __iter__(self) -> Iterator[int]:
        self._is_started = True
        return iter(self._order()[self._consumed_samples + self._rank : self._end : self.world])

    def __len__(self) -> int:
        return len(range(self._consumed_samples + self._rank, self._end, self.world))

    @property
    def most_samples(self) -> int:
        """The number of samples on the rank that has the most."""
        return len(range(self._consumed_samples, self._end, self.world))

    @property
    def first_sample(self) -> int:
        """The index of the first remaining sample, over all ranks."""
        return self._order()[self._consumed_samples]

    def _order(self) -> Sequence[int]:
        if self._shuffle:
            return permutation(self._data_source_len, self._seed, self._epoch)
        return range(self._data_source_len)

    @property
    def _end(self) -> int:
        remaining = self._data_source_len - self._consumed_samples
        return self._data_source_len - (remaining % self.world if self._drop_last else 0)


def _check_consumed(consumed_samples: int, data_source_len: int) -> None:
    if not 0 <= consumed_samples <= data_source_len:
        raise ValueError(
            f"consumed_samples is {consumed_samples}: it counts samples of one epoch over all ranks, so it must be "
            f"between 0 and the {data_source_len} of the data. Subtract the complete epochs."
        )
