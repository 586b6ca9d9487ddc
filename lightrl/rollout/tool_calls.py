"""Runs tool calls. Whatever a tool does, the policy gets an answer in time."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_template_utils import get_json_schema

from lightrl.imports import load_object
from lightrl.rewards.async_scoring import without_exit
from lightrl.rollout.observations import checked_part, is_data, parts_of
from lightrl.rollout.tool_parsers import typed_arguments
from lightrl.rollout.written_calls import ToolCall, bad_call

logger = logging.getLogger(__name__)

_PARTS = 20  # of the time limit of a call

BUILTIN_TOOLS = {
    "calculator": "lightrl.rollout.builtin_tools:calculator",
    "python": "lightrl.rollout.builtin_tools:python",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the policy may call."""

    name: str
    schema: Mapping[str, Any]  # in the chat template's format: what the policy reads about the tool
    function: Callable[..., Any]  # plain or async; a plain one runs in a thread
    max_concurrency: int | None = None  # calls that run side by side; the time of others has not begun


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAnswer:
    """The answer to a call, as the policy reads it."""

    text: str
    is_error: bool = False
    parts: Sequence[Mapping[str, Any]] = ()  # the text and images between its pieces; none: only the text


class CallError(ValueError):
    """The error of a tool about a call that it cannot answer as it is; its message is the answer, without a traceback.

    Any other error of a tool is taken for a defect of the tool.
    """


class ToolBox:
    """The tools of a run, by name."""

    def __init__(self, tools: Iterable[Tool], *, timeout_s: float, max_result_chars: int) -> None:
        """Takes the tools, the time limit of a call, and the number of characters of a result that the policy reads."""
        given = list(tools)
        self._tools = {tool.name: tool for tool in given}
        if len(self._tools) < len(given) or not given:
            names = ", ".join(tool.name for tool in given) or "none"
            raise ValueError(f"The tools are {names}: give at least one function, and each name once.")
        self._timeout_s = timeout_s
        self._max_result_chars = max_result_chars
        self._has_shown_error = False
        self._gates: dict[str, asyncio.Semaphore] = {}  # by tool
        self._gates_loop: asyncio.AbstractEventLoop | None = None  # to which these belong

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        """Descriptions of the tools for the chat template, which shows them to the policy."""
        return [tool.schema for tool in self._tools.values()]

    def message(self, call: ToolCall, answer: ToolAnswer, number: int) -> dict[str, Any]:
        """Returns the message that answers a call, the conversation's call with this number.

        Templates such as those of Mistral and Hermes demand an id or a name. Nine letters and digits are an id that
        all of them take.
        """
        name = call.name if call.name in self._tools else "tool"  # else a policy could write anything into its prompt
        content = list(answer.parts) or answer.text
        return {"role": "tool", "tool_call_id": call.id or f"{number:09}", "name": name, "content": content}

    async def answer(self, call: ToolCall) -> ToolAnswer:
        """Makes a call; an error or a time-out becomes its answer.

        The first traceback of a run is logged, unless the tool blames the call by a CallError.
        """
        try:
            if call.problem:
                return self._error(f"{call.problem}. {self._names}")
            tool = self._tools.get(call.name)
            if tool is None:
                return self._error(f"there is no tool {call.name!r}. {self._names}")
            arguments = typed_arguments(call, tool.schema)
            try:
                inspect.signature(tool.function).bind(**arguments)
            except TypeError as error:
                return self._error(f"{bad_call(f'{call.name}({arguments})', error).problem}.")
            async with self._gate(tool):
                running = asyncio.ensure_future(without_exit(_called(tool, arguments)))
                try:
                    await self._wait(running)
                finally:
                    running.cancel()
            if not running.done():
                return self._error(f"no result after {self._timeout_s:g} s")
            if running.cancelled():
                return self._error("the call was cancelled")
            return self._answer_of(running.result())
        except CallError as error:
            return self._error(str(error))
        except Exception as error:
            self._show(call, error)
            return self._error(f"{type(error).__name__}: {error}")

    async def _wait(self, running: asyncio.Future[Any]) -> None:
        """Waits until a call is done or late; unlike wait_for(), not for one that goes on although it was cancelled.

        It waits in parts, so that time in which the loop stands still, as while a model trains, does not count.
        """
        for _ in range(_PARTS):
            if (await asyncio.wait([running], timeout=self._timeout_s / _PARTS))[0]:
                return

    def _gate(self, tool: Tool) -> AbstractAsyncContextManager[Any]:
        """Returns the semaphore that a call holds while it runs, if its tool limits them."""
        if tool.max_concurrency is None:
            return nullcontext()
        if self._gates_loop is not asyncio.get_running_loop():
            self._gates, self._gates_loop = {}, asyncio.get_running_loop()
        return self._gates.setdefault(tool.name, asyncio.Semaphore(tool.max_concurrency))

    @property
    def _names(self) -> str:
        return f"The tools are {', '.join(self._tools)}."

    def _answer_of(self, result: Any) -> ToolAnswer:
        """Returns a tool's result as the policy reads it: the text of a value, and texts and images of parts."""
        given = parts_of(result)
        if given is None or any(map(is_data, given)):
            return ToolAnswer(text=self._cut(str(result)))
        parts: list[Mapping[str, Any]] = []
        text = ""
        for part in given:
            if part["type"] == "text":
                read = _encodable(str(part["text"])[: self._max_result_chars - len(text)])
                parts.append({"type": "text", "text": read})
                text += read
            else:
                parts.append(checked_part(part))
        return ToolAnswer(text=text, parts=[] if all(part["type"] == "text" for part in parts) else parts)

    def _cut(self, text: str) -> str:
        return _encodable(text[: self._max_result_chars])

    def _error(self, text: str) -> ToolAnswer:
        return ToolAnswer(text=self._cut(f"error: {text}"), is_error=True)

    def _show(self, call: ToolCall, error: Exception) -> None:
        if self._has_shown_error:
            return
        self._has_shown_error = True
        logger.warning(
            "The tool %r has raised. The policy reads the error, as it will of further ones, which "
            "episode/tool_errors counts.\n%s",
            *(call.name, _encodable("".join(traceback.format_exception(error)).rstrip())),
        )


def _encodable(text: str) -> str:
    """Returns the text with ? for half a pair of surrogates, which JSON may contain and no tokenizer reads."""
    return text.encode(errors="replace").decode()


async def _called(tool: Tool, arguments: Mapping[str, Any]) -> Any:
    if inspect.iscoroutinefunction(tool.function):
        return await tool.function(**arguments)
    value = await in_daemon_thread(tool.function, arguments)
    return await value if inspect.isawaitable(value) else value  # of an async tool behind a plain decorator


async def in_daemon_thread(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Runs a plain function in a thread; one that never returns blocks neither the loop nor the end of the run.

    asyncio.to_thread would wait for it when the loop closes. Like that, it sees the context variables of its caller.
    """
    loop, context = asyncio.get_running_loop(), copy_context()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if done.done():  # nobody is waiting any longer
            return
        if error is None:
            done.set_result(value)
        else:
            if isinstance(error, StopIteration) or not isinstance(error, Exception):  # a future takes none of these
                cause, error = error, RuntimeError(f"{type(error).__name__}: {error}")
                error.__cause__ = cause  # has the line of the tool
            done.set_exception(error)

    def run() -> None:
        value, failure = None, None
        try:
            value = context.run(function, **arguments)
        except BaseException as error:
            failure = error
        with suppress(RuntimeError):  # the loop is closed, so nobody is waiting any longer
            loop.call_soon_threadsafe(settle, value, failure)

    threading.Thread(target=run, name=f"tool {getattr(function, '__name__', '')}", daemon=True).start()
    return await done


def load_tool(name: str) -> Tool:
    """Loads a built-in tool, or a function by module or file; raises ValueError if no policy can be told of it."""
    function = load_object(name, builtin=BUILTIN_TOOLS, what="tool", example="my_tool")
    if not inspect.isroutine(function):
        raise ValueError(
            f"The tool {name!r} is {function!r}. A tool is a function: for a class, or an object with a state, write a "
            "function that calls it."
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ValueError(f"The tool {name!r} yields, so that a call has no result. Return one value, such as a list.")
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    unnamed = [item.name for item in inspect.signature(function).parameters.values() if item.kind in by_place]
    if unnamed:
        raise ValueError(
            f"The tool {name!r} takes {', '.join(unnamed)} by position, and a call gives every argument by name. Use "
            "ordinary parameters, such as a list for several values."
        )
    try:
        schema = get_json_schema(function)
    except Exception as error:  # one of several classes that transformers does not export
        raise ValueError(
            f"The tool {name!r} cannot be described to the policy: {str(error).rstrip('.!')}. Give it a docstring with "
            "an Args: section, and type hints."
        ) from error
    limit = getattr(function, "max_concurrency", None)
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise ValueError(f"The tool {name!r} has max_concurrency {limit!r}: it must be a whole number from 1 on.")
    return Tool(name=schema["function"]["name"], schema=schema, function=function, max_concurrency=limit)
