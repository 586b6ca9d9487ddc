"""The workflow of a policy that calls tools: Python functions, described to it by the chat template."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_template_utils import get_json_schema

from lightrl.imports import load_object
from lightrl.records import Prompt
from lightrl.rollout.client import EngineClient
from lightrl.rollout.episode import Episode
from lightrl.rollout.workflow import Workflow

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_MAX_SHOWN = 200  # characters of a bad call in its answer


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the policy may call. Its docstring and type hints are what the policy reads about it."""

    name: str
    schema: Mapping[str, Any]
    function: Callable[..., Any]  # plain or async


class ToolCallError(ValueError):
    """A call that names no tool, or that cannot be read; the message is the answer to the policy."""


class ToolWorkflow(Workflow):
    """Answers the calls of a turn until a turn has none.

    A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen write it. A tool that
    raises or is late is answered by its error, and counted.
    """

    def __init__(self, *, tools: str | Sequence[str], timeout_s: float = 30.0, max_result_chars: int = 4000) -> None:
        """Loads the tools.

        Args:
            tools: One package.module:function or several.
            timeout_s: Of one call.
            max_result_chars: Characters of a result that the policy reads.
        """
        if not timeout_s > 0 or max_result_chars < 1:
            raise ValueError(f"timeout_s is {timeout_s} and max_result_chars {max_result_chars}: both must be above 0.")
        made = [load_tool(name) for name in ([tools] if isinstance(tools, str) else tools)]
        self._tools = {tool.name: tool for tool in made}
        if len(self._tools) < len(made) or not made:
            raise ValueError(f"tools={tools!r}: give at least one function, and each name once.")
        self._timeout_s = timeout_s
        self._max_result_chars = max_result_chars

    async def arun_episode(self, engine: EngineClient, data: Prompt) -> Episode:
        """Alternates turns and the results of their calls until a turn calls nothing, or a limit ends the episode."""
        schemas = [tool.schema for tool in self._tools.values()]
        episode = Episode(engine.encode_prompt(data.messages, tools=schemas))
        for num_turns in range(1, engine.limits.max_turns + 1):
            turn = await engine.generate(episode.ids)
            episode.say(turn)
            calls = _CALL.findall(turn.text)
            if not calls:
                break
            if num_turns == engine.limits.max_turns:
                episode.finish_reason = "turns"
                break
            heard = engine.encode_messages(await self._answers(calls, episode), after=turn)
            if engine.room([*episode.ids, *heard]) < 1:
                episode.finish_reason = "context"
                break
            episode.hear(heard)
        return episode

    async def _answers(self, calls: Sequence[str], episode: Episode) -> list[dict[str, str]]:
        """Runs the calls of a turn side by side; returns the messages that answer them, in order."""
        outcomes = await asyncio.gather(*map(self._run, calls))
        episode.count("tool_calls", len(outcomes))
        episode.count("tool_errors", sum(is_error for _, is_error in outcomes))
        return [{"role": "tool", "content": text[: self._max_result_chars]} for text, _ in outcomes]

    async def _run(self, call: str) -> tuple[str, bool]:
        """Returns what the policy reads, and whether it is an error."""
        try:
            tool, arguments = self._parsed(call)
            running = (
                tool.function(**arguments)
                if inspect.iscoroutinefunction(tool.function)
                else asyncio.to_thread(tool.function, **arguments)
            )
            return str(await asyncio.wait_for(running, self._timeout_s)), False
        except asyncio.TimeoutError:
            return f"error: no result after {self._timeout_s:g} s", True
        except ToolCallError as error:
            return f"error: {error}", True
        except Exception as error:
            return f"error: {type(error).__name__}: {error}", True

    def _parsed(self, call: str) -> tuple[Tool, dict[str, Any]]:
        try:
            wanted = json.loads(call)
            name, arguments = wanted["name"], wanted.get("arguments", {})
            inspect.signature(self._tools[name].function).bind(**arguments)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ToolCallError(
                f"this call cannot be made: {call.strip()[:_MAX_SHOWN]} ({type(error).__name__}: {error}). The tools "
                f"are {', '.join(self._tools)}."
            ) from error
        return self._tools[name], arguments


def load_tool(name: str) -> Tool:
    """Loads a function by package.module:function and describes it; raises ValueError if it cannot be described."""
    function = load_object(name, builtin={}, what="tool", example="my_tool")
    try:
        schema = get_json_schema(function)
    except Exception as error:  # of several classes that transformers does not export
        raise ValueError(
            f"The tool {name!r} cannot be described to the policy: {error} Give it a docstring with an Args: section, "
            "and type hints."
        ) from error
    return Tool(schema["function"]["name"], schema, function)
