"""Settings of requests, and which of them the run decides on. test_server.py has the bodies that are refused."""

from __future__ import annotations

from lightrl.rollout.endpoint.requests import chat_wish, ignored_settings, token_wish

MESSAGES = [{"role": "user", "content": "a"}]


def test_settings_that_change_the_distribution_are_named() -> None:
    assert ignored_settings({"temperature": 1.0, "top_p": 1, "presence_penalty": 0}, 1.0) == []
    assert ignored_settings({"temperature": 0, "top_p": 0.9}, 1.0) == ["top_p=0.9", "temperature=0"]
    assert ignored_settings({"sampling_params": {"top_k": 5}}, 1.0) == ["top_k=5"]


def test_the_newer_name_of_the_limit_wins_and_none_means_left_out() -> None:
    *_, wish = chat_wish({"messages": MESSAGES, "max_tokens": 5, "max_completion_tokens": 3, "stop": "x", "n": None})
    assert (wish.max_new_tokens, wish.stop, wish.num_choices) == (3, ("x",), 1)
    ids, wish = token_wish({"token_ids": [1], "sampling_params": {"stop_token_ids": [2], "max_tokens": 4}})
    assert (ids, wish.stop_token_ids, wish.max_new_tokens) == ([1], (2,), 4)


def test_tools_that_may_not_be_chosen_are_not_described() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert chat_wish({"messages": MESSAGES, "tools": tools, "tool_choice": "none"})[1] == []
    assert chat_wish({"messages": MESSAGES, "tools": tools})[1] == tools
