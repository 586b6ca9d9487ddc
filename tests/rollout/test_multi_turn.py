"""A user who asks for another try, and users of one's own."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from test_client import client
from test_tools import Script

from lightrl.builtin.model import builtin_tokenizer
from lightrl.config import WorkflowConfig
from lightrl.records import Prompt, Sample
from lightrl.rewards.reward_set import RewardSet
from lightrl.rollout.episode import Episode
from lightrl.rollout.multi_turn import MultiTurnWorkflow
from lightrl.rollout.siblings import Siblings
from lightrl.rollout.workflow import load_workflow

HERE = f"{__name__}:"
PROMPT = Prompt(index=0, text="6x7=", token_ids=tuple(map(ord, "6x7=")), answer="42")


class Characters:
    """Characters as tokens, without a chat template."""

    chat_template = ""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}

    def decode(self, ids: Any, skip_special_tokens: bool) -> str:
        return "".join(chr(token) for token in ids if token != 1)


def is_answer(sample: Sample) -> float:
    return float(sample.text == sample.prompt.answer)


def ends_well(sample: Sample) -> float:
    return float(sample.text.endswith("42"))


class Teacher:
    """Says a word for each answer, and ends when there are none left."""

    def __init__(self, *, words: str) -> None:
        self._words = words.split()

    async def __call__(self, answer: str, data: Prompt) -> str | None:
        assert data is PROMPT
        return f"({answer}? {self._words.pop(0)})" if self._words else None


def play(*turns: str, reward: Any = is_answer, limits: dict[str, int] | None = None, **settings: Any) -> Episode:
    engine = client(Script(*turns), **{"max_tokens": 1000, "max_new_tokens": 10, **(limits or {})})  # type: ignore[arg-type]
    engine.tokenizer = Characters()
    engine._prompt, engine._siblings = PROMPT, Siblings(1, RewardSet.of(reward))
    return asyncio.run(MultiTurnWorkflow(**settings).arun_episode(engine, PROMPT))


def text_of(episode: Episode) -> str:
    return "".join("|" if token == 1 else chr(token) for token in episode.response_ids)


def test_a_wrong_answer_is_tried_again() -> None:
    episode = play("41", "42", feedback=" No. ", discount=0.5)
    assert text_of(episode) == "41| No. 42|"
    assert [own for own in episode._own if not own] == [False] * 5
    assert episode.reward == 0.5  # right at the second try
    assert play("42", discount=0.5).reward == 1.0
    assert play("41", "41", "41", "41").reward == 0.0
    assert play("41", "41", "41", "41").finish_reason == "turns"
    assert play("41", limits={"max_turns": 1}).finish_reason == "turns"


def test_feedback_without_tokens_is_refused_before_the_run() -> None:
    """Every episode failed at its first wrong answer, with a traceback."""
    MultiTurnWorkflow(feedback="1+2=").check(builtin_tokenizer())
    MultiTurnWorkflow(user=f"{HERE}Teacher", words="No").check(builtin_tokenizer())  # whose replies are not known
    refused = "--rollout.workflow_args feedback: the tokenizer cannot read the text .That is not right"
    with pytest.raises(ValueError, match=refused):
        MultiTurnWorkflow().check(builtin_tokenizer())


@pytest.mark.parametrize(("feedback", "read"), [("No", False), ("5", 5)])
def test_feedback_that_is_no_text_is_refused(feedback: str, read: object) -> None:
    config = WorkflowConfig(workflow="multi_turn", workflow_args=(f"feedback={feedback}",))
    with pytest.raises(ValueError, match=f"feedback is {read}, and it must be a text; quotes keep it one"):
        load_workflow(config)


def test_the_context_ends_the_tries() -> None:
    episode = play("41", "41", feedback=" No. ", limits={"max_tokens": 12})
    assert text_of(episode) == "41|"
    assert episode.finish_reason == "context"


def test_a_user_of_ones_own_ends_the_conversation() -> None:
    episode = play("a", "b", "42", user=HERE + "Teacher", words="why sure", reward=ends_well)
    assert text_of(episode) == "a|(a? why)b|(b? sure)42|"
    assert episode.reward == 1.0


class FixedReply:
    """Gives the reply that it is made with."""

    def __init__(self, *, reply: Any) -> None:
        self._reply = reply

    def __call__(self, answer: str, data: Prompt) -> Any:
        return self._reply


@pytest.mark.parametrize("reply", [("again", 1.0), 3, False, {"score": 1.0}, [], [{}], {"content": None}])
def test_a_reply_that_is_no_text_is_refused(reply: Any) -> None:
    with pytest.raises(ValueError, match=f"The user replied {re.escape(repr(reply))}. A reply must be"):
        play("a", "b", user=HERE + "FixedReply", reply=reply, reward=ends_well)


@pytest.mark.parametrize(
    "reply",
    [
        {"role": "user", "content": " so "},
        [{"role": "user", "content": " so "}],
        {"role": "user", "content": [{"type": "text", "text": " so "}]},
    ],
)
def test_a_reply_may_be_messages(reply: Any) -> None:
    limits = {"max_turns": 2}
    assert text_of(play("a", "b", user=HERE + "FixedReply", reply=reply, reward=ends_well, limits=limits)) == "a| so b|"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"discount": 0}, "discount is 0: it must be above 0"),
        ({"words": "a"}, "words: arguments of a user, and there is no user"),
        ({"user": HERE + "HERE"}, "cannot be called: it takes .answer, data."),
        ({"user": HERE + "Teacher", "wordz": "a"}, "the user '.*Teacher' cannot be built"),
        ({"user": HERE + "text_of", "words": "a"}, "words: the user '.*text_of' takes no arguments, as it is no class"),
    ],
)
def test_settings_that_make_no_user_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        MultiTurnWorkflow(**settings)
