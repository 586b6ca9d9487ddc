"""Episodes token by token, and from the tensors of other frameworks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightrl.builtin.model import builtin_tokenizer
from lightrl.records import FinishReason, Prompt
from lightrl.rollout.episode import Episode, Turn


def turn(*ids: int, **changes: Any) -> Turn:
    settings: dict[str, Any] = {
        "token_ids": ids,
        "logprobs": tuple(-token / 10 for token in ids),
        "versions": (4,) * len(ids),
        "finish_reason": "stop",
        "text": "",
    }
    return Turn(**{**settings, **changes})


def test_an_episode_only_grows() -> None:
    episode = Episode([2, 3])
    episode.say(turn(5, 6))
    first = episode.ids
    episode.hear([7])
    episode.say(turn(8, finish_reason="length"))
    assert first == (2, 3, 5, 6)
    assert episode.ids == (2, 3, 5, 6, 7, 8)
    prompt = Prompt(index=0, text="", token_ids=(2, 3))
    sample = episode.sample(prompt, 1, 4, builtin_tokenizer())
    assert sample.key == (1, 4)
    assert sample.prompt_ids == (2, 3)
    assert sample.response_ids == (5, 6, 7, 8)
    assert sample.own == (True, True, False, True)
    assert sample.sampler_logprobs == (-0.5, -0.6, 0.0, -0.8)
    assert sample.versions == (4, 4, 4, 4)
    assert sample.turns == (0, 3)
    assert sample.finish_reason == "length"
    assert sample.num_own == 3


def test_the_text_is_of_all_turns_and_what_is_heard_has_the_version_of_the_turn_before() -> None:
    tokenizer = builtin_tokenizer()
    episode = Episode([2, 3])
    episode.say(turn(5, text="first", versions=(1,)))
    prompt = Prompt(index=0, text="", token_ids=(2, 3))
    assert episode.sample(prompt, 0, 0, tokenizer).text == "first"
    answered = Episode([2, 3])
    answered.say(turn(5, text="first"))
    answered.hear([7])
    assert answered.sample(prompt, 0, 0, tokenizer).text == tokenizer.decode([5, 7], skip_special_tokens=True)
    episode.say(turn(6, text="second", versions=(2,)))
    assert episode.sample(prompt, 0, 0, tokenizer).text == tokenizer.decode([5, 6], skip_special_tokens=True)
    episode.hear([7])
    assert episode.sample(prompt, 0, 0, tokenizer).versions == (1, 2, 2)


def test_a_text_is_not_taken_for_tokens() -> None:
    with pytest.raises(ValueError, match=r"hear\(\) takes the ids of tokens, not the text '12'. engine.encode\(text\)"):
        Episode([2]).hear("12")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Episode\(\) takes the ids"):
        Episode("1+2=")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([2, 1.5], r"not \[2, 1.5\]: 'float' object cannot be interpreted as an integer"),
        ([[2, 3]], r"one sequence of integers, not \[\[2, 3\]\]"),
        ({"input_ids": [2]}, r"not \{'input_ids': \[2\]\}"),
        (None, "not None"),
        ([0.5] * 1000, r"\.\.\.: 'float'"),
    ],
)
def test_ids_are_integers_in_one_sequence(given: Any, text: str) -> None:
    for take in (Episode, Episode([2]).hear):
        with pytest.raises(ValueError, match=text):
            take(given)


def test_integers_of_other_libraries_become_pythons() -> None:
    episode = Episode(np.array([2, 3]))
    episode.hear(torch.tensor([4, 5]))  # type: ignore[arg-type]
    assert episode.prompt_ids == (2, 3)
    assert [type(token) for token in (*episode.prompt_ids, *episode.response_ids)] == [int] * 4


def test_only_a_turn_is_said() -> None:
    async def generate() -> Turn:
        return turn(5)

    forgotten = generate()
    with pytest.raises(ValueError, match="not <coroutine object .*generate.*: write `await` before the call"):
        Episode([2]).say(forgotten)  # type: ignore[arg-type]
    forgotten.close()
    with pytest.raises(ValueError, match=r"say\(\) takes the Turn that `await engine.generate.*, not '12'"):
        Episode([2]).say("12")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reward", "text"),
    [
        ("1", "is the text '1'"),
        ([1.0], r"is \[1.0\]. It must be a number"),
        (torch.ones(2), r"is tensor\(\[1., 1.\]\)"),
    ],
)
def test_a_reward_is_a_number(reward: Any, text: str) -> None:
    episode = Episode([2])
    episode.reward = reward
    with pytest.raises(ValueError, match=text):
        episode.require_rewards()
    with pytest.raises(ValueError, match=text):
        episode.sample(Prompt(index=0, text="", token_ids=(2,)), 0, 0, builtin_tokenizer())


def test_a_sample_has_the_prompt_as_the_engine_expanded_its_images() -> None:
    episode = Episode([2, 9])  # 9 stands for an image, which becomes three tokens
    assert not episode.has_seen_media
    episode.say(turn(5, 6, prompt_ids=(2, 9), expanded_ids=(2, 9, 9, 9)))
    episode.hear([7])
    episode.say(turn(8, prompt_ids=episode.ids, expanded_ids=(2, 9, 9, 9, 5, 6, 7)))
    assert episode.has_seen_media
    assert episode.ids == (2, 9, 5, 6, 7, 8)
    sample = episode.sample(Prompt(index=0, text="", token_ids=(2, 9)), 0, 0, builtin_tokenizer())
    assert (sample.prompt_ids, sample.response_ids) == ((2, 9, 9, 9), (5, 6, 7, 8))


def test_an_episode_of_one_turn_has_no_mask() -> None:
    episode = Episode([2])
    episode.say(turn(5))
    sample = episode.sample(Prompt(index=0, text="", token_ids=(2,)), 0, 0, builtin_tokenizer())
    assert (sample.own, sample.turns) == ((), (0,))


def test_turns_earn_parts_of_the_reward() -> None:
    episode = Episode([2])
    with pytest.raises(ValueError, match="No turn has been said that could earn a reward"):
        episode.earn(1.0)
    for token, earned in ((5, ()), (6, (0.5, 0.25)), (7, ())):
        episode.say(turn(token))
        for reward in earned:
            episode.earn(reward)
    sample = episode.sample(Prompt(index=0, text="", token_ids=(2,)), 0, 0, builtin_tokenizer())
    assert (sample.turn_rewards, sample.reward) == ((0.0, 0.75), 0.75)


def test_numbers_of_numpy_become_those_of_python() -> None:
    episode = Episode([2])
    episode.say(turn(5))
    episode.earn(np.float32(0.5))  # type: ignore[arg-type]
    episode.count("steps", np.int64(2))  # type: ignore[arg-type]
    sample = episode.sample(Prompt(index=0, text="", token_ids=(2,)), 0, 0, builtin_tokenizer())
    assert [type(number) for number in (sample.reward, *sample.turn_rewards, sample.numbers["steps"])] == [float] * 3


def test_a_turn_of_another_temperature_is_not_trained() -> None:
    with pytest.raises(ValueError, match=r"A turn of another temperature than the run's, or .* cannot be trained"):
        Episode([2]).say(turn(5, is_trainable=False))


def test_a_turn_from_other_tokens_is_refused() -> None:
    episode = Episode([2])
    episode.say(turn(5, prompt_ids=(2,)))
    episode.hear([9])
    with pytest.raises(
        ValueError, match="generated from 3 other tokens than the 3 of the episode: token 1 was 6 there"
    ):
        episode.say(turn(7, prompt_ids=(2, 6, 9)))  # as if the first turn had been tokenised again
    with pytest.raises(ValueError, match="their lengths differ"):
        episode.say(turn(7, prompt_ids=(2, 5)))
    episode.say(turn(7, prompt_ids=(2, 5, 9)))


def test_a_turn_that_is_only_read_is_not_trained() -> None:
    episode = Episode([2])
    episode.say(turn(5, text="3", is_trainable=False), trained=False)
    sample = episode.sample(Prompt(index=0, text="", token_ids=(2,)), 0, 0, builtin_tokenizer())
    assert sample.num_own == 0
    assert sample.text == "3"


def test_experts_of_earlier_turns_stay_as_they_were_sampled() -> None:
    def rows(first: int, count: int) -> Any:
        return np.arange(first, first + count, dtype=np.int16)[:, None, None]

    episode = Episode([1, 2, 3])
    episode.say(turn(7, 8, routing=rows(0, 4)))  # 3 of the prompt and 1 of the turn: nothing has run its last token
    episode.hear([9])
    episode.say(turn(7, 8, routing=rows(100, 7)))  # of all 6 before it and 1 of its own, the first 4 drawn before
    sample = episode.sample(Prompt(index=0, text="", token_ids=(1, 2, 3)), 0, 0, builtin_tokenizer())
    assert sample.routing is not None
    assert sample.routing[:, 0, 0].tolist() == [0, 1, 2, 3, 104, 105, 106]


def test_a_number_cannot_have_the_name_of_a_metric_of_the_run() -> None:
    """Two of one name would be added up, or end the run when the step is reported."""
    episode = Episode([1])
    for name in ("turns", "failed"):
        with pytest.raises(ValueError, match=f"episode/{name} is a metric of the run itself"):
            episode.count(name)


@pytest.mark.parametrize(("last", "wanted"), [("stop", "turns"), ("length", "length")])
def test_an_episode_without_turns_left_is_truncated_if_its_last_turn_is(last: FinishReason, wanted: str) -> None:
    episode = Episode([1])
    for reason in ("length", last):  # only the last turn decides
        episode.say(Turn(token_ids=(2,), logprobs=(0.0,), versions=(0,), finish_reason=reason, text=""))
    episode.end_at_max_turns()
    assert episode.finish_reason == wanted
