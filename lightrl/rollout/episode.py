"""Episode: one sample in the making, that is, what the policy says and what it hears, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from inspect import isawaitable
from itertools import accumulate
from operator import index
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightrl.records import FinishReason, Prompt, Sample
from lightrl.rollout.branches import branch_indices
from lightrl.rollout.observations import SeenIds, images_of, token_counts

T = TypeVar("T")

_LONGEST = 80  # characters of a wrong value in an error message

_TAKEN = ("turns", "failed", "filtered", "failed_share")  # metrics episode/... of describe_episodes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of the policy, as the engine produced it."""

    token_ids: tuple[int, ...]  # including the end token, if one ended it
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason
    text: str  # token_ids decoded, special tokens skipped
    is_trainable: bool = True  # False: not drawn from the trainer's distribution but greedily or by another adapter
    prompt_ids: tuple[int, ...] = ()  # the tokens that it was generated from; empty: unknown
    expanded_ids: tuple[int, ...] = ()  # the same with images and videos expanded; empty: there are none
    routing: NDArray[np.int16] | None = field(default=None, compare=False, repr=False)  # as Completion.routing


class Episode:
    """The tokens of a conversation after its prompt. They are only added to, so what a turn saw never changes later.

    Text is never tokenised again: the policy's tokens are the engine's, and each observation is tokenised once.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.prompt_ids = as_ids(prompt_ids, "Episode()")
        self.images = list(images_of(prompt_ids))  # seen so far, besides those of the data set's prompt
        self.response_ids: list[int] = []
        self.turns: list[int] = []  # index in response_ids at which each turn of the policy begins
        self.reward: float | None = None
        self.turn_rewards: list[float] = []  # each turn's share of the reward; later turns earned nothing
        self.numbers: dict[str, float] = {}
        self.is_scored = False  # whether the reward is final, so that the run's rewards are not added
        self.branches: list[Episode] = []  # other conversations of the same agent, which share its reward
        self.finish_reason: FinishReason = "stop"
        self._num_in_prompt = len(self.images)
        self._expanded_prompt: tuple[int, ...] = ()  # with images and videos expanded; empty: there are none
        if self.images and self.prompt_ids.count(self.images[0].token_id) == len(self.images):
            self._expanded_prompt = _repeated(self.prompt_ids, token_counts(self.prompt_ids, self.images))
        self._only_text: str | None = None  # text of the response as long as it is a single turn
        self._own: list[bool] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._routing: NDArray[np.int16] | None = None  # of all tokens so far, prompt included, that the engine ran

    @property
    def has_seen_media(self) -> bool:
        """Whether the engine was given the images and videos of the prompt."""
        return bool(self._expanded_prompt)

    @property
    def ids(self) -> SeenIds:
        """The prompt and everything said and heard so far, from which the next turn is generated."""
        return SeenIds((*self.prompt_ids, *self.response_ids), self.images)

    def say(self, turn: Turn, *, trained: bool = True) -> None:
        """Adds a turn of the policy. Its tokens are trained on, or with trained=False only read and scored."""
        if not isinstance(turn, Turn):
            raise ValueError(
                f"say() takes the Turn that `await engine.generate(episode.ids)` returns, not {shown(turn)}. What "
                "the policy did not say goes to hear(), as tokens."
            )
        if trained and not turn.is_trainable:
            raise ValueError(
                "A turn of another temperature than the run's, or of another adapter than the policy's, cannot be "
                "trained: its logprobs are of another distribution. Use it as a baseline or a judgement by say(turn, "
                "trained=False), or as what somebody else says by hear(turn.token_ids)."
            )
        if turn.prompt_ids and turn.prompt_ids != self.ids:
            raise _other_tokens(turn.prompt_ids, self.ids)
        if turn.routing is not None:
            self._add_routing(turn.routing)
        if turn.expanded_ids:
            self._expanded_prompt = self._without_response(turn.expanded_ids)
        is_all = not self.response_ids
        self.turns.append(len(self.response_ids))
        self._add(turn.token_ids, trained, turn.logprobs, turn.versions)
        self.finish_reason = turn.finish_reason
        self._only_text = turn.text if is_all else None

    def hear(self, token_ids: Sequence[int]) -> None:
        """Adds tokens of a tool, a user or an environment and the images among them; they are read, not trained on."""
        ids = as_ids(token_ids, "hear()")
        self.images += images_of(token_ids)
        version = self._versions[-1] if self._versions else 0
        self._add(ids, False, (0.0,) * len(ids), (version,) * len(ids))
        self._only_text = None

    def end_at_max_turns(self) -> None:
        """Records that no further turn is allowed; an episode whose last turn was cut off stays a truncated one."""
        if self.finish_reason != "length":
            self.finish_reason = "turns"

    def drop_pictures(self) -> None:
        """Frees the pixels of the images, which only further turns need; their files stay."""
        self.images = [replace(image, picture=None) for image in self.images]

    def earn(self, reward: float) -> None:
        """Adds the reward that the last turn has earned to the episode's reward (--algorithm.reward_at turns)."""
        if not self.turns:
            raise ValueError("No turn has been said that could earn a reward: call say() before earn().")
        self.turn_rewards += [0.0] * (len(self.turns) - len(self.turn_rewards))
        self.turn_rewards[-1] += reward
        self.reward = (self.reward or 0.0) + reward

    def _add(self, ids: Sequence[int], own: bool, logprobs: Sequence[float], versions: Sequence[int]) -> None:
        self.response_ids += ids
        self._own += [own] * len(ids)
        self._logprobs += logprobs
        self._versions += versions

    def _add_routing(self, routing: NDArray[np.int16]) -> None:
        """Adds the experts of the tokens since the last turn; those of earlier tokens stay as they were sampled."""
        self._routing = routing if self._routing is None else np.append(self._routing, routing[len(self._routing) :], 0)

    def _without_response(self, expanded_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the prompt of the ids that an engine has expanded; raises ValueError for another response."""
        response = _repeated(self.response_ids, self._counts())
        end = len(expanded_ids) - len(response)
        if self.images and expanded_ids[end:] != response:
            raise ValueError(
                "The engine and the trainer expand an image of the episode in different ways. Give both the same "
                "processor settings."
            )
        return expanded_ids[:end]

    def _counts(self) -> list[int]:
        """Returns how many tokens each id of the response becomes in the model; nothing if each is one."""
        if len(self.images) == self._num_in_prompt:
            return []
        return token_counts(self.response_ids, self.images[self._num_in_prompt :])

    def count(self, name: str, amount: float = 1) -> None:
        """Adds an amount to a number that the step reports as episode/NAME, summed over its samples."""
        if name in _TAKEN:
            raise ValueError(f"episode/{name} is a metric of the run itself: count under another name.")
        self.numbers[name] = self.numbers.get(name, 0.0) + amount

    def require_rewards(self) -> None:
        """Raises ValueError if a reward is no number, such as a coroutine without its await."""
        for reward in (self.reward, *self.turn_rewards):
            if reward is not None:
                _number(reward)

    def sample(self, prompt: Prompt, position: int, sample_index: int, tokenizer: Any) -> Sample:
        """Returns the episode as a Sample; its numbers become Python's, as checkpoints hold no others."""
        counts = self._counts()
        starts = list(accumulate(counts, initial=0))
        return Sample(
            prompt=prompt,
            position=position,
            sample_index=sample_index,
            response_ids=_repeated(self.response_ids, counts),
            sampler_logprobs=_repeated(self._logprobs, counts),
            versions=_repeated(self._versions, counts),
            finish_reason=self.finish_reason,
            text=self._text(tokenizer),
            prompt_ids=self._expanded_prompt or self.prompt_ids,
            own=() if all(self._own) else _repeated(self._own, counts),
            images=tuple(image.content for image in self.images),
            turns=tuple(starts[turn] for turn in self.turns) if counts else tuple(self.turns),
            reward=None if self.reward is None else _number(self.reward),
            turn_rewards=tuple(map(_number, self.turn_rewards)),
            numbers={name: float(amount) for name, amount in self.numbers.items()},
            is_scored=self.is_scored,
            routing=self._routing,
            branches=tuple(
                branch.sample(prompt, position, index, tokenizer)
                for index, branch in zip(branch_indices(sample_index), self.branches, strict=False)
            ),
        )

    def _text(self, tokenizer: Any) -> str:
        if self._only_text is not None:
            return self._only_text
        text: str = tokenizer.decode(self.response_ids, skip_special_tokens=True)
        return text


def episode_of_several(episodes: Sequence[Episode]) -> Episode:
    """Returns the first of several conversations that share one reward, with the others as its branches."""
    if not episodes:
        raise ValueError("A workflow returned an empty list of episodes. Return None to reject the sample.")
    first, *others = episodes
    first.branches += others
    return first


def as_ids(given: Any, what: str) -> tuple[int, ...]:
    """Returns ids of tokens as Python's integers; raises ValueError for a text and for anything else that is none."""
    if isinstance(given, str | bytes):
        raise ValueError(
            f"{what} takes the ids of tokens, not the text {given[:40]!r}. engine.encode(text) gives those of a text, "
            "engine.encode_reply(text, after=turn) those of a message."
        )
    try:
        return tuple(map(index, given))
    except TypeError as error:
        raise ValueError(
            f"{what} takes the ids of tokens, one sequence of integers, not {shown(given)}: {error}."
        ) from None


def _repeated(values: Sequence[T], counts: Sequence[int]) -> tuple[T, ...]:
    """Returns each value as often as its id becomes tokens in the model; without counts, once."""
    if not counts:
        return tuple(values)
    return tuple(value for value, count in zip(values, counts, strict=True) for _ in range(count))


def _number(reward: Any) -> float:
    if isinstance(reward, str | bytes):
        raise ValueError(f"The reward of an episode is the text {reward!r}. It must be a number.")
    try:
        return float(reward)
    except (TypeError, ValueError, RuntimeError):  # the last of a tensor of several numbers
        raise ValueError(f"The reward of an episode is {shown(reward)}. It must be a number.") from None


def shown(given: Any) -> str:
    """Returns a wrong value for an error message, with what is missing before a coroutine."""
    if isawaitable(given):
        return f"{given!r}: write `await` before the call"
    text = repr(given)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _other_tokens(given: tuple[int, ...], own: tuple[int, ...]) -> ValueError:
    place = next((i for i, pair in enumerate(zip(given, own, strict=False)) if pair[0] != pair[1]), -1)
    where = f"token {place} was {given[place]} there and is {own[place]} here" if place >= 0 else "their lengths differ"
    return ValueError(
        f"This turn was generated from {len(given)} other tokens than the {len(own)} of the episode: {where}. Text "
        "that is tokenised again has other tokens: generate from episode.ids, and let it hear() what is new."
    )
