"""What code for other trainers reduces, gathers and loads."""

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from lightrl.comm import Comm
from lightrl.data.sampler import ResumableSampler
from lightrl.strategy.foreign_data import EqualBatches, gathered, rank_loader, reduced
from lightrl.strategy.torch_native import SingleStrategy
from lightrl.testing import run_spmd

PROGRAM = Path(__file__).parents[1] / "programs" / "page_ranks_program.py"


def test_ranks_reduce_gather_and_load_alike() -> None:
    run_spmd(PROGRAM, world_size=2, timeout_s=120)


def test_numpy_values_and_lists_come_back_as_what_they_are() -> None:
    data = {"a": np.float32(1.5), "b": [1, 2.5], "c": np.arange(3), "d": (np.int64(4),)}
    result = reduced(Comm(), data, "sum")
    assert isinstance(result["a"], np.float32)
    assert (result["a"], result["b"], result["c"].tolist()) == (1.5, [1, 2.5], [0, 1, 2])
    assert isinstance(result["c"], np.ndarray)
    assert isinstance(result["d"], tuple)
    assert isinstance(result["d"][0], np.int64)
    assert reduced(Comm(), [1.0] * 12, "mean") == [1.0] * 12
    assert gathered(Comm(), {"x": np.ones((2, 1))})["x"].shape == (2, 1)
    with pytest.raises(TypeError, match="not str"):
        reduced(Comm(), "text", "sum")


def samplers(length: int, world: int, *, consumed: int = 0) -> Iterator[ResumableSampler]:
    for rank in range(world):
        yield ResumableSampler(
            length, rank=rank, world=world, shuffle=True, seed=3, drop_last=False, consumed_samples=consumed
        )


@pytest.mark.parametrize("length", range(1, 18))
@pytest.mark.parametrize(("world", "size"), [(2, 4), (3, 2), (2, 1), (4, 3)])
def test_all_ranks_have_as_many_batches_of_all_samples(length: int, world: int, size: int) -> None:
    loaders = [EqualBatches(sampler, size) for sampler in samplers(length, world)]
    batches = [list(loader) for loader in loaders]
    assert {len(own) for own in batches} == {len(loader) for loader in loaders}
    assert all(0 < len(batch) <= size for own in batches for batch in own)
    given = sorted(index for own in batches for batch in own for index in batch)
    assert sorted(set(given)) == list(range(length))
    left_over = length % (world * size)
    can_split = size > 1 and length >= world
    assert len(given) == length or not can_split or left_over == 0, given


def test_a_sample_that_must_be_given_twice_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        batches = [list(EqualBatches(sampler, 2)) for sampler in samplers(9, 2, consumed=8)]
    assert batches[0] == batches[1]
    assert f"Sample {batches[0][0][0]} is given twice" in caplog.text


def test_a_loader_says_its_size_and_lets_the_epoch_be_set() -> None:
    (sampler, _) = samplers(9, 2)
    loader = rank_loader(list(range(9)), sampler, batch_size=4, drop_last=False, collate_fn=None, pin_memory=False)
    assert loader.sampler is sampler
    assert (loader.batch_size, len(loader)) == (4, 2)
    first = [batch.tolist() for batch in loader]
    loader.sampler.set_epoch(1)  # type: ignore[attr-defined]
    assert [batch.tolist() for batch in loader] != first


def test_set_epoch_takes_the_samples_that_were_used() -> None:
    strategy = SingleStrategy(0, 1.0, 1, 1)
    loader = strategy.setup_dataloader(torch.arange(5), 1, shuffle=False)
    loader.sampler.set_epoch(0, consumed_samples=3)  # type: ignore[attr-defined]
    assert [int(batch) for batch in loader] == [3, 4]
    loader.sampler.set_epoch(1, consumed_samples=0)  # type: ignore[attr-defined]
    assert len(list(loader)) == 5
    loader.sampler.set_epoch(1, 2)  # type: ignore[attr-defined]
    loader.sampler.set_epoch(2)  # type: ignore[attr-defined]
    assert len(list(loader)) == 5  # a later epoch is whole
    with pytest.raises(ValueError, match="consumed_samples is 6"):
        loader.sampler.set_epoch(2, consumed_samples=6)  # type: ignore[attr-defined]
