"""The engine as an episode sees it: async, local to the rank, and taking care of seeds, limits and texts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile
from typing import Any

from lightrl.config.adapters import POLICY
from lightrl.data.prompts import tokenize
from lightrl.engines.base import EnginePrompt, SamplingParams
from lightrl.engines.stop_strings import stop_tokens
from lightrl.models.chat_text import render, warn_of_lost_messages
from lightrl.models.multimodal import MediaProcessor
from lightrl.records import Prompt
from lightrl.rollout.driver import EpisodeDriver
from lightrl.rollout.episode import Episode, Turn, as_ids
from lightrl.rollout.foreign_requests import LLMResponse, answer_request
from lightrl.rollout.observations import images_of, num_tokens, require_images, shown_in
from lightrl.rollout.siblings import Siblings
from lightrl.seeding import mix_seed

_SHARED_STREAM = 6  # separates the draws that siblings share from those of each sibling
_TURN_STREAM = 5  # separates the draws of later turns from those of the first
RESULT_MARK = "lightrl-marks-a-result"
_MARK = "lightrl-marks-an-answer"  # stands for the policy's turn when the template's text after it is looked up


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """How long an episode may become."""

    max_new_tokens: int  # in one turn
    max_turns: int
    max_tokens: int  # in the prompt and everything after it


class EngineClient:
    """Generates for the episode of one sample. The draws of the k-th call depend on (seed, sample, k) alone."""

    def __init__(
        self,
        driver: EpisodeDriver,
        tokenizer: Any,
        *,
        seed: int,
        sample_index: int,
        sampling: SamplingParams,
        limits: EpisodeLimits,
        prompt: Prompt | None = None,
        position: int = 0,
        siblings: Siblings | None = None,
        media: MediaProcessor | None = None,
    ) -> None:
        """Serves one sample; `sampling` holds the settings of every turn, such as temperature and stop strings."""
        self.turns: list[Turn] = []  # turns that this client generated
        self.has_rewarded = False  # whether the episode has asked for a reward, which makes its own reward final
        self.tokenizer = tokenizer
        self.sample_index = sample_index
        self.limits = limits
        self._driver = driver
        self._seed = seed
        self._sampling = sampling
        self._num_calls = 0
        self._prompt = prompt
        self._position = position
        self._siblings = siblings or Siblings(1)
        self.media = media  # the model's preprocessing of images; None if it takes none

    @property
    def version(self) -> int:
        """Version of the weights that generate now."""
        version = self._driver.engine.version
        assert version is not None, "an engine that generates has weights"
        return version

    @property
    def is_over(self) -> bool:
        """Whether the engine answers no further request of this client."""
        return self._driver.is_over

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of adapters that generate() accepts."""
        return self._driver.engine.engine.adapters

    @property
    def temperature(self) -> float:
        """Sampling temperature of the run, the default for every turn."""
        return self._sampling.temperature

    @property
    def placeholder_ids(self) -> frozenset[int]:
        """Ids of the tokens that stand for an image or a video; none if the model takes neither."""
        return frozenset(() if self.media is None else (self.media.image_token_id, self.media.video_token_id))

    def room(self, ids: Sequence[int], *behind: Sequence[int]) -> int:
        """Returns how many tokens a turn after these, and those behind them, may have; 0 or less if there is no room.

        An image counts with the tokens that it becomes: give what was heard as an argument of its own.
        """
        return min(self.limits.max_new_tokens, self.limits.max_tokens - self.num_tokens(ids, *behind))

    def num_tokens(self, *parts: Sequence[int]) -> int:
        """Returns how many tokens the parts become in the model; raises ValueError if they have lost their images."""
        prompt = self._prompt if self._prompt and self._shows_media(parts[0]) else None
        if self.placeholder_ids:
            count = self._num_placeholders(*parts) - (self._num_placeholders(prompt.token_ids) if prompt else 0)
            require_images(count, sum(len(images_of(part)) for part in parts))
        return sum(map(num_tokens, parts)) + (prompt.num_media_tokens if prompt else 0)

    def _num_placeholders(self, *parts: Sequence[int]) -> int:
        ids = self.placeholder_ids
        return sum(token in ids for part in parts for token in part)

    async def generate(
        self,
        ids: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        stop_token_ids: Sequence[int] = (),
        stop: str | Sequence[str] = (),
        call: int | None = None,
        adapter: str = POLICY,
    ) -> Turn:
        """Samples a turn that follows the given tokens.

        Args:
            ids: Everything before the turn: Episode.ids.
            max_new_tokens: Largest number of tokens in the turn; None: as many as there is room for.
            temperature: Sampling temperature; None: the run's. A turn at another temperature cannot be trained on.
            stop_token_ids: Tokens that end the turn, in addition to the model's own.
            stop: Texts (or one) that end the turn besides the run's. The token that completes one is the turn's last.
            call: Replaces the number of the call in the seed of the draw; 0 draws what a first call would.
            adapter: Who speaks: the policy, "base" for the model without adapters, or a name of --lora.others. Only a
                turn of the policy can be trained on; pass the token_ids of others to Episode.hear().
        """
        as_ids(ids, "generate()")
        room = self.room(ids)
        if room < 1:
            raise ValueError(
                f"There is no room for a turn behind {self.num_tokens(ids)} tokens: an episode may have "
                f"{self.limits.max_tokens}. Ask room() before generate()."
            )
        number = self._num_calls if call is None else call
        self._num_calls += 1
        params = replace(
            self._sampling,
            max_new_tokens=room if max_new_tokens is None else min(room, max_new_tokens),
            temperature=self._sampling.temperature if temperature is None else temperature,
            seed=mix_seed(_TURN_STREAM, self._seed, number) if number else self._seed,
            first_sample=self.sample_index,
            stop_token_ids=(*self._sampling.stop_token_ids, *stop_token_ids, *self._ends(_texts(stop))),
            stop=(*self._sampling.stop, *_texts(stop)),
            adapter=adapter,
        )
        prompt = self._with_media(ids)
        completion = await self._driver.generate(prompt, params)
        turn = Turn(
            token_ids=completion.output_token_ids,
            logprobs=completion.logprobs,
            versions=completion.versions,
            finish_reason=completion.finish_reason,
            text=self.tokenizer.decode(list(completion.output_token_ids), skip_special_tokens=True),
            is_trainable=params.temperature == self._sampling.temperature and adapter == POLICY,
            routing=completion.routing,
            prompt_ids=prompt.token_ids,
            expanded_ids=completion.prompt_token_ids if prompt.images or prompt.videos else (),
        )
        self.turns.append(turn)
        return turn

    def _ends(self, stop: Sequence[str]) -> tuple[int, ...]:
        """Returns the texts that are one token, which the engine can end at, unless a minimum lets them pass."""
        if not stop or self._sampling.min_new_tokens:
            return ()
        return stop_tokens(stop, self.tokenizer, self._driver.engine.engine.vocab_size)

    def _with_media(self, ids: Sequence[int]) -> EnginePrompt:
        """Returns the engine's input: the tokens, and the images and videos that they show."""
        prompt = EnginePrompt(token_ids=tuple(ids))
        if self._prompt and self._shows_media(ids):
            images, videos = self._siblings.media(self._prompt)
            prompt = replace(prompt, images=images, videos=videos)
        if seen := images_of(ids):
            prompt = replace(prompt, images=(*prompt.images, *map(self._siblings.picture_of, seen)))
        return prompt

    def _shows_media(self, ids: Sequence[int]) -> bool:
        """Returns whether the tokens begin with the prompt and its images or videos, which the engine must see."""
        prompt = self._prompt
        if prompt is None or not (prompt.images or prompt.videos) or self._has_all_images(ids):
            return False
        return tuple(ids[: len(prompt.token_ids)]) == prompt.token_ids

    def _has_all_images(self, ids: Sequence[int]) -> bool:
        """Returns whether each place of an image in the tokens has an image that comes with them."""
        return bool(self.placeholder_ids) and self._num_placeholders(ids) == len(images_of(ids))

    async def agenerate(self, request: Any) -> LLMResponse:
        """Answers a request in the form that AReaL's workflows use: see lightrl.rollout.foreign_requests."""
        return await answer_request(self, request)

    # ---- Rewards, and what siblings share ----------------------------------------------------------------------

    async def reward(self, made: Episode, *, alone: bool = False) -> float:
        """Returns the weighted sum of the run's rewards for an episode, which may be unfinished.

        The workflow then sets episode.reward, and the run does not score the sample again. A reward that compares the
        samples of a prompt waits for the siblings that still run, unless alone=True. Raises RewardError if a reward
        fails.
        """
        if self._prompt is None:
            raise ValueError("This client has no prompt to score an episode of: it is not of a run.")
        self.has_rewarded = True
        sample = made.sample(self._prompt, self._position, self.sample_index, self.tokenizer)
        return await self._siblings.reward(sample, alone=alone)

    async def once(self, name: str, make: Callable[[EngineClient], Awaitable[Any]]) -> Any:
        """Returns the result of make(engine), which is called once for all samples of the prompt.

        It gets a client of its own, whose draws depend on the name and not on which sample asked first.
        """
        shared = EngineClient(
            self._driver,
            self.tokenizer,
            seed=mix_seed(_SHARED_STREAM, self._seed, *name.encode()),
            sample_index=0,
            sampling=self._sampling,
            limits=self.limits,
            prompt=self._prompt,
            position=self._position,
            siblings=self._siblings,
            media=self.media,
        )
        return await self._siblings.once(name, lambda: make(shared))

    # ---- Texts -------------------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text, without adding special tokens."""
        return tokenize(text, self.tokenizer, "a text of an episode", is_raw=False)

    def encode_reply(self, text: str, *, role: str = "user", after: Turn) -> Sequence[int]:
        """Returns the tokens of one message to the policy that follows a turn; see encode_messages()."""
        return self.encode_messages([{"role": role, "content": text}], after=after)

    def encode_messages(self, messages: Sequence[Mapping[str, Any]], *, after: Turn) -> Sequence[int]:
        """Returns the tokens of messages to the policy that follow a turn.

        They are what the chat template puts after an answer: its end, the messages, and the beginning of the next
        answer. The end is left out if the turn already contains it. Without a chat template only the texts are encoded.
        Images in the messages come with the tokens: Episode.hear() and room() take them as they are.
        """
        shown = shown_in(messages, self.tokenizer, self.media)
        if not shown.renderer.chat_template:
            return self.encode("".join(message["content"] for message in messages))
        behind = text_behind_answer(self.tokenizer, shown.messages, shown.renderer)
        warn_of_lost_messages(shown.messages, behind, "an episode")
        ending = self.tokenizer.decode(after.token_ids[-1:], skip_special_tokens=False) if after.token_ids else ""
        if after.finish_reason == "stop" and ending and behind.startswith(ending):
            behind = behind[len(ending) :]
        return shown.placed(self.encode(behind))

    def encode_prompt(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]]
    ) -> Sequence[int]:
        """Returns the tokens of a conversation up to the policy's first turn, with tools described to it."""
        shown = shown_in(messages, self.tokenizer, self.media)
        text = chat_text(shown.renderer, shown.messages, tools=tools)
        warn_of_lost_messages(shown.messages, text, "an episode")
        return shown.placed(self.encode(text))


def chat_text(tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]]) -> str:
    """Returns the text of a conversation up to the policy's first turn, as the chat template writes it."""
    if not tokenizer.chat_template:
        raise ValueError(
            "The tokenizer has no chat template, which describes the tools to the policy. Use the model's instruct "
            "version, or a workflow that writes the prompt itself."
        )
    return render(
        tokenizer, [dict(item) for item in messages], [dict(tool) for tool in tools], add_generation_prompt=True
    )


def text_behind_answer(tokenizer: Any, messages: Sequence[Mapping[str, Any]], renderer: Any = None) -> str:
    """Returns the text that the chat template writes after an answer: its end, these messages and the next beginning.

    Raises whatever the template raises. renderer: has the template instead of the tokenizer, for messages with images.
    """
    are_answers = any(map(_is_answer, messages[:1])) and _needs_calls(tokenizer, str(tokenizer.chat_template))
    return (_text_behind_calls if are_answers else _text_behind_text)(tokenizer, messages, renderer or tokenizer)


def _is_answer(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "tool"


@lru_cache(maxsize=8)
def _needs_calls(tokenizer: Any, template: str) -> bool:
    """Returns whether a template renders a tool's answer only after the call, as those of Gemma 4 and gpt-oss do."""
    answer = {"role": "tool", "tool_call_id": "000000000", "name": "tool", "content": RESULT_MARK}
    for text_behind in (_text_behind_text, _text_behind_calls):
        try:
            if RESULT_MARK in text_behind(tokenizer, [answer], tokenizer):
                return text_behind is _text_behind_calls
        except Exception:  # a template may raise anything
            continue
    return False


def _text_behind_text(tokenizer: Any, messages: Sequence[Mapping[str, Any]], renderer: Any) -> str:
    marked = [{"role": "user", "content": ""}, {"role": "assistant", "content": _MARK}, *map(dict, messages)]
    rendered = render(renderer, marked, add_generation_prompt=True)
    _, mark, behind = rendered.partition(_MARK)
    if not mark:
        raise ValueError(
            "The tokenizer's chat template leaves an answer out when a message follows it, so that a conversation "
            "cannot go on. Use a template that keeps it."
        )
    return behind


def _texts(stop: str | Sequence[str]) -> Sequence[str]:
    """Returns a list of stop strings; the characters of a single text are none."""
    return (stop,) if isinstance(stop, str) else stop


def _text_behind_calls(tokenizer: Any, messages: Sequence[Mapping[str, Any]], renderer: Any) -> str:
    """Returns the last token of a turn that calls tools, and what the template adds for their answers."""
    calls = [
        {
            "id": answer.get("tool_call_id", f"{number:09}"),
            "type": "function",
            "function": {"name": answer.get("name", "tool"), "arguments": {}},
        }
        for number, answer in enumerate(takewhile(_is_answer, messages))
    ]
    asked: list[dict[str, Any]] = [
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    before = render(renderer, asked, add_generation_prompt=False)
    rendered = render(renderer, [*asked, *map(dict, messages)], add_generation_prompt=True)
    if not rendered.startswith(before):
        raise ValueError("it writes the call of a tool in another way when an answer follows")
    last = tokenizer(before, add_special_tokens=False)["input_ids"][-1:]
    return str(tokenizer.decode(last, skip_special_tokens=False)) + rendered[len(before) :]
