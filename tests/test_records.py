import dataclasses

import pytest
import torch
from tiny_vlm import tiny_config

from lightrl.data.packing import dummy_batch
from lightrl.models.multimodal import blank_vision
from lightrl.records import Experience, Prompt, Sample, ScoredGroup, Status

SAMPLE = Sample(
    prompt=Prompt(index=0, text="ab", token_ids=(1, 2)),
    position=0,
    sample_index=0,
    response_ids=(3, 4, 5),
    sampler_logprobs=(-1.0,) * 3,
    versions=(0,) * 3,
    finish_reason="stop",
    text="cde",
)


def test_records_are_frozen_and_know_their_size() -> None:
    sample = SAMPLE
    item = Experience(sample=sample, reward=1.0, advantage=0.0)
    assert item.num_tokens == 5
    seen = dataclasses.replace(sample, prompt_ids=(1, 7, 7, 7, 2))  # by an engine that expanded an image
    assert dataclasses.replace(item, sample=seen).num_tokens == 8
    assert (sample.prompt_ids, sample.prompt.num_tokens) == ((1, 2), 2)
    assert dataclasses.replace(sample.prompt, num_media_tokens=3).num_tokens == 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        item.reward = 2.0  # type: ignore[misc]


def test_trained_tokens_are_own_and_young() -> None:
    aged = dataclasses.replace(SAMPLE, versions=(4, 5, 6), own=(True, True, False))
    branch = dataclasses.replace(SAMPLE, versions=(4, 5, 5))
    item = Experience(sample=dataclasses.replace(aged, branches=(branch,)), reward=0.0, advantage=0.0)
    assert (item.trained_tokens, item.num_trained) == ((True, True, False), 2 + 3)
    later = dataclasses.replace(item, min_version=5)
    assert (later.trained_tokens, later.num_trained) == ((False, True, False), 1 + 2)
    assert dataclasses.replace(later, is_trained=False).num_trained == 0


def test_a_pack_moves_whole() -> None:
    batch = dummy_batch(temperature=0.5)
    moved = batch.to(torch.device("meta"))
    for field in dataclasses.fields(batch):
        before, after = getattr(batch, field.name), getattr(moved, field.name)
        if isinstance(before, torch.Tensor):
            assert after.is_meta
            assert before.device.type == "cpu"
        else:
            assert after == before
    vision = blank_vision(tiny_config("qwen3_vl"), torch.device("cpu"))
    moved_vision = dataclasses.replace(batch, vision=vision).to(torch.device("meta")).vision
    assert moved_vision is not None
    assert all(getattr(moved_vision, field.name).is_meta for field in dataclasses.fields(vision))


# ---- Statuses ------------------------------------------------------------------------------------------------------

LEGAL = {
    ("init", "completed"), ("init", "aborted"), ("init", "failed"),
    ("aborted", "completed"), ("aborted", "aborted"), ("aborted", "failed"), ("aborted", "expired"),
    ("completed", "filtered"), ("completed", "expired"), ("completed", "archived"),
    ("expired", "init"), ("expired", "archived"),
}  # fmt: skip


@pytest.mark.parametrize("before", Status)
@pytest.mark.parametrize("after", Status)
def test_a_status_follows_only_where_that_is_legal(before: Status, after: Status) -> None:
    sample = dataclasses.replace(SAMPLE, status=before)
    if (before.value, after.value) in LEGAL:
        assert sample.to(after).status is after
        return
    with pytest.raises(ValueError, match=f"that is {before.value} cannot become {after.value}: .* follow"):
        sample.to(after)


def test_a_group_has_the_status_of_its_worst_member() -> None:
    order = ["failed", "aborted", "init", "expired", "filtered", "completed", "archived"]
    for index, name in enumerate(order):
        samples = tuple(dataclasses.replace(SAMPLE, status=Status(other)) for other in reversed(order[index:]))
        group = ScoredGroup(samples=samples, rewards=(0.0,) * len(samples), step=0)
        assert group.status is Status(name)


def test_the_oldest_version_is_of_a_token_that_the_policy_chose() -> None:
    sample = dataclasses.replace(SAMPLE, versions=(1, 4, 3), own=(False, True, True), ticket=7, start_version=2)
    assert sample.oldest_version == 3
    nothing = dataclasses.replace(sample, response_ids=(), versions=(), own=(), sampler_logprobs=())
    assert nothing.oldest_version == 2
    group = ScoredGroup(samples=(sample, nothing), rewards=(0.0, 0.0), step=4)
    assert (group.ticket, group.start_version, group.oldest_version) == (7, 2, 2)


NAN = float("nan")


@pytest.mark.parametrize(
    ("components", "rewards", "has_signal"),
    [
        ([{}, {}], (1.0, 1.0), False),
        ([{"math": 1.0, "form": 0.0}, {"math": 0.0, "form": 1.0}], (1.0, 1.0), True),  # each reward differs
        ([{"math": 1.0, "form": 1.0}, {"math": 1.0, "form": 1.0}], (2.0, 2.0), False),
        ([{"math": 1.0, "form": NAN}, {"math": NAN, "form": 0.5}], (1.0, 0.5), False),  # each one judges one sample
        ([{"math": 1.0, "form": 0.0}, {"math": 0.0, "form": NAN}], (1.0, NAN), False),  # the second sample failed
    ],
)
def test_a_group_whose_single_rewards_are_compared_needs_one_that_differs(
    components: list[dict[str, float]], rewards: tuple[float, float], has_signal: bool
) -> None:
    samples = tuple(
        dataclasses.replace(SAMPLE, components={label: (2.0, value) for label, value in given.items()})
        for given in components
    )
    assert ScoredGroup(samples=samples, rewards=rewards, step=0).has_signal is has_signal


def test_a_group_moves_as_a_whole() -> None:
    group = ScoredGroup(samples=(SAMPLE, dataclasses.replace(SAMPLE, sample_index=1)), rewards=(0.0, 1.0), step=4)
    moved = group.at(SAMPLE.position + 3)
    assert [sample.position for sample in moved.samples] == [SAMPLE.position + 3] * 2
    assert moved.at(SAMPLE.position) == group
