"""The answers that rewards read from responses."""

from __future__ import annotations

import importlib.util
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from reward_samples import answered

from lightrl.config import EvalConfig, GRPOConfig, LateMistakeError
from lightrl.config.rollout_sections import _ANSWERING
from lightrl.imports import load_object
from lightrl.rewards import load_reward
from lightrl.rewards.answers import reader_of
from lightrl.rewards.reasoning_gym import ReasoningGym
from lightrl.rewards.reward_set import BUILTIN_REWARDS, RewardSet


def read(reward: Any, *texts: str) -> list[Any]:
    return reader_of(RewardSet.of(reward))([answered(text) for text in texts])


def test_built_in_rewards_read_answers() -> None:
    assert read(load_reward("exact_match"), " 12\n", "", "1 2") == ["12", None, "1 2"]
    assert read(load_reward("last_number"), "2 or 1,234.50", "none", "1234.5") == [
        Decimal("1234.5"),
        None,
        Decimal("1234.5"),
    ]
    kinds = {name: load_object(path, builtin={}, what="reward", example="") for name, path in BUILTIN_REWARDS.items()}
    assert {name for name, kind in kinds.items() if hasattr(kind, "answer_of")} == {*_ANSWERING}


def test_reasoning_gym_reads_what_its_tag_holds() -> None:
    reward = ReasoningGym.__new__(ReasoningGym)  # without the library
    reward._tagged = None
    assert reward.answer_of(answered(" a b ")) == "a b"
    assert reward.answer_of(answered(" ")) is None


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="the math extra is not installed")
def test_equal_expressions_are_one_answer() -> None:
    half, other = [r"\boxed{\frac{2}{4}}", "it is 0.5", "$1/2$"], ["2", r"<answer>2.0</answer>"]
    texts = [*half, *other, r"\boxed{1+x}", r"\boxed{x+1}", "who knows"]
    reward: Any = load_reward("math")
    found = [reward.answer_of(answered(text)) for text in texts]
    assert len(set(found[:3])) == len(set(found[3:5])) == len(set(found[5:7])) == 1
    assert len({found[0], found[3], found[5]}) == 3
    assert found[7] is None


REWARD = """
from lightrl.rewards import NoVerdictError, isolated_reward

@isolated_reward()
def mine(sample):
    return 0.0

def first_word(sample):
    if sample.text == "who knows":
        raise NoVerdictError("who knows")
    if sample.text == "error":
        raise KeyError("not this")
    return sample.text.split()[0] if sample.text else None

mine.answer_of = first_word

def plain(sample, *, power=1.0):
    return 0.0

plain.answer_of = first_word
"""


def test_a_reward_of_your_own_reads_them_where_it_runs(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(REWARD)
    assert read(load_reward(f"{tmp_path / 'own.py'}:mine"), "a b", "", "who knows", "a") == ["a", None, None, "a"]
    reward = load_reward(f"{tmp_path / 'own.py'}:plain", {"power": 2.0})
    assert isinstance(reward, partial)
    assert read(reward, "a b", "", "who knows") == ["a", None, None]
    with pytest.raises(KeyError, match="not this"):
        read(reward, "a b", "error")


def test_without_answers_there_is_no_vote() -> None:
    with pytest.raises(LateMistakeError, match="and ResponseLength has no answer_of"):
        reader_of(RewardSet.of(load_reward("length", {"target": 4})))
    options = {"n": 4, "majority": True}
    with pytest.raises(ValueError, match="--eval.majority needs several samples"):
        GRPOConfig(eval=EvalConfig(majority=True))
    with pytest.raises(ValueError, match="and length, contains does not: use one of exact_match"):
        GRPOConfig(eval=EvalConfig(**options), reward=("length=0.5", "contains"))
    GRPOConfig(eval=EvalConfig(**options), reward=("length=0.5", "math=1"))
    GRPOConfig(eval=EvalConfig(**options), reward=("mine.py:reward",))
    with pytest.raises(ValueError, match="eval/maj@4 is not evaluated: give --eval.majority True"):
        GRPOConfig(eval=EvalConfig(n=4, best="eval/maj@4"))
    with pytest.raises(ValueError, match="eval/maj@8 is not evaluated: give --eval.majority_k 8"):
        GRPOConfig(eval=EvalConfig(**options, best="eval/maj@8"))


async def in_time(sample: Any) -> str:
    return "5"


@pytest.mark.filterwarnings("ignore:coroutine")
@pytest.mark.parametrize("read_answer", [in_time, lambda sample: ["5"], lambda sample: ("5", [])])
def test_what_cannot_be_compared_is_no_answer(read_answer: Any) -> None:
    """Coroutines would all be different answers; a list would stop the rank that counts it, and no other."""

    def reward(sample: Any) -> float:
        return 0.0

    reward.answer_of = read_answer  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"^answer_of\(sample\) returned .* can be hashed"):
        read(reward, "5")
