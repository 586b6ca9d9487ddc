"""Session: turns the requests of one agent (messages or tokens) into engine calls, and records all tokens."""

from __future__ import annotations

import asyncio
import secrets
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

from lightrl.config.adapters import POLICY
from lightrl.models.chat_text import tools_of
from lightrl.records import Prompt
from lightrl.rollout.client import EngineClient
from lightrl.rollout.endpoint.conversations import Call, Conversations
from lightrl.rollout.endpoint.errors import RequestError, asleep, ended
from lightrl.rollout.endpoint.images import identity, with_images, with_pictures
from lightrl.rollout.endpoint.messages import answer_message, checked_messages, cut_before_stop, histories
from lightrl.rollout.episode import Episode, Turn
from lightrl.rollout.observations import joined
from lightrl.rollout.tool_parsers import PARSERS, Parser

_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """The settings of a request besides its prompt, as far as the endpoint honours them."""

    num_choices: int = 1
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    temperature: float | None = None  # None: the run's
    most_calls: int | None = None  # of tools in one message; None: no limit
    adapter: str = POLICY  # turns of any other adapter belong to no conversation of the policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One choice of an answer."""

    call: Call
    message: dict[str, Any]
    finish_reason: str

    @property
    def turn(self) -> Turn:
        """The policy's turn."""
        return self.call.turn


class Session:
    """An episode whose turns are requests. Its methods run in the endpoint's loop, the engine in the driver's."""

    def __init__(
        self,
        engine: EngineClient,
        driver_loop: asyncio.AbstractEventLoop,
        task: Prompt | None,
        *,
        wait_s: float,
        parser: Parser = PARSERS["hermes"],
    ) -> None:
        """Begins with the prompt of the episode as its task; None makes an unrecorded session for a visitor."""
        self.engine = engine
        self.task = task
        self.is_open = True
        self.conversations = Conversations()
        self._driver_loop = driver_loop
        self._context = copy_context()  # of the episode, with its journal; requests run in another context
        self._wait_s = wait_s
        self._parser = parser
        # A visitor has a session for each request, and the ids of its tool calls must differ all the same.
        self._call_ids = "" if task is not None else secrets.token_hex(6)
        self._num_answers: Counter[tuple[tuple[int | str, ...], str]] = Counter()
        self._num_asked: Counter[tuple[tuple[int | str, ...], str]] = Counter()
        self._running: set[asyncio.Task[Any]] = set()

    @property
    def is_awake(self) -> bool:
        """Whether the engine can generate now."""
        return self._driver_loop.is_running() and not self.engine.is_over

    def for_visitor(self) -> Session:
        """Returns a session for requests that belong to no episode and are not recorded."""
        return Session(self.engine, self._driver_loop, None, wait_s=self._wait_s, parser=self._parser)

    def close(self) -> None:
        """Ends the episode: running requests are aborted, and later calls are refused."""
        self.is_open = False
        for task in self._running:
            task.cancel()

    def episodes(self) -> list[Episode]:
        """Returns the recorded conversations, beginning with the one that has the most turns."""
        return self.conversations.episodes()

    # ---- Requests ----------------------------------------------------------------------------------------------

    async def chat(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], wish: Wish
    ) -> list[Reply]:
        """Answers a chat request. For the policy's turns among the messages, the engine's own tokens are used."""
        messages = with_images(messages, self.engine, self.task)
        names = histories(messages, tools)
        parent, prompt_ids = await self._prompt_of(messages, tools, names)
        turns = await self._turns(prompt_ids, wish, parent)
        replies = []
        for turn in turns:
            call = self._record(prompt_ids, turn, parent, wish)
            message = self._message(turn, tools, wish, self._next_ids(prompt_ids, wish.adapter))
            if "tool_calls" in message:
                message["tool_calls"] = message["tool_calls"][: wish.most_calls]
            resent = checked_messages([message])  # as the client will send it with its next request
            if wish.adapter == POLICY:
                self.conversations.remember(call, histories([*messages, *resent], tools)[-1])
            reason = _finish_reason(turn)
            if reason == "stop" and "tool_calls" in message:  # a cut turn stays "length": another call may be missing
                reason = "tool_calls"
            replies.append(Reply(call=call, message=message, finish_reason=reason))
        return replies

    def _message(self, turn: Turn, tools: Sequence[dict[str, Any]], wish: Wish, call_ids: str) -> dict[str, Any]:
        text, special = turn.text, list[str]()
        if tools and self._parser.has_special_tokens:
            text = self._parser.text_of(turn, self.engine.tokenizer)
            special = _special_texts(turn, self.engine.tokenizer)
        text = cut_before_stop(text, wish.stop)
        return answer_message(text, call_ids=call_ids, tools=tools, parser=self._parser, special=special)

    async def complete(self, prompt_ids: Sequence[int], wish: Wish) -> list[Reply]:
        """Answers a request that continues tokens."""
        prompt = tuple(prompt_ids)
        turns = await self._turns(prompt, wish, self.conversations.extended_by(prompt))
        return [
            Reply(call=self._record(prompt, turn, None, wish), message={}, finish_reason=_finish_reason(turn))
            for turn in turns
        ]

    def _record(self, prompt_ids: Sequence[int], turn: Turn, parent: Call | None, wish: Wish) -> Call:
        if self.task is None or wish.adapter != POLICY:
            return Call(tuple(prompt_ids), turn)
        return self.conversations.record(prompt_ids, turn, parent=parent)

    # ---- Prompts -----------------------------------------------------------------------------------------------

    async def _prompt_of(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], names: list[tuple[bytes, bytes]]
    ) -> tuple[Call | None, tuple[int, ...]]:
        """Returns the call that the messages continue, if any, and the tokens of the messages."""
        for end in range(len(messages) - 1, 0, -1):
            if messages[end - 1]["role"] != "assistant" or messages[end]["role"] == "assistant":
                continue
            call = self.conversations.recall(names[end - 1][0]) or self.conversations.recall(names[end - 1][1])
            if call is not None:
                new = await with_pictures(messages[end:])
                return call, joined(call.ids, self._rendered(new, after=call.turn))
        if self.task is not None and not tools and histories(self._plain(self.task), ())[-1:] == names[-1:]:
            return None, self.task.token_ids
        return None, joined(self._rendered(await with_pictures(messages), tools=tools))

    def _plain(self, task: Prompt) -> list[dict[str, Any]]:
        """Returns a prompt's messages in the form in which requests are kept; none if it has tools or videos."""
        if tools_of(task.fields) or task.videos or not task.messages:
            return []
        if all(isinstance(message.get("content"), str) for message in task.messages):
            return [{"role": message["role"], "content": message["content"]} for message in task.messages]
        try:
            return with_images(checked_messages(list(task.messages)), self.engine, task)
        except RequestError:  # with roles or parts that no request may have
            return []

    def _rendered(
        self, messages: Sequence[dict[str, Any]], *, tools: Sequence[dict[str, Any]] = (), after: Turn | None = None
    ) -> Sequence[int]:
        """Returns the tokens of messages: a whole prompt, or what follows a turn."""
        engine = self.engine
        try:
            if after is not None:
                return engine.encode_messages(messages, after=after)
            if engine.tokenizer.chat_template or not all(isinstance(message["content"], str) for message in messages):
                return engine.encode_prompt(messages, tools=tools)
        except Exception as error:  # a template may raise anything
            raise RequestError(f"The model's chat template refuses the messages: {error}", param="messages") from error
        if tools:
            raise RequestError("The model has no chat template, which would describe tools to it.", param="tools")
        try:
            return engine.encode("".join(message["content"] for message in messages))
        except ValueError as error:  # of a text for which the tokenizer has no tokens
            raise RequestError(str(error), param="messages") from error

    # ---- The engine --------------------------------------------------------------------------------------------

    async def _turns(self, prompt_ids: tuple[int, ...], wish: Wish, parent: Call | None) -> list[Turn]:
        limits = self.engine.limits
        self._require_open()
        is_own = self.task is not None and wish.adapter == POLICY
        if self._room(prompt_ids) < 1:
            if is_own and parent is not None:
                parent.limit = "context"
            raise RequestError(
                f"This model's maximum context length is {limits.max_tokens} tokens. However, your messages resulted "
                f"in {self.engine.num_tokens(prompt_ids)} tokens, which leaves no room for an answer.",
                code="context_length_exceeded",
                param="messages",
            )
        if is_own and parent is not None and parent.depth >= limits.max_turns:
            parent.limit = "turns"
            raise RequestError(
                f"The conversation has had {parent.depth} turns, and --rollout.max_turns allows {limits.max_turns}.",
                code="max_turns_exceeded",
            )
        await self._until_awake()
        self._require_open()  # the episode may have ended meanwhile
        numbers = [self._number(prompt_ids, wish.adapter) for _ in range(wish.num_choices)]
        task = asyncio.ensure_future(self._drawn(prompt_ids, wish, numbers))
        self._running.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self.is_open:
                raise  # the client has disconnected
            raise ended() from None
        except ValueError as error:  # the engine's checks
            raise RequestError(str(error)) from error
        finally:
            task.cancel()
            self._running.discard(task)

    def _room(self, prompt_ids: tuple[int, ...]) -> int:
        try:
            return self.engine.room(prompt_ids)
        except ValueError as error:
            raise RequestError(
                "The prompt has a token that stands for an image or a video, without the image: send images as parts "
                "of messages to /v1/chat/completions.",
                param="messages",
            ) from error

    def _require_open(self) -> None:
        if not self.is_open:
            raise ended()

    async def _until_awake(self) -> None:
        deadline = time.monotonic() + self._wait_s
        while not self.is_awake:
            if time.monotonic() > deadline or self.engine.is_over:
                raise asleep(self._wait_s)
            await asyncio.sleep(_POLL_S)

    async def _drawn(self, prompt_ids: tuple[int, ...], wish: Wish, numbers: Sequence[int]) -> list[Turn]:
        """Draws a turn for each number. The driver gets them all at once: it would step with only the first of them."""
        asked = self._context.run(
            asyncio.run_coroutine_threadsafe, self._together(prompt_ids, wish, numbers), self._driver_loop
        )
        answer = asyncio.wrap_future(asked)
        try:
            await asyncio.wait([answer])
        finally:
            answer.cancel()
        if answer.cancelled():  # by the driver, whose episodes are all over; this task itself was not cancelled
            raise asleep(self._wait_s)
        return answer.result()

    async def _together(self, prompt_ids: tuple[int, ...], wish: Wish, numbers: Sequence[int]) -> list[Turn]:
        """Generates the turns; runs in the driver's loop."""
        generations = [
            self.engine.generate(
                prompt_ids,
                max_new_tokens=wish.max_new_tokens,
                temperature=wish.temperature,
                stop_token_ids=wish.stop_token_ids,
                stop=wish.stop,
                call=number,
                adapter=wish.adapter,
            )
            for number in numbers
        ]
        tasks = [asyncio.ensure_future(generation) for generation in generations]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # if one has failed, the others go on
                task.cancel()

    def _next_ids(self, prompt_ids: tuple[int, ...], adapter: str) -> str:
        """Returns a text of its own for each answer. A template may render ids made of it, so no time decides them."""
        asked = identity(prompt_ids)
        self._num_answers[asked, adapter] += 1
        return f"{self._call_ids} {adapter} {self._num_answers[asked, adapter]} {asked}"

    def _number(self, prompt_ids: tuple[int, ...], adapter: str) -> int:
        """Numbers a draw by its prompt and by how often that was requested, whatever the order of arrival."""
        asked = identity(prompt_ids)
        repeat = self._num_asked[asked, adapter]
        self._num_asked[asked, adapter] += 1
        if self.task is not None and not repeat and asked == self.task.token_ids:
            return 0
        return 1 + (zlib.crc32(",".join(map(str, asked)).encode()) << 16) + repeat


def _special_texts(turn: Turn, tokenizer: Any) -> list[str]:
    """Returns the texts of the special tokens in a turn."""
    tokens = [token for token in sorted(set(turn.token_ids)) if not tokenizer.decode([token], skip_special_tokens=True)]
    return [text for token in tokens if (text := tokenizer.decode([token], skip_special_tokens=False))]


def _finish_reason(turn: Turn) -> str:
    return "stop" if turn.finish_reason == "stop" else "length"
