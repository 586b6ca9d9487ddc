from __future__ import annotations

import pytest
from reward_samples import answered

from lightrl.rewards import load_reward
from lightrl.rewards.response_format import ResponseFormat


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("\n<think>\na\n\nb</think>\n<answer>\n42</answer> ", 1.0),
        ("<think></think><answer></answer>", 1.0),
        ("<think>a</think> so <answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer> and more", 0.0),
        ("<think>a<think>b</think><answer>c</answer>", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think>", 0.0),
        ("", 0.0),
    ],
)
def test_think_and_answer_once_each_and_nothing_else(text: str, reward: float) -> None:
    assert ResponseFormat()(answered(text, prompt_text="<think>a</think><answer>b</answer>")) == reward


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("a</think><answer>b</answer>", 1.0),
        ("<think>a</think><answer>b</answer>", 1.0),
        ("a</think></think><answer>b</answer>", 0.0),
        ("<answer>b</answer>", 0.0),
    ],
)
def test_a_block_that_the_prompt_has_opened_is_the_responses(text: str, reward: float) -> None:
    """As the chat templates of DeepSeek-R1 and Qwen3.5 do."""
    opened = answered(text, prompt_text="<|User|>1+1<|Assistant|><think>\n")
    assert ResponseFormat()(opened) == reward
    assert ResponseFormat(pattern="[^<]*</think>.*")(opened) == float("</think>" in text and text[0] == "a")


def test_a_pattern_of_ones_own() -> None:
    reward = load_reward("format", {"pattern": r"[0-9]+: .*"})
    assert [reward(answered(text)) for text in ("12: a\nb", " 12: c", "a12: b")] == [1.0, 1.0, 0.0]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"format.pattern '\(' is no regular expression: missing \)"):
        load_reward("format", {"pattern": "("})
