"""Which call goes on from which, and the samples that they make."""

from __future__ import annotations

from lightrl.rollout.endpoint.conversations import Conversations
from lightrl.rollout.episode import Turn
from lightrl.rollout.observations import SeenIds, SeenImage


def turn(*ids: int) -> Turn:
    return Turn(
        token_ids=ids,
        logprobs=tuple(-token / 10 for token in ids),
        versions=(1,) * len(ids),
        finish_reason="stop",
        text="",
    )


def rows(made: Conversations) -> list[tuple[tuple[int, ...], list[int], list[int]]]:
    return [(episode.prompt_ids, episode.response_ids, episode.turns) for episode in made.episodes()]


def test_a_conversation_is_one_sample() -> None:
    made = Conversations()
    made.record([1, 2], turn(3, 4))
    made.record([1, 2, 3, 4, 9], turn(5))
    made.record([1, 2, 3, 4, 9, 5], turn(6))  # nothing is heard between the turns
    assert rows(made) == [((1, 2), [3, 4, 9, 5, 6], [0, 3, 4])]


def test_a_fork_is_a_sample_whose_prompt_is_what_came_before() -> None:
    made = Conversations()
    made.record([1], turn(2))
    made.record([1, 2, 8], turn(3))
    made.record([1, 2, 9], turn(4))
    made.record([1, 2, 9, 4, 7], turn(5))  # the second continuation becomes the longer one, and the main sample
    assert rows(made) == [((1,), [2, 9, 4, 7, 5], [0, 2, 4]), ((1, 2, 8), [3], [0])]


def test_the_longer_continuation_stays_the_main_sample_if_it_is_the_older_one() -> None:
    made = Conversations()
    made.record([1], turn(2))
    made.record([1, 2, 8], turn(3))
    made.record([1, 2, 8, 3, 7], turn(5))
    made.record([1, 2, 9], turn(4))
    assert rows(made) == [((1,), [2, 8, 3, 7, 5], [0, 2, 4]), ((1, 2, 9), [4], [0])]


def test_edited_history_and_equal_prompts_begin_new_samples() -> None:
    made = Conversations()
    made.record([1], turn(2))
    made.record([1], turn(3))
    made.record([1, 4, 8], turn(5))  # neither said 4
    assert rows(made) == [((1, 4, 8), [5], [0]), ((1,), [2], [0]), ((1,), [3], [0])]
    assert made.record([6, 2, 8], turn(5)).parent is None  # neither was asked 6


def test_of_equal_answers_the_newest_without_a_successor_goes_on() -> None:
    made = Conversations()
    made.record([1], turn(2))
    second = made.record([1], turn(2))
    assert made.extended_by((1, 2, 5)) is second
    made.record([1, 2, 5], turn(6))
    assert made.record([1, 2, 7], turn(8)).parent is made.calls[0]


def test_a_parent_that_is_no_prefix_is_not_believed() -> None:
    made = Conversations()
    first = made.record([1], turn(2))
    assert made.record([1, 3], turn(4), parent=first).parent is None
    assert Conversations().episodes() == []


def image(seed: int) -> SeenImage:
    return SeenImage(bytes([seed]), "pixels", 9, 3)


def test_a_call_with_another_image_in_its_history_continues_nothing() -> None:
    """9 stands for an image; the call without images shows that of the run's own prompt."""
    made = Conversations()
    first = made.record(SeenIds([1, 9], [image(0)]), turn(3))
    same = made.record(SeenIds([1, 9, 3, 9], [image(0), image(1)]), turn(4))
    other = made.record(SeenIds([1, 9, 3, 9], [image(1), image(1)]), turn(4))
    own = made.record([1, 9], turn(3))
    changed = made.record(SeenIds([1, 9, 3, 8], [image(2)]), turn(4))
    shown = made.record(SeenIds([1, 9, 3, 9], [image(2)]), turn(4))
    calls = (first, same, other, own, changed, shown)
    assert [call.parent for call in calls] == [None, first, None, None, None, own]
    seen = sorted((episode.response_ids, [item.content for item in episode.images]) for episode in made.episodes())
    assert seen == [
        ([3, 9, 4], [b"\0", b"\1"]),
        ([3, 9, 4], [b"\2"]),
        ([4], [b"\1", b"\1"]),
        ([4], [b"\2"]),
    ]
