"""Which samples are older than the step, and how old."""

from types import SimpleNamespace
from typing import Any

import pytest
from made_samples import made_sample

from lightrl.comm import Comm
from lightrl.metrics import Statistics
from lightrl.records import Experience, Prompt
from lightrl.trainers.staleness import describe_staleness, older_samples

PROMPT = Prompt(index=0, text="", token_ids=(1,))


def made(index: int, versions: tuple[int, ...], own: tuple[bool, ...] = ()) -> Experience:
    sample = made_sample(
        prompt=PROMPT,
        sample_index=index,
        response_ids=(5,) * len(versions),
        sampler_logprobs=(-1.0,) * len(versions),
        versions=versions,
        own=own,
    )
    return Experience(sample=sample, reward=0.0, advantage=0.0)


def test_a_sample_with_one_older_token_is_older() -> None:
    items = [made(0, (2, 2)), made(1, (1, 2)), made(2, (2, 1)), made(3, ())]
    assert older_samples(items, 2, Comm()) == {(0, 1), (0, 2)}


def test_samples_of_other_ranks_are_known() -> None:
    """Ranks that split a model run each other's samples."""
    comm: Any = SimpleNamespace(all_gather_object=lambda item: [item, {(7, 2)}])
    assert older_samples([made(0, (0,)), made(1, (1,))], 1, comm) == {(0, 0), (7, 2)}


def test_staleness_counts_the_tokens_of_the_policy() -> None:
    """Ages at step 3: 2, 0 and, a tool's token apart, 3. The second sample is of two weights."""
    items = [made(0, (1,)), made(1, (0, 1, 3), own=(True, False, True)), made(2, (1,))]
    for ranks in ([items], [items[:1], items[1:]]):
        statistics = Statistics()
        for mine in ranks:
            describe_staleness(mine, 3, statistics)
        metrics = statistics.reduce(Comm())
        assert metrics["rollout/staleness"] == pytest.approx(7 / 4, abs=1e-6)
        assert metrics["rollout/staleness_max"] == 3
        assert metrics["rollout/versions"] == pytest.approx(4 / 3, abs=1e-6)


def test_a_rank_without_samples_adds_nothing() -> None:
    """If no rank has one, as when a filter rejects all groups, there is no mean, and 0 would look like one."""
    statistics = Statistics()
    describe_staleness([], 3, statistics)
    assert statistics.reduce(Comm()) == {}
