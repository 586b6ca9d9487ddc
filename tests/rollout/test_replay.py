"""The buffer of groups: whole groups in and out, once each, in three orders, and through a checkpoint."""

import random
from dataclasses import replace

import pytest
from made_samples import made_sample

from lightrl.comm import Comm
from lightrl.records import Prompt, ScoredGroup, Status
from lightrl.rollout.replay import ReplayBuffer

PROMPTS = [Prompt(index=index, text="", token_ids=(1, index)) for index in range(200)]


def group(ticket: int, *, start: int = 0, oldest: int | None = None) -> ScoredGroup:
    first = start if oldest is None else oldest
    samples = tuple(
        made_sample(
            prompt=PROMPTS[ticket],
            sample_index=index,
            response_ids=(5, 6),
            sampler_logprobs=(-0.5, -0.25),
            versions=(first, first + 1),
            ticket=ticket,
            start_version=start,
        )
        for index in range(2)
    )
    return ScoredGroup(samples=samples, rewards=(0.0, 1.0), step=start)


def filled(*groups: ScoredGroup) -> ReplayBuffer:
    made = ReplayBuffer()
    for item in groups:
        made.put(item)
    return made


def test_the_orders_differ() -> None:
    made = filled(group(4, start=2, oldest=2), group(1, start=1, oldest=3), group(3, start=1, oldest=1))
    assert made.choose(2, "fifo") == [4, 1]
    assert made.choose(2, "stalest") == [3, 4]
    assert made.choose(2, step=2, max_staleness=1) == [1, 3]
    assert made.choose(4, "fifo") == []


def test_what_is_taken_is_gone() -> None:
    made = filled(group(4), group(1), group(3))
    assert [item.ticket for item in made.take([3, 4, 9])] == [3, 4]  # 9 is on another rank
    assert made.tickets == [1]
    assert 1 in made
    assert made[1].ticket == 1
    with pytest.raises(ValueError, match="A group of ticket 1 cannot be added"):
        made.put(group(1))
    with pytest.raises(ValueError, match="A group of ticket -1 cannot be added"):
        made.put(replace(group(0), samples=tuple(replace(item, ticket=-1) for item in group(0).samples)))


def test_groups_are_counted_by_status() -> None:
    expired = replace(group(2), samples=(group(2).samples[0], group(2).samples[1].to(Status.EXPIRED)))
    assert filled(group(1), expired, group(3)).counts() == {"completed": 2, "expired": 1}


def test_random_operations_lose_and_double_nothing() -> None:
    draw = random.Random(1)
    made, taken, put = ReplayBuffer(), [], 0
    for _ in range(150):
        if draw.random() < 0.5:
            made.put(group(put, start=put // 4))
            put += 1
        else:
            order = draw.choice(["forced_first", "fifo", "stalest"])
            chosen = made.choose(draw.randint(1, 3), order, step=put // 4, max_staleness=9)
            taken += [item.ticket for item in made.take(chosen)]
    assert sorted(taken + made.tickets) == list(range(put))


def test_a_saved_buffer_is_dealt_out_again() -> None:
    made = filled(group(4, start=2), group(1), group(3))
    state = made.state_dict(Comm())
    parts = [ReplayBuffer(), ReplayBuffer()]
    for rank, part in enumerate(parts):
        part.load_state_dict(state, PROMPTS, lambda ticket, rank=rank: ticket % 2 == rank)
    assert [part.tickets for part in parts] == [[4], [1, 3]]
    assert parts[0][4] == made[4]
    assert len(parts[1]) == 2
