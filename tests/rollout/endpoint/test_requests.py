"""Settings of requests, and which of them the run decides on. test_server.py has the bodies that are refused."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightrl.rollout.endpoint.conversations import Call
from lightrl.rollout.endpoint.requests import (
    chat_answer,
    chat_wish,
    ignored_settings,
    token_wish,
    unknown_fields,
    unknown_settings,
)
from lightrl.rollout.endpoint.session import Reply
from lightrl.rollout.episode import Turn

MESSAGES = [{"role": "user", "content": "a"}]


def test_settings_that_change_the_distribution_are_named() -> None:
    assert ignored_settings({"temperature": 1.0, "top_p": 1, "presence_penalty": 0}, 1.0) == []
    assert ignored_settings({"temperature": 0, "top_p": 0.9}, 1.0) == ["top_p=0.9", "temperature=0"]
    assert ignored_settings({"sampling_params": {"top_k": 5}}, 1.0) == ["top_k=5"]
    assert ignored_settings({"top_k": 0, "min_p": 0.0}, 1.0) == []
    assert ignored_settings({"top_k": -1, "logit_bias": {}, "presence_penalty": -1}, 1.0) == ["presence_penalty=-1"]


def test_fields_that_ask_for_another_answer_in_vain_are_named() -> None:
    heeded = {"model": "policy", "messages": MESSAGES, "top_p": 1, "user": "me", "n": 1, "parallel_tool_calls": True}
    assert chat_wish({**heeded, "continue_final_message": False})
    assert unknown_fields({**heeded, "continue_final_message": False}) == []
    assert unknown_fields({**heeded, "seed": None}) == []
    body = {**heeded, "seed": 1, "chat_template_kwargs": {"enable_thinking": False}}
    assert unknown_fields(body) == ["chat_template_kwargs", "seed"]


def test_sampling_parameters_of_a_token_request_that_are_ignored_are_named() -> None:
    heeded = {"max_tokens": 5, "temperature": 1.0, "stop": ["x"], "stop_token_ids": [3], "n": 2, "logprobs": 1}
    neutral = {"min_tokens": 0, "ignore_eos": False, "seed": None, "bad_words": [], "skip_special_tokens": True}
    assert unknown_settings({"token_ids": [5], "sampling_params": {**heeded, **neutral}}) == []
    assert unknown_settings({"token_ids": [5], "sampling_params": None}) == []
    asked = {"sampling_params": {"min_tokens": 5, "ignore_eos": True, "seed": 1}}
    assert unknown_settings(asked) == ["ignore_eos", "min_tokens", "seed"]


def test_the_newer_name_of_the_limit_wins_and_none_means_left_out() -> None:
    *_, wish = chat_wish({"messages": MESSAGES, "max_tokens": 5, "max_completion_tokens": 3, "stop": "x", "n": None})
    assert (wish.max_new_tokens, wish.stop, wish.num_choices) == (3, ("x",), 1)
    nulls = dict.fromkeys(
        ("stream", "stream_options", "logprobs", "top_logprobs", "tools", "tool_choice", "temperature")
    )
    for given in ({**nulls, "stop": None}, {"stop": "", "logprobs": 1, "stream": 0, "stream_options": {}, "tools": []}):
        *_, wish = chat_wish({"messages": MESSAGES, **given})
        assert (wish.stop, wish.temperature) == ((), None)
    ids, wish = token_wish({"token_ids": [1], "sampling_params": {"stop_token_ids": [2], "max_tokens": 4}})
    assert (ids, wish.stop_token_ids, wish.max_new_tokens) == ([1], (2,), 4)


def test_tools_that_may_not_be_chosen_are_not_described() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert chat_wish({"messages": MESSAGES, "tools": tools, "tool_choice": "none"})[1] == []
    assert chat_wish({"messages": MESSAGES, "tools": tools})[1] == tools


def test_a_token_that_is_a_part_of_a_character_has_no_bytes() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=inner)
    ids = tuple(tokenizer("a\u00e9")["input_ids"])
    assert len(ids) == 3
    turn = Turn(token_ids=ids, logprobs=(-1.0,) * 3, versions=(0,) * 3, finish_reason="stop", text="a\u00e9")
    reply = Reply(call=Call((1,), turn), message={}, finish_reason="stop")
    answer = chat_answer([reply], {"logprobs": True}, "policy", tokenizer)
    assert [token["bytes"] for token in answer["choices"][0]["logprobs"]["content"]] == [[97], None, None]
