from __future__ import annotations

import pytest

from lightrl.data.sampler import PromptSampler, ResumableSampler, permutation, shard


def resumable(
    length: int, *, rank: int = 0, world: int = 1, drop_last: bool = True, shuffle: bool = True, consumed: int = 0
) -> ResumableSampler:
    return ResumableSampler(
        length, rank=rank, world=world, shuffle=shuffle, seed=7, drop_last=drop_last, consumed_samples=consumed
    )


def interleave(parts: list[list[int]]) -> list[int]:
    """The global order of which parts[r] is rank r's."""
    longest = max(map(len, parts))
    return [part[place] for place in range(longest) for part in parts if place < len(part)]


def test_permutation_holds_each_index_once_and_changes_with_seed_and_epoch() -> None:
    orders = [permutation(50, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert permutation(50, 0, 0) == orders[0]


def test_permutation_is_uniform_over_first_places() -> None:
    # 3,000 epochs of 3: each index is first in 1,000 on average, with a deviation of sqrt(3000 * 1/3 * 2/3) = 26.
    firsts = [permutation(3, 11, epoch)[0] for epoch in range(3000)]
    assert all(abs(firsts.count(index) - 1000) < 5 * 26 for index in range(3))


@pytest.mark.parametrize("batch_size", [1, 3, 7, 10, 25])
def test_every_epoch_holds_each_prompt_once_whatever_the_batch_size(batch_size: int) -> None:
    sampler = PromptSampler(10, batch_size, seed=3)
    drawn: list[int] = []
    while len(drawn) < 40:
        batch = sampler.next_batch()
        assert len(batch) == batch_size
        drawn += batch
    epochs = [drawn[start : start + 10] for start in (0, 10, 20, 30)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_a_single_prompt_is_drawn_again_and_again() -> None:
    assert PromptSampler(1, 1, seed=3).draw(3) == [0, 0, 0]


@pytest.mark.parametrize("steps_before", [0, 1, 4, 5])
def test_state_resumes_exactly(steps_before: int) -> None:
    sampler = PromptSampler(10, 4, seed=3)
    for _ in range(steps_before):
        sampler.next_batch()
    state = sampler.state_dict()
    expected = [sampler.next_batch() for _ in range(8)]
    resumed = PromptSampler(10, 4, seed=3)
    resumed.next_batch()  # leaves another order in its cache
    resumed.load_state_dict(state)
    assert [resumed.next_batch() for _ in range(8)] == expected


def test_state_of_other_data_or_seed_or_keys_is_refused() -> None:
    state = PromptSampler(10, 4, seed=3).state_dict()
    with pytest.raises(ValueError, match="saved sampler had num_prompts_in_data 10, this one has 11"):
        PromptSampler(11, 4, seed=3).load_state_dict(state)
    with pytest.raises(ValueError, match="saved sampler had seed 3, this one has 4"):
        PromptSampler(10, 4, seed=4).load_state_dict(state)
    with pytest.raises(ValueError, match=r"has the keys \['num_drawn'\]"):
        PromptSampler(10, 4, seed=3).load_state_dict({"num_drawn": 4})


def test_no_prompts_or_no_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="num_prompts_in_data is 0"):
        PromptSampler(0, 4, seed=0)
    with pytest.raises(ValueError, match="batch_size is 0"):
        PromptSampler(4, 0, seed=0)


def test_shard_strides_so_that_index_i_belongs_to_rank_i_modulo_world() -> None:
    assert [shard("abcde", rank, 3) for rank in range(3)] == [["a", "d"], ["b", "e"], ["c"]]
    assert [shard([9], rank, 3) for rank in range(3)] == [[9], [], []]


@pytest.mark.parametrize("length", [0, 1, 7, 8])
@pytest.mark.parametrize("world", [1, 2, 3, 10])
def test_eval_covers_every_sample_exactly_once(length: int, world: int) -> None:
    parts = [shard(range(length), rank, world) for rank in range(world)]
    assert sorted(index for part in parts for index in part) == list(range(length))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("world", [1, 2, 3, 10])
@pytest.mark.parametrize("consumed", [0, 4, 6, 7])
def test_ranks_together_walk_the_global_order(drop_last: bool, world: int, consumed: int) -> None:
    samplers = [resumable(7, rank=rank, world=world, drop_last=drop_last, consumed=consumed) for rank in range(world)]
    parts = [list(sampler) for sampler in samplers]
    remaining = permutation(7, 7, 0)[consumed:]
    kept = len(remaining) - (len(remaining) % world if drop_last else 0)
    assert interleave(parts) == remaining[:kept]
    assert [len(sampler) for sampler in samplers] == [len(part) for part in parts]
    assert {sampler.most_samples for sampler in samplers} == {len(parts[0])}
    if drop_last:
        assert len({len(part) for part in parts}) == 1


def test_epoch_resumes_exactly_at_another_world_size() -> None:
    # 24 samples: 3 steps of 2 ranks x 2 consume 12, the rest goes on with 4 ranks.
    before = interleave([list(resumable(24, rank=rank, world=2))[:6] for rank in range(2)])
    after = interleave([list(resumable(24, rank=rank, world=4, consumed=12)) for rank in range(4)])
    assert before + after == permutation(24, 7, 0)


def test_consumed_samples_count_for_the_first_epoch_named_only() -> None:
    sampler = resumable(6, consumed=4)
    sampler.set_epoch(3)
    assert len(sampler) == 2
    assert list(sampler) == permutation(6, 7, 3)[4:]
    sampler.set_epoch(3)
    assert list(sampler) == permutation(6, 7, 3)[4:]
    sampler.set_epoch(4)
    assert len(sampler) == 6
    assert list(sampler) == permutation(6, 7, 4)


def test_consumed_samples_count_for_epoch_0_when_it_is_iterated_first() -> None:
    sampler = resumable(6, consumed=4)
    assert list(sampler) == permutation(6, 7, 0)[4:]
    sampler.set_epoch(1)
    assert list(sampler) == permutation(6, 7, 1)


def test_without_shuffle_the_order_is_that_of_the_data() -> None:
    assert list(resumable(7, rank=1, world=2, shuffle=False, drop_last=False)) == [1, 3, 5]
    assert list(resumable(7, rank=0, world=2, shuffle=False, drop_last=True)) == [0, 2, 4]


def test_a_rank_outside_the_world_or_more_than_an_epoch_is_refused() -> None:
    with pytest.raises(ValueError, match="rank is 3 of a world of 3"):
        resumable(7, rank=3, world=3)
    with pytest.raises(ValueError, match="consumed_samples is 8: .* between 0 and the 7"):
        resumable(7, consumed=8)
