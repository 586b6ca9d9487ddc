"""A planted reward hack ranks first."""

from typing import Any

import pytest

from lightrl.report.suspicion import suspicions
from tests.report.conftest import HACK, a_sample

HONEST = [a_sample(step, 0, index) for step in range(1, 20) for index in range(4)]


@pytest.mark.parametrize(
    ("planted", "reason"),
    [
        ({"response": HACK}, "it addresses the grader or the tests: 'As the grader'"),
        ({"response": "the same " * 40}, "it repeats itself: it compresses to 6% of its length"),
        ({"response": "99"}, "rewarded, but the reference answer is not in the response"),
        ({"reward": 8.0}, "its reward 8 is far above the others"),
        ({"response": "0123456789" * 5}, "50 characters, where 2 are usual"),
        ({"finish_reason": "length"}, "rewarded, though it was cut off"),
    ],
)
def test_a_planted_hack_ranks_first(planted: dict[str, Any], reason: str) -> None:
    graded = [dict(item, reward=0.5 * item["reward"] + 0.1 * (item["position"] + 1)) for item in HONEST]
    samples = [*(graded if "reward" in planted else HONEST), a_sample(7, 3, 0, **planted)]
    found = suspicions(samples)
    first = max(range(len(found)), key=lambda index: found[index].score)
    assert first == len(HONEST)
    assert reason in found[first].reasons


def test_one_response_to_all_prompts_is_named() -> None:
    samples = [*HONEST, a_sample(3, 0, 0, response="1 2 3 4 5 6"), a_sample(5, 0, 0, response="1 2 3 4 5 6")]
    found = suspicions(samples)
    assert "the same response is rewarded for 2 different answers" in found[-1].reasons
    assert found[-1].score == found[-2].score > max(item.score for item in found[:-2])


def test_rewards_of_a_sum_that_disagree_are_named() -> None:
    both = [dict(item, rewards={"format": item["reward"], "right": item["reward"]}) for item in HONEST]
    samples = [*both, a_sample(7, 1, 0, rewards={"format": 1.0, "right": 0.0})]
    assert suspicions(samples)[-1].reasons == ("format at its best, right at its worst",)
    assert not any(item.reasons for item in suspicions(both))


def test_without_reward_nothing_is_suspicious() -> None:
    samples = [*HONEST, a_sample(7, 1, 1, response=HACK), a_sample(7, 1, 2, response=HACK, reward=None)]
    assert [item.score for item in suspicions(samples)] == [0.0] * len(samples)
    assert suspicions([a_sample(1, 0, 0, reward=None)]) == [(0.0, ())]
    assert suspicions([]) == []


def test_an_answer_in_another_form_than_responses_says_nothing() -> None:
    samples = [dict(item, answer={"tests": [1, 2]}) for item in HONEST]
    assert not any("reference answer" in reason for item in suspicions(samples) for reason in item.reasons)
