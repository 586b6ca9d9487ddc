"""The workflow of a policy that calls tools: Python functions, described to it by the chat template."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from lightrl.data.json_records import LocatedRecord
from lightrl.data.streamed import make_each
from lightrl.imports import load_object
from lightrl.models.multimodal import MediaProcessor
from lightrl.records import Prompt
from lightrl.rollout.client import RESULT_MARK, EngineClient, chat_text, text_behind_answer
from lightrl.rollout.episode import Episode
from lightrl.rollout.observations import refused_image
from lightrl.rollout.tool_calls import ToolAnswer, ToolBox, load_tool
from lightrl.rollout.tool_parsers import parser_named
from lightrl.rollout.workflow import Workflow
from lightrl.rollout.written_calls import ToolCall

logger = logging.getLogger(__name__)


class ToolWorkflow(Workflow):
    """Answers the tool calls of a turn until a turn has none. A tool that fails or is late is answered by its error."""

    def __init__(
        self,
        *,
        tools: str | Sequence[str] = (),
        mcp: str | Sequence[str] = (),
        parser: str = "hermes",
        timeout_s: float = 30.0,
        max_result_chars: int = 4000,
    ) -> None:
        """Loads the tools.

        Args:
            tools: Any of calculator, python (a sandbox), package.module:function and path/to/file.py:function.
            mcp: Commands of MCP servers, whose tools are added, such as "python my_server.py".
            parser: Notation in which the policy writes calls, a name in PARSERS.
            timeout_s: Time limit of one call.
            max_result_chars: Number of characters of a result that the policy reads.
        """
        if not timeout_s > 0 or max_result_chars < 1:
            raise ValueError(f"timeout_s is {timeout_s} and max_result_chars {max_result_chars}: both must be above 0.")
        self._parser = parser_named(parser)
        self._has_left_out = False
        made = [load_tool(name) for name in ([tools] if isinstance(tools, str) else tools or ())]
        for command in [mcp] if isinstance(mcp, str) and mcp else mcp or ():
            made += load_object(_MCP, builtin={}, what="adapter", example="")(command)
        self._box = ToolBox(made, timeout_s=timeout_s, max_result_chars=max_result_chars)

    def check(self, tokenizer: Any) -> None:
        """Raises ValueError unless a chat template renders the answer to a call.

        Warns if it leaves the tools out, or the answers to several calls of a turn, which some policies never make.
        """
        messages = [{"role": "user", "content": "Hello"}]
        if chat_text(tokenizer, messages, tools=self._box.schemas) == chat_text(tokenizer, messages, tools=()):
            _warn(
                "The chat template leaves the tools out, so that the policy is not told of %s. Use a model whose "
                "template takes `tools`, or describe them in the prompts.",
                ", ".join(schema["function"]["name"] for schema in self._box.schemas),
            )
        call = ToolCall(self._box.schemas[0]["function"]["name"], {})
        answers = [self._box.message(call, ToolAnswer(text=f"{RESULT_MARK}-{number}"), number) for number in range(2)]
        if problem := _unanswered(tokenizer, answers[:1], "the answer to a tool call"):
            raise ValueError(problem)
        if problem := _unanswered(tokenizer, answers, "the answers if a turn calls several tools"):
            _warn("%s", problem)

    def with_tools(self, records: Sequence[LocatedRecord]) -> Sequence[LocatedRecord]:
        """Describes the tools in every prompt, in place of those of its record."""
        return make_each(records, self._describe)

    def _describe(self, _: int, located: LocatedRecord) -> LocatedRecord:
        record, where = located
        return {**record, "tools": self._box.schemas}, where

    async def arun_episode(self, engine: EngineClient, data: Prompt) -> Episode:
        """Alternates turns and the results of their calls until a turn calls nothing, or a limit ends the episode."""
        if data.images or data.videos:  # whose places are in the prompt; with_tools() has put the tools there
            episode = Episode(data.token_ids)
        else:
            episode = Episode(engine.encode_prompt(data.messages, tools=self._box.schemas))
        for num_turns in range(1, engine.limits.max_turns + 1):
            turn = await engine.generate(episode.ids)
            episode.say(turn)
            calls = self._parser.calls_in(self._parser.text_of(turn, engine.tokenizer))
            if not calls:
                break
            if num_turns == engine.limits.max_turns:
                episode.end_at_max_turns()
                break
            heard = engine.encode_messages(await self._answers(calls, episode, engine), after=turn)
            if engine.room(episode.ids, heard) < 1:
                episode.finish_reason = "context"
                break
            episode.hear(heard)
        return episode

    async def _answers(self, calls: Sequence[ToolCall], episode: Episode, engine: EngineClient) -> list[dict[str, Any]]:
        """Runs the calls of a turn concurrently; returns the messages that answer them, in order."""
        answers = await asyncio.gather(*map(self._box.answer, calls))
        if engine.media is None:
            answers = [self._without_images(answer) for answer in answers]
        else:
            answers = [_with_taken_images(answer, engine.media) for answer in answers]
        first = int(episode.numbers.get("tool_calls", 0))
        episode.count("tool_calls", len(answers))
        episode.count("tool_errors", sum(answer.is_error for answer in answers))
        answered = zip(calls, answers, strict=True)
        return [self._box.message(call, answer, number) for number, (call, answer) in enumerate(answered, start=first)]

    def _without_images(self, answer: ToolAnswer) -> ToolAnswer:
        """Returns the text of an answer that has images beside it, which a model of text alone cannot see."""
        if not (answer.parts and answer.text):
            return answer
        if not self._has_left_out:
            self._has_left_out = True
            logger.warning("A tool shows images beside its text. The model takes none, so it reads the text alone.")
        return ToolAnswer(text="\n".join(part["text"] for part in answer.parts if part["type"] == "text"))


def _warn(text: str, *args: str) -> None:
    """Warns on one rank of what all ranks find out at the start."""
    if os.environ.get("RANK", "0") == "0":
        logger.warning(text, *args)


def _with_taken_images(answer: ToolAnswer, media: MediaProcessor) -> ToolAnswer:
    """Returns an error in place of an answer that shows an image which the model cannot take, such as a thin line."""
    problem = refused_image(answer.parts, media)
    return ToolAnswer(text=f"error: {problem}", is_error=True) if problem else answer


def _unanswered(tokenizer: Any, answers: Sequence[Mapping[str, Any]], what: str) -> str:
    """Returns what is wrong if the chat template does not render the answers to calls, as episodes would find out."""
    try:
        behind = text_behind_answer(tokenizer, answers)
    except Exception as error:  # a template may raise anything
        return f'The chat template refuses {what}: "{error}". {_REMEDY}'
    if all(answer["content"] in behind for answer in answers):
        return ""
    return f"The chat template leaves out {what}. {_REMEDY}"


_REMEDY = "Use a model whose template takes messages of the role tool, or give a template by --data.chat_template_file."
_MCP = "lightrl.rollout.mcp_tools:mcp_tools"
