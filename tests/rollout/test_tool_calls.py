"""Tools that do what they must not: the policy gets an answer in time, and a person one traceback."""

from __future__ import annotations

import asyncio
import base64
import logging
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_vlm import checkered

from lightrl.data.held_images import image_content
from lightrl.data.media import read_image
from lightrl.rollout.tool_calls import CallError, Tool, ToolBox, in_daemon_thread, load_tool
from lightrl.rollout.written_calls import ToolCall


def box(timeout_s: float = 0.2, **functions: Any) -> ToolBox:
    tools = [Tool(name=name, schema={}, function=function) for name, function in functions.items()]
    return ToolBox(tools, timeout_s=timeout_s, max_result_chars=50)


def answers(tools: ToolBox, *names: str) -> list[tuple[str, bool]]:
    async def ask() -> list[Any]:
        return await asyncio.gather(*[tools.answer(ToolCall(name, {})) for name in names])

    return [(answer.text, answer.is_error) for answer in asyncio.run(ask())]


def raises() -> str:
    raise RuntimeError("the tool is on fire" * 10)


def test_a_tool_that_hangs_holds_up_neither_the_others_nor_the_loop() -> None:
    def hangs() -> None:
        time.sleep(3_600)

    tools = box(hangs=hangs, fine=lambda: "fine")
    # Far more than the threads of a pool; asyncio.run() would wait for those of its own pool at the end.
    found = answers(tools, *["hangs"] * 40, "fine")
    assert found == [("error: no result after 0.2 s", True)] * 40 + [("fine", False)]


def test_calls_of_a_tool_that_wait_for_each_other_keep_their_time() -> None:
    running, most = [0], [0]

    async def slow() -> str:
        running[0] += 1
        most[0] = max(most[0], running[0])
        await asyncio.sleep(0.12)
        running[0] -= 1
        return "slow"

    one_by_one = Tool(name="slow", schema={}, function=slow, max_concurrency=1)
    tools = ToolBox([one_by_one], timeout_s=0.2, max_result_chars=50)
    for _ in range(2):  # in two event loops
        assert answers(tools, *["slow"] * 4) == [("slow", False)] * 4
    assert most == [1]


def limited() -> str:
    """Says a word."""
    return "word"


@pytest.mark.parametrize("limit", [0, -1, "8", 1.5, True])
def test_a_number_of_calls_that_would_wait_for_ever_is_refused(monkeypatch: pytest.MonkeyPatch, limit: Any) -> None:
    monkeypatch.setattr(limited, "max_concurrency", limit, raising=False)
    with pytest.raises(ValueError, match=f"max_concurrency {limit!r}: it must be a whole number from 1 on"):
        load_tool(f"{__name__}:limited")


def yielding() -> Iterator[str]:
    """Says a word."""
    yield "word"


async def yielding_later() -> AsyncIterator[str]:
    """Says a word."""
    yield "word"


@pytest.mark.parametrize("name", ["yielding", "yielding_later"])
def test_a_tool_that_yields_is_refused(name: str) -> None:
    """The text of a generator holds an address, which differs from run to run."""
    with pytest.raises(ValueError, match=f"The tool '.*:{name}' yields, so that a call has no result. Return one"):
        load_tool(f"{__name__}:{name}")


@pytest.mark.parametrize("limit", [None, 1, 8])
def test_a_tool_may_limit_its_calls(monkeypatch: pytest.MonkeyPatch, limit: int | None) -> None:
    monkeypatch.setattr(limited, "max_concurrency", limit, raising=False)
    assert load_tool(f"{__name__}:limited").max_concurrency == limit


def test_the_time_in_which_the_loop_stands_still_does_not_count() -> None:
    async def answered_meanwhile() -> str:
        await asyncio.sleep(0.05)
        for _ in range(20):  # as a client that reads an answer from its socket
            await asyncio.sleep(0)
        return "answered"

    loop = asyncio.new_event_loop()
    tools = box(search=answered_meanwhile)
    asked = loop.create_task(tools.answer(ToolCall("search", {})))
    loop.run_until_complete(asyncio.sleep(0.01))
    time.sleep(0.5)  # a model trains
    assert loop.run_until_complete(asked).text == "answered"
    loop.close()


def test_arguments_that_are_texts_get_the_types_of_the_tool() -> None:
    def repeat(count: int, word: str) -> str:
        return f"{word!r} {count + 1}"

    properties = {"count": {"type": "integer"}, "word": {"type": "string"}}
    schema = {"type": "function", "function": {"name": "repeat", "parameters": {"properties": properties}}}
    tools = ToolBox([Tool(name="repeat", schema=schema, function=repeat)], timeout_s=5, max_result_chars=50)
    call = ToolCall("repeat", {"count": "2", "word": "3"}, has_texts=True)
    assert asyncio.run(tools.answer(call)).text == "'3' 3"


def test_an_async_tool_behind_a_plain_decorator_is_awaited() -> None:
    async def late() -> str:
        await asyncio.sleep(0.01)
        return "late"

    async def broken() -> str:
        raise ValueError("no such city")

    tools = box(late=lambda: late(), broken=lambda: broken())
    assert answers(tools, "late", "broken") == [("late", False), ("error: ValueError: no such city", True)]


def test_a_tool_that_goes_on_after_its_cancellation_is_answered_for_in_time() -> None:
    allowed_to_end = asyncio.Event()

    async def stubborn() -> str:
        while not allowed_to_end.is_set():
            with suppress(asyncio.CancelledError):
                await allowed_to_end.wait()
        return "late"

    async def ask() -> str:
        return (await box(stubborn=stubborn).answer(ToolCall("stubborn", {}))).text

    loop = asyncio.new_event_loop()  # asyncio.run() would wait for the tool at its end
    assert loop.run_until_complete(ask()) == "error: no result after 0.2 s"
    allowed_to_end.set()
    loop.run_until_complete(asyncio.wait(asyncio.all_tasks(loop)))
    loop.close()


def test_an_error_that_a_future_refuses_or_that_looks_like_the_time_limit_is_read_at_once() -> None:
    def empty() -> int:
        return next(iter([]))

    def slow() -> None:
        raise TimeoutError("the database is slow")

    began = time.monotonic()
    assert answers(box(timeout_s=60, empty=empty, slow=slow), "empty", "slow") == [
        ("error: RuntimeError: StopIteration: ", True),
        ("error: TimeoutError: the database is slow", True),
    ]
    assert time.monotonic() - began < 30


def test_half_a_character_in_an_answer_reaches_neither_the_tokenizer_nor_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def echoes() -> str:
        return "\ud83d \U0001f600"

    def refuses() -> str:
        raise ValueError("\ud83d")

    assert answers(box(echoes=echoes, refuses=refuses), "echoes", "refuses") == [
        ("? \U0001f600", False),
        ("error: ValueError: ?", True),
    ]
    assert "ValueError: ?" in caplog.text
    assert caplog.text.encode()


def test_a_long_result_and_a_long_error_are_cut() -> None:
    tools = box(long=lambda: "x" * 1_000_000, raises=raises)
    assert answers(tools, "long") == [("x" * 50, False)]
    ((text, is_error),) = answers(tools, "raises")
    assert is_error
    assert text == "error: RuntimeError: the tool is on firethe tool i"


def test_the_first_traceback_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    tools = box(raises=raises, missing=lambda: None)
    with caplog.at_level(logging.WARNING):
        answers(tools, "raises", "raises", "nothing")
        answers(tools, "raises")
    assert len(caplog.records) == 1
    assert "The tool 'raises' has raised" in caplog.text
    assert "in raises" in caplog.text  # the traceback


def test_no_traceback_is_shown_of_an_error_about_the_call(caplog: pytest.LogCaptureFixture) -> None:
    def refuses() -> None:
        raise CallError("the number is missing")

    with caplog.at_level(logging.WARNING):
        assert answers(box(refuses=refuses), "refuses") == [("error: the number is missing", True)]
    assert not caplog.records


def test_a_tool_that_exits_is_answered_for() -> None:
    ((text, is_error),) = answers(box(leaves=lambda: sys.exit(3)), "leaves")
    assert (text, is_error) == ("error: RuntimeError: SystemExit: 3", True)

    async def leaves() -> None:
        sys.exit(3)

    assert answers(box(leaves=leaves), "leaves") == [("error: RuntimeError: it called exit(3)", True)]


def test_the_traceback_of_a_tool_that_exits_has_its_line(caplog: pytest.LogCaptureFixture) -> None:
    def leaves() -> None:
        sys.exit(3)

    answers(box(leaves=leaves), "leaves")
    assert f'{__file__}", line {leaves.__code__.co_firstlineno + 1}, in leaves' in caplog.text


def test_a_tool_whose_own_work_is_cancelled_is_answered_for() -> None:
    async def gives_up() -> None:
        raise asyncio.CancelledError

    found = answers(box(gives_up=gives_up, fine=lambda: "fine"), "gives_up", "fine")
    assert found == [("error: the call was cancelled", True), ("fine", False)]


def test_a_late_async_tool_is_cancelled() -> None:
    ended: list[str] = []

    async def late() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("late")

    async def ask() -> tuple[str, list[str]]:
        answer = await box(late=late).answer(ToolCall("late", {}))
        for _ in range(3):
            await asyncio.sleep(0)
        return answer.text, [*ended]  # before the end of the loop, which ends everything

    assert asyncio.run(ask()) == ("error: no result after 0.2 s", ["late"])


def test_a_call_may_be_cancelled_while_the_tool_runs() -> None:
    async def ask() -> str:
        task = asyncio.ensure_future(in_daemon_thread(lambda: time.sleep(0.02), {}))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0.1)
        return str(await in_daemon_thread(lambda: "after", {}))

    assert asyncio.run(ask()) == "after"


def test_a_plain_tool_sees_the_context_variables_of_its_episode() -> None:
    game: ContextVar[str] = ContextVar("game")
    tools = box(look=lambda: game.get())

    async def episode(name: str) -> str:
        game.set(name)
        await asyncio.sleep(0)  # the other episode sets its own
        return (await tools.answer(ToolCall("look", {}))).text

    async def both() -> list[str]:
        return await asyncio.gather(episode("chess"), episode("go"))

    assert asyncio.run(both()) == ["chess", "go"]


def test_records_of_files_are_data_and_parts_are_content(tmp_path: Path) -> None:
    """A search returns the first kind, often with an address, and what is shown holds its image or names it `image`."""
    picture, file = checkered(8, 6), str(tmp_path / "a.png")
    picture.save(file)
    content = image_content(picture)
    url = "data:image/png;base64," + base64.b64encode(content).decode()
    data: list[Any] = [
        [{"type": "image", "url": "https://a.org/a.png"}],
        [{"type": "text", "text": "cat"}, {"type": "image", "url": file}],
        [{"type": "image", "path": file}, {"type": "video", "path": "b.mp4"}],
        [{"type": "image", "image": file, "id": 3}],
        [{"type": "image", "image": {"path": file}, "id": 3}],
        [{"type": "video", "url": "https://a.org/a.mp4", "s": 9}],
        {"content": [{"type": "image", "url": "a.png"}]},
    ]
    shown: list[Any] = [
        [{"type": "image", "image": file}],
        [{"type": "image_url", "image_url": {"url": url, "detail": "low"}}],
        [{"type": "image", "url": url}],
        [{"type": "image", "image": picture, "title": "cat"}],
        [{"type": "image", "image": np.asarray(picture), "title": "cat"}],
        [{"type": "image", "image": {"bytes": base64.b64encode(content).decode()}, "title": "cat"}],
        [{"type": "image", "path": content}],
    ]
    results = [*data, *shown]
    made = [Tool(name=str(i), schema={}, function=lambda given=given: given) for i, given in enumerate(results)]
    tools = ToolBox(made, timeout_s=5.0, max_result_chars=500)

    async def ask() -> list[Any]:
        return await asyncio.gather(*[tools.answer(ToolCall(tool.name, {})) for tool in made])

    answers = asyncio.run(ask())
    for given, answer in zip(data, answers[: len(data)], strict=True):
        assert (answer.text, answer.parts, answer.is_error) == (str(given), (), False)
    for answer in answers[len(data) :]:
        assert not answer.is_error
        assert [read_image(part["image"]).tobytes() for part in answer.parts] == [picture.tobytes()]


def test_images_of_a_tool_are_parts_of_its_answer(tmp_path: Path) -> None:
    picture = checkered(8, 6)
    (tmp_path / "broken.png").write_bytes(b"broken")
    text = {"type": "text", "text": "x" * 30}
    results = {
        "alone": picture,
        "between": {"role": "tool", "content": [text, {"type": "image", "image": picture}, text]},
        "texts": [text, text],
        "broken": [{"type": "image", "image": str(tmp_path / "broken.png")}],
        "empty": [{"type": "image"}],
        "data": {"type": "image"},  # a value as any other, like the two below
        "lines": ["a", "b"],
        "records": [{"type": "text", "id": 3}],
        "list": ["x", picture],
    }
    tools = box(**{name: lambda result=result: result for name, result in results.items()})

    async def ask() -> list[Any]:
        return await asyncio.gather(*[tools.answer(ToolCall(name, {})) for name in results])

    alone, between, texts, broken, empty, data, lines, records, listed = asyncio.run(ask())
    shown = [{"type": "image", "image": image_content(picture)}]
    assert (alone.text, alone.parts) == ("", shown)
    cut = {"type": "text", "text": "x" * 20}  # 50 characters in all
    assert (between.text, between.parts) == ("x" * 50, [text, *shown, cut])
    assert (texts.text, texts.parts) == ("x" * 50, [])
    assert broken.is_error
    assert "error: MediaError: the image" in broken.text
    assert empty.is_error
    assert "a part of the type 'image'" in empty.text
    assert data.text == "{'type': 'image'}"
    assert lines.text == "['a', 'b']"
    assert records.text == "[{'type': 'text', 'id': 3}]"
    assert (listed.text, listed.parts) == ("x", [{"type": "text", "text": "x"}, *shown])
    assert tools.message(ToolCall("alone", {}), alone, 0)["content"] == shown
