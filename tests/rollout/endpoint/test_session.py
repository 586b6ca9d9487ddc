"""Random agents on a scripted engine: the tokens that are trained are the engine's, in the context that it saw."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from endpoint_scripts import (
    TOKENIZER,
    TOOLS,
    ScriptedDriver,
    ambiguous_tokenizer,
    client_of,
    converse,
    session_callers,
    task_of,
)
from tokenizers import AddedToken

from lightrl.builtin.model import builtin_tokenizer
from lightrl.data.prompts import build_prompts
from lightrl.records import FinishReason, Prompt
from lightrl.rollout.endpoint.errors import RequestError
from lightrl.rollout.endpoint.session import Session, Wish
from lightrl.rollout.tool_parsers import PARSERS


def test_trained_tokens_are_the_engines_in_random_conversations() -> None:
    async def run() -> list[tuple[int, int, list[object]]]:
        return await asyncio.gather(*(converse(seed, TOKENIZER) for seed in range(40)))

    found = asyncio.run(run())
    assert [wrong for _, _, wrong in found if wrong] == []
    assert sum(calls for calls, _, _ in found) > 240
    assert 40 < sum(samples for _, samples, _ in found) < sum(calls for calls, _, _ in found)


def session(**limits: int) -> tuple[Session, ScriptedDriver]:
    driver = ScriptedDriver(TOKENIZER)
    return Session(
        client_of(driver, TOKENIZER, **limits), asyncio.get_running_loop(), task_of(TOKENIZER), wait_s=0
    ), driver


def test_the_first_call_with_the_runs_messages_has_the_runs_tokens_and_draws() -> None:
    async def run() -> None:
        made, driver = session()
        chat, _ = session_callers(made, TOKENIZER)
        await chat({"messages": [{"role": "user", "content": "ab c?"}]})
        await made.engine.generate(task_of(TOKENIZER).token_ids, call=0)
        assert driver.log[0] == driver.log[1]

    asyncio.run(run())


class PromptLoop(asyncio.SelectorEventLoop):
    """Has done what another thread hands to it, and more, before that thread goes on."""

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> asyncio.Handle:
        handle = super().call_soon_threadsafe(callback, *args, context=context)
        done = threading.Event()
        super().call_soon_threadsafe(self.call_later, 0.02, done.set)
        if threading.current_thread() is threading.main_thread():
            done.wait(10)
        return handle


class CountingDriver(ScriptedDriver):
    """Notes how many turns it has been asked for when it could make its next step."""

    async def generate(self, prompt: Any, params: Any) -> Any:
        self.others.append(params)
        await asyncio.sleep(0)
        self.log.append(len(self.others))
        return await super().generate(prompt, params)


def test_the_engine_sees_all_choices_of_a_request_before_its_next_step() -> None:
    loop = PromptLoop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    driver = CountingDriver(TOKENIZER)

    async def run() -> None:
        made = Session(client_of(driver, TOKENIZER), loop, task_of(TOKENIZER), wait_s=0)
        chat, _ = session_callers(made, TOKENIZER)
        await chat({"messages": [{"role": "user", "content": "ab c?"}], "n": 3})

    asyncio.run(run())
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()
    assert [item for item in driver.log if isinstance(item, int)] == [3, 3, 3]


def test_a_request_without_tools_is_told_of_none_even_if_the_record_has_them() -> None:
    async def run() -> None:
        made, driver = session()
        (told,) = build_prompts([({"prompt": "ab c?", "tools": TOOLS}, "a:1")], TOKENIZER, max_prompt_tokens=999)
        made.task = told
        chat, _ = session_callers(made, TOKENIZER)
        for body in ({"messages": list(told.messages)}, {"messages": list(told.messages), "tools": TOOLS}):
            await chat(body)
        assert [prompt for prompt, *_ in driver.log] == [task_of(TOKENIZER).token_ids, told.token_ids]

    asyncio.run(run())


def test_draws_do_not_depend_on_the_order_of_arrival() -> None:
    bodies = [{"messages": [{"role": "user", "content": text}], "return_token_ids": True} for text in ("a", "b", "a")]

    async def run(order: list[int]) -> list[str]:
        chat, _ = session_callers(session()[0], TOKENIZER)
        return sorted([repr((await chat(bodies[index]))["choices"][0]["token_ids"]) for index in order])

    assert asyncio.run(run([0, 1, 2])) == asyncio.run(run([1, 2, 0]))


def test_a_tool_call_and_its_answer_go_on_from_the_engines_tokens() -> None:
    async def run() -> None:
        made, _ = session()
        chat, _ = session_callers(made, TOKENIZER)
        messages: list[dict[str, object]] = [{"role": "user", "content": "a"}]
        for text in map(str, range(100)):
            messages = [{"role": "user", "content": text}]
            answer = await chat({"messages": messages, "tools": TOOLS})
            if "tool_calls" in answer["choices"][0]["message"]:
                break
        message = answer["choices"][0]["message"]
        assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
        first = made.conversations.calls[-1]
        tool = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "7"}
        await chat({"messages": [*messages, message, tool], "tools": TOOLS})
        second = made.conversations.calls[-1]
        assert second.parent is first
        assert second.prompt_ids[: len(first.ids)] == first.ids
        heard = TOKENIZER.decode(second.prompt_ids[len(first.ids) :])
        ending = "" if first.turn.finish_reason == "stop" else "<|im_end|>"
        assert heard == f"{ending}\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"
        # without the tools the same messages are another prompt
        await chat({"messages": [*messages, message, tool]})
        assert made.conversations.calls[-1].parent is None

    asyncio.run(run())


def test_a_turn_with_a_call_that_was_cut_off_ends_by_its_length() -> None:
    async def run() -> set[tuple[str, str]]:
        made, _ = session()
        chat, _ = session_callers(made, TOKENIZER)
        found = set()
        for text in map(str, range(200)):
            (choice,) = (await chat({"messages": [{"role": "user", "content": text}], "tools": TOOLS}))["choices"]
            if "tool_calls" in choice["message"]:
                found.add((made.conversations.calls[-1].turn.finish_reason, choice["finish_reason"]))
        return found

    assert asyncio.run(run()) == {("stop", "tool_calls"), ("length", "length")}


def test_calls_that_special_tokens_mark_are_found() -> None:
    tokenizer = ambiguous_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in ("[TOOL_CALLS]", "[ARGS]")], special_tokens=True)

    async def run() -> None:
        driver = ScriptedDriver(tokenizer)
        driver._call = tokenizer('[TOOL_CALLS]add[ARGS]{"a": 1}')["input_ids"]
        settings = {"wait_s": 0, "parser": PARSERS["mistral"]}
        made = Session(client_of(driver, tokenizer), asyncio.get_running_loop(), task_of(tokenizer), **settings)
        for speaker in (made, made.for_visitor()):
            chat, _ = session_callers(speaker, tokenizer)
            for tools in (TOOLS, []):
                found = []
                for text in map(str, range(40)):
                    answer = await chat({"messages": [{"role": "user", "content": text}], "tools": tools})
                    (choice,) = answer["choices"]
                    assert not set("[]<") & set(choice["message"]["content"] or "")
                    found += choice["message"].get("tool_calls", [])
                assert bool(found) is bool(tools)
                assert all(call["function"] == {"name": "add", "arguments": '{"a": 1}'} for call in found)

    asyncio.run(run())


@pytest.mark.parametrize(("given", "count"), [({}, 2), ({"parallel_tool_calls": False}, 1)])
def test_a_request_may_ask_for_one_tool_call_at_a_time(given: dict[str, bool], count: int) -> None:
    async def run() -> None:
        made, driver = session()
        driver._call = (*driver._call, *driver._call)
        made.engine.limits = replace(made.engine.limits, max_new_tokens=200)
        chat, _ = session_callers(made, TOKENIZER)
        found: list[dict[str, Any]] = []
        for number in range(100):
            asked = [{"role": "user", "content": str(number)}]
            message = (await chat({"messages": asked, "tools": TOOLS, **given}))["choices"][0]["message"]
            if found := message.get("tool_calls", []):
                break
        assert len(found) == count
        first = made.conversations.calls[-1]
        answers = [{"role": "tool", "tool_call_id": call["id"], "content": "7"} for call in found]
        await chat({"messages": [*asked, message, *answers], "tools": TOOLS, **given})
        assert made.conversations.calls[-1].parent is first

    asyncio.run(run())


@pytest.mark.parametrize("text", ["\u00e9", "1\x00", "\ud800"])
def test_a_text_without_tokens_is_refused_by_name(text: str) -> None:
    async def run() -> None:
        tokenizer = builtin_tokenizer()
        client, task = client_of(ScriptedDriver(TOKENIZER), tokenizer), Prompt(index=0, text="1", token_ids=(3,))
        made = Session(client, asyncio.get_running_loop(), task, wait_s=0)
        with pytest.raises(RequestError, match="the tokenizer cannot read the text") as error:
            await made.chat([{"role": "user", "content": text}], (), Wish())
        assert (error.value.status, error.value.param) == (400, "messages")

    asyncio.run(run())


def test_limits_are_errors_that_say_so() -> None:
    async def run() -> None:
        chat, complete = session_callers(session(max_tokens=20)[0], TOKENIZER)
        with pytest.raises(RequestError, match="maximum context length is 20 tokens. However, your messages") as error:
            await chat({"messages": [{"role": "user", "content": "abc" * 30}]})
        assert error.value.code == "context_length_exceeded"
        made, _ = session(max_turns=1)
        chat, complete = session_callers(made, TOKENIZER)
        await chat({"messages": [{"role": "user", "content": "a"}]})
        with pytest.raises(RequestError, match=r"has had 1 turns, and --rollout.max_turns allows 1"):
            await complete({"token_ids": [*made.conversations.calls[0].ids, 3]})
        made.close()
        with pytest.raises(RequestError, match="has ended"):
            await chat({"messages": [{"role": "user", "content": "a"}]})

    asyncio.run(run())


def test_a_conversation_that_reaches_a_limit_has_its_finish_reason() -> None:
    async def run(more: str, first: FinishReason = "stop", **limits: int) -> list[str]:
        made, _ = session(**limits)
        chat, _ = session_callers(made, TOKENIZER)
        asked: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
        message = (await chat({"messages": asked}))["choices"][0]["message"]
        made.conversations.calls[0].turn = replace(made.conversations.calls[0].turn, finish_reason=first)
        with pytest.raises(RequestError):
            await chat({"messages": [*asked, message, {"role": "user", "content": more}]})
        before = [episode.finish_reason for episode in made.episodes()]
        if "max_tokens" in limits:  # what is shorter goes on from the same answer
            await chat({"messages": [*asked, message, {"role": "user", "content": "a"}], "max_tokens": 1})
        return [*before, *(episode.finish_reason for episode in made.episodes())]

    assert asyncio.run(run("a", max_turns=1)) == ["turns", "turns"]
    assert asyncio.run(run("a", "length", max_turns=1)) == ["length", "length"]  # its last turn was cut off
    assert asyncio.run(run("+" * 300, max_tokens=200)) == ["context", "length"]


def test_a_request_waits_for_a_sleeping_engine_and_is_told_to_come_again() -> None:
    async def run() -> None:
        driver, other = ScriptedDriver(TOKENIZER), asyncio.new_event_loop()
        made = Session(client_of(driver, TOKENIZER), other, task_of(TOKENIZER), wait_s=0.05)
        chat, _ = session_callers(made, TOKENIZER)
        with pytest.raises(RequestError, match="asleep while the policy trains") as error:
            await chat({"messages": [{"role": "user", "content": "a"}]})
        assert (error.value.status, error.value.headers) == (503, {"Retry-After": "5"})
        other.close()
        driver.is_over = True  # those of another step may run on the same loop
        made = Session(client_of(driver, TOKENIZER), asyncio.get_running_loop(), None, wait_s=600)
        assert not made.is_awake
        with pytest.raises(RequestError, match="asleep while the policy trains"):
            await made.chat([{"role": "user", "content": "a"}], [], Wish())

    asyncio.run(run())


def test_a_visitor_is_answered_and_leaves_no_trace() -> None:
    async def run() -> None:
        made, driver = session()
        visitor = made.for_visitor()
        chat, _ = session_callers(visitor, TOKENIZER)
        await chat({"messages": [{"role": "user", "content": "a"}], "temperature": 0})
        assert len(driver.log) == 1
        assert visitor.episodes() == made.episodes() == []

    asyncio.run(run())


@pytest.mark.parametrize("who", [{}, {"adapter": "opponent"}])
def test_tool_calls_outside_the_policys_conversation_have_ids_of_their_own(who: dict[str, str]) -> None:
    async def run() -> None:
        made, driver = session()
        driver.adapters = ("policy", "opponent")
        ids = []
        for text in map(str, range(60)):
            speaker = made if who else made.for_visitor()
            messages = [{"role": "user", "content": text}]
            for reply in await speaker.chat(messages, TOOLS, Wish(**who)):
                ids += [call["id"] for call in reply.message.get("tool_calls", ())]
        assert len(ids) > 2
        assert len(set(ids)) == len(ids)
        assert all(len(one) == 9 and one.isalnum() for one in ids)  # as Mistral's templates demand

    asyncio.run(run())


def test_the_ids_of_tool_calls_do_not_depend_on_the_order_of_the_requests() -> None:
    """A template that renders ids would otherwise give an agent with parallel requests other tokens in each run."""

    async def run(texts: list[str]) -> dict[str, list[str]]:
        chat, _ = session_callers(session()[0], TOKENIZER)
        ids: dict[str, list[str]] = {}
        for text in texts:
            answer = await chat({"messages": [{"role": "user", "content": text}], "tools": TOOLS, "n": 2})
            calls = [call for choice in answer["choices"] for call in choice["message"].get("tool_calls", ())]
            ids[text] = [call["id"] for call in calls]
        return ids

    texts = list(map(str, range(30)))
    found = asyncio.run(run(texts))
    assert found == asyncio.run(run(texts[::-1]))
    together = [one for each in found.values() for one in each]
    assert len(set(together)) == len(together) > 2
