"""Packing: alignment of tokens and scores, round trips, and the cutting into micro-batches."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from made_samples import made_sample
from torch.testing import assert_close

from lightrl.data.packing import TokenValues, _cut_in_order, dummy_batch, pack, split_micro_batches, unpack
from lightrl.records import Experience, Prompt


def experience(
    position: int, sample_index: int, prompt: list[int], response: list[int], advantage: float = 0.5
) -> Experience:
    sample = made_sample(
        prompt=Prompt(index=100 + position, text="", token_ids=tuple(prompt)),
        position=position,
        sample_index=sample_index,
        response_ids=tuple(response),
        sampler_logprobs=tuple(-token / 100 for token in response),
    )
    return Experience(sample=sample, reward=0.0, advantage=advantage)


def of_length(position: int, num_tokens: int) -> Experience:
    return experience(position, 0, [1], list(range(1, num_tokens)))


def random_experiences(rng: random.Random, num: int, longest: int) -> list[Experience]:
    """Samples whose every token is 1000 x position + its place, so that a token names its sequence."""
    made = []
    for position in range(num):
        prompt_length, response_length = rng.randint(1, longest), rng.randint(1, longest)
        ids = [1000 * position + place for place in range(prompt_length + response_length)]
        made.append(experience(position, rng.randint(0, 3), ids[:prompt_length], ids[prompt_length:], rng.random()))
    rng.shuffle(made)
    return made


def test_two_sequences_by_hand() -> None:
    # A: prompt 1 2 3, response 4 5. B: prompt 6, response 7. B is shorter and comes first:
    #   place   0 1 | 2 3 4 5 6
    #   token   6 7 | 1 2 3 4 5
    # Token 7 at place 1 is predicted at place 0; tokens 4 and 5 at places 5 and 6 at places 4 and 5.
    a = experience(0, 0, [1, 2, 3], [4, 5], advantage=2.0)
    b = experience(1, 0, [6], [7], advantage=-1.0)
    batch = pack([a, b], temperature=0.7, old_logprobs={(0, 0): [-1, -2], (1, 0): [-3]}, ref_logprobs=None)
    assert batch.input_ids.tolist() == [6, 7, 1, 2, 3, 4, 5]
    assert batch.position_ids.tolist() == [0, 1, 0, 1, 2, 3, 4]
    assert batch.cu_seqlens == (0, 2, 7)
    assert batch.score_index.tolist() == [0, 4, 5]
    assert batch.targets.tolist() == [7, 4, 5]
    assert batch.sequence_index.tolist() == [0, 1, 1]
    assert batch.loss_mask.tolist() == [True, True, True]
    assert_close(batch.advantages, torch.tensor([-1.0, 2.0, 2.0]), atol=0, rtol=0)
    assert_close(batch.sampler_logprobs, torch.tensor([-0.07, -0.04, -0.05]), atol=0, rtol=0)
    assert_close(batch.old_logprobs, torch.tensor([-3.0, -1.0, -2.0]), atol=0, rtol=0)
    assert batch.ref_logprobs is None
    assert batch.temperature == 0.7
    assert batch.keys == ((1, 0), (0, 0))


def test_what_a_tool_wrote_is_read_and_not_trained() -> None:
    # A: prompt 1, response 4 5 6, of which a tool wrote 5. B: prompt 6, response 7, all of it the policy's.
    a, b = experience(0, 0, [1], [4, 5, 6]), experience(1, 0, [6], [7])
    a = replace(a, sample=replace(a.sample, own=(True, False, True)))
    batch = pack([a, b], temperature=1.0)
    assert batch.input_ids.tolist() == [6, 7, 1, 4, 5, 6]
    assert batch.targets.tolist() == [7, 4, 5, 6]
    assert batch.loss_mask.tolist() == [True, True, False, True]
    masked = pack([a, b], temperature=1.0, loss_mask={(0, 0): [False, True, True], (1, 0): [True]})
    assert masked.loss_mask.tolist() == [True, False, False, True]
    with pytest.raises(ValueError, match="own has 2 values for a response of 3 tokens"):
        replace(a.sample, own=(True, False))


def test_what_a_token_could_have_been_follows_it_into_the_pack() -> None:
    # The pack has B before C before A. B has the target 0, C the target 1 with the whole vocabulary, A 2 and 3.
    a, b, c = experience(0, 0, [1, 2, 3], [4, 5]), experience(1, 0, [6], [7]), experience(2, 0, [6, 6], [8])
    a = replace(a, sample=replace(a.sample, allowed=np.array([[0, 4], [1, 5], [1, 9]], np.int32)))
    b = replace(b, sample=replace(b.sample, allowed=np.array([[0, 7], [0, 3]], np.int32)))
    batch = pack([a, b, c], temperature=1.0)
    assert batch.targets.tolist() == [7, 8, 4, 5]
    assert batch.allowed is not None
    assert batch.allowed.tolist() == [[0, 7], [0, 3], [2, 4], [3, 5], [3, 9]]
    assert pack([c], temperature=1.0).allowed is None


def test_dtypes() -> None:
    batch = pack([experience(0, 0, [1], [2], advantage=1)], temperature=1.0, old_logprobs=None, ref_logprobs=None)
    integers = (batch.input_ids, batch.position_ids, batch.score_index, batch.targets, batch.sequence_index)
    assert all(tensor.dtype == torch.int64 for tensor in integers)
    assert batch.loss_mask.dtype == torch.bool
    assert batch.advantages.dtype == batch.sampler_logprobs.dtype == torch.float32


def test_every_score_predicts_the_next_token_of_its_own_sequence() -> None:
    rng = random.Random(0)
    for _ in range(50):
        batch = pack(
            random_experiences(rng, rng.randint(1, 12), 6), temperature=1.0, old_logprobs=None, ref_logprobs=None
        )
        assert torch.equal(batch.input_ids[batch.score_index + 1], batch.targets)
        assert torch.equal(batch.input_ids[batch.score_index] // 1000, batch.targets // 1000)
        boundaries = torch.tensor(batch.cu_seqlens)
        owner = torch.bucketize(batch.score_index, boundaries[1:], right=True)
        assert torch.equal(owner, batch.sequence_index)
        positions = torch.arange(batch.cu_seqlens[-1]) - boundaries[:-1].repeat_interleave(boundaries.diff())
        assert torch.equal(batch.position_ids, positions)


def test_unpack_undoes_pack() -> None:
    rng = random.Random(1)
    for _ in range(50):
        experiences = random_experiences(rng, rng.randint(1, 12), 6)
        values = {item.key: list(item.sample.sampler_logprobs) for item in experiences}
        batch = pack(experiences, temperature=1.0, old_logprobs=values, ref_logprobs=values)
        assert_close(batch.old_logprobs, batch.sampler_logprobs, atol=0, rtol=0)
        assert_close(batch.ref_logprobs, batch.sampler_logprobs, atol=0, rtol=0)
        pieces = unpack(batch, batch.targets)
        assert {key: tuple(piece.tolist()) for key, piece in pieces.items()} == {
            item.key: item.sample.response_ids for item in experiences
        }


def test_order_of_samples_does_not_matter_and_equal_lengths_are_adjacent() -> None:
    rng = random.Random(2)
    experiences = random_experiences(rng, 12, 3)
    first = pack(experiences, temperature=1.0, old_logprobs=None, ref_logprobs=None)
    second = pack(experiences[::-1], temperature=1.0, old_logprobs=None, ref_logprobs=None)
    assert first.keys == second.keys
    assert torch.equal(first.input_ids, second.input_ids)
    lengths = torch.tensor(first.cu_seqlens).diff().tolist()
    assert lengths == sorted(lengths)


def test_fully_masked_sample() -> None:
    a, b = experience(0, 0, [1], [2, 3]), experience(0, 1, [1], [2, 3, 4])
    masks = {(0, 0): [False, False], (0, 1): [True, False, True]}
    batch = pack([a, b], temperature=1.0, old_logprobs=None, ref_logprobs=None, loss_mask=masks)
    assert batch.loss_mask.tolist() == [False, False, True, False, True]


def test_aborted_sample_without_response_keeps_its_place() -> None:
    a, b = experience(0, 0, [1, 2], []), experience(1, 0, [3], [4, 5])
    batch = pack([a, b], temperature=1.0, old_logprobs=None, ref_logprobs=None)
    assert batch.score_index.tolist() == [2, 3]
    pieces = unpack(batch, batch.targets)
    assert {key: piece.tolist() for key, piece in pieces.items()} == {(0, 0): [], (1, 0): [4, 5]}
    batch = pack([experience(0, 0, [1, 2, 3, 6], []), b], temperature=1.0)  # the longest, so it comes last
    assert {key: piece.tolist() for key, piece in unpack(batch, batch.targets).items()} == {(1, 0): [4, 5], (0, 0): []}


def test_dummy_trains_nothing() -> None:
    batch = dummy_batch(temperature=0.5)
    assert batch.cu_seqlens == (0, 2)
    assert batch.loss_mask.tolist() == [False]
    assert batch.temperature == 0.5
    assert batch.score_index.max() < batch.input_ids.shape[0]
    assert unpack(batch, batch.targets).keys() == {(-1, -1)}


def test_pack_errors() -> None:
    def packed(
        *experiences: Experience, old_logprobs: TokenValues | None = None, ref_logprobs: TokenValues | None = None
    ) -> None:
        pack(experiences, temperature=1.0, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs)

    item = experience(0, 0, [1], [2, 3])
    with pytest.raises(ValueError, match="no sample to pack"):
        packed()
    with pytest.raises(ValueError, match="Two samples have the key \\(0, 0\\)"):
        packed(item, item)
    with pytest.raises(ValueError, match="Prompt 100 has no tokens"):
        packed(experience(0, 0, [], [1]))
    image = experience(1, 0, [1], [2])
    prompt = replace(image.sample.prompt, images=("cat.png",))
    with pytest.raises(ValueError, match="Prompt 101 has images or videos: they need an encoder"):
        packed(item, replace(image, sample=replace(image.sample, prompt=prompt)))
    with pytest.raises(ValueError, match="old_logprobs has nothing for sample \\(0, 0\\)"):
        packed(item, old_logprobs={})
    with pytest.raises(
        ValueError, match="ref_logprobs has 1 values for sample \\(0, 0\\), whose response has 2 tokens"
    ):
        packed(item, ref_logprobs={(0, 0): [1.0]})
    with pytest.raises(ValueError, match="unpack got 1 values for 2 response tokens"):
        unpack(pack([item], temperature=1.0, old_logprobs=None, ref_logprobs=None), torch.zeros(1))


def lengths_of(batches: list[list[Experience]]) -> list[list[int]]:
    return [[item.num_tokens for item in batch] for batch in batches]


def test_split_by_hand() -> None:
    # 28 tokens, at most 10 in a micro-batch: three at least. Nothing but 9, 8 + 2 and 6 + 3 (or the like) will do.
    experiences = [of_length(position, length) for position, length in enumerate([2, 9, 3, 8, 6])]
    batches = split_micro_batches(experiences, max_tokens=10, max_samples=None)
    assert sorted(sum(lengths) for lengths in lengths_of(batches)) == [9, 9, 10]


def test_split_keeps_similar_lengths_together_at_no_cost() -> None:
    # 12 and 12 tokens either way: by sorted cuts 6 6 | 3 3 3 3, where the balanced one mixes 6 with 3.
    experiences = [of_length(position, length) for position, length in enumerate([3, 6, 3, 6, 3, 3])]
    assert lengths_of(split_micro_batches(experiences, max_tokens=12, max_samples=None)) == [[6, 6], [3, 3, 3, 3]]


def test_sorted_cuts_may_cost_five_percent() -> None:
    """Otherwise each sample, longest first, goes where there are fewer tokens."""
    # Sorted: 11 10 | 10 2, at most 21 tokens. Balanced: 11 2 | 10 10, at most 20, and 1.05 x 20 = 21.
    batches = split_micro_batches(sized(2, 10, 11, 10), max_tokens=None, max_samples=None, min_num=2)
    assert lengths_of(batches) == [[11, 10], [10, 2]]
    # Sorted: 10 9 | 9 8, at most 19. Balanced: 10 8 | 9 9, at most 18, and 1.05 x 18 = 18.9.
    batches = split_micro_batches(sized(9, 8, 10, 9), max_tokens=None, max_samples=None, min_num=2)
    assert lengths_of(batches) == [[10, 8], [9, 9]]


def test_cuts_in_order_are_as_even_as_the_lengths_allow() -> None:
    """A sample joins a cut of which at least half of it is left: of 6 tokens the second 3 does, and then no 2 does."""
    lengths = [[item.num_tokens for item in part] for part in _cut_in_order(sized(3, 3, 2, 2, 2), 2)]
    assert lengths == [[3, 3], [2, 2, 2]]
    assert [len(part) for part in _cut_in_order(sized(2, 2, 2), 2)] == [2, 1]  # exactly half of the second fits


def sized(*lengths: int) -> list[Experience]:
    return [of_length(position, length) for position, length in enumerate(lengths)]


def test_split_without_limits_is_one_batch() -> None:
    experiences = [of_length(position, 5) for position in range(4)]
    assert len(split_micro_batches(experiences, max_tokens=None, max_samples=None)) == 1


def test_split_min_num() -> None:
    experiences = [of_length(position, 4) for position in range(6)]
    batches = split_micro_batches(experiences, max_tokens=None, max_samples=None, min_num=3)
    assert lengths_of(batches) == [[4, 4], [4, 4], [4, 4]]
    batches = split_micro_batches(experiences[:2], max_tokens=None, max_samples=None, min_num=4)
    assert lengths_of(batches) == [[4], [4], [], []]
    assert split_micro_batches([], max_tokens=8, max_samples=2) == [[]]


def test_split_properties() -> None:
    rng = random.Random(3)
    for _ in range(300):
        experiences = [of_length(position, rng.randint(2, 30)) for position in range(rng.randint(1, 25))]
        max_tokens = rng.choice([None, 30, 45, 200])
        max_samples = rng.choice([None, 1, 3, 8])
        min_num = rng.randint(1, 8)
        batches = split_micro_batches(experiences, max_tokens=max_tokens, max_samples=max_samples, min_num=min_num)
        kept = Counter(item.key for batch in batches for item in batch)
        assert kept == Counter(item.key for item in experiences)
        loads = [sum(lengths) for lengths in lengths_of(batches)]
        assert loads == sorted(loads, reverse=True)
        assert len(batches) >= min_num
        assert loads.count(0) == max(0, min_num - len(experiences))
        assert max_tokens is None or max(loads) <= max_tokens
        assert max_samples is None or max(map(len, batches)) <= max_samples
        shuffled = rng.sample(experiences, len(experiences))
        assert batches == split_micro_batches(shuffled, max_tokens=max_tokens, max_samples=max_samples, min_num=min_num)


def test_split_balances() -> None:
    rng = random.Random(4)
    experiences = [of_length(position, rng.randint(2, 60)) for position in range(64)]
    loads = [sum(lengths) for lengths in lengths_of(split_micro_batches(experiences, max_tokens=512, max_samples=None))]
    assert min(loads) >= 0.85 * max(loads)


def test_sample_too_long_is_an_error_that_says_what_to_do() -> None:
    experiences = [of_length(0, 4), of_length(7, 12)]
    message = "prompt 107 has 12 tokens .* raise --max_tokens_per_microbatch \\(now 10\\) to at least 12"
    with pytest.raises(ValueError, match=message):
        split_micro_batches(experiences, max_tokens=10, max_samples=None)
    with pytest.raises(ValueError, match="max_samples is 0"):
        split_micro_batches(experiences, max_tokens=None, max_samples=0)


def test_versions_are_kept_and_old_tokens_are_not_trained() -> None:
    a, b = experience(0, 0, [1, 2], [3, 4, 5]), experience(1, 0, [6], [7, 8])
    a = replace(a, sample=replace(a.sample, versions=(4, 5, 6), own=(True, True, False)), min_version=5)
    b = replace(b, sample=replace(b.sample, versions=(5, 6)), min_version=5)
    batch = pack([a, b], temperature=1.0)
    assert batch.versions is not None
    assert batch.versions.tolist() == [5, 6, 4, 5, 6]  # b is shorter and comes first
    assert batch.loss_mask.tolist() == [True, True, False, True, False]  # 4 is too old, 6 was heard
    assert pack([replace(b, min_version=6)], temperature=1.0).loss_mask.tolist() == [False, True]
