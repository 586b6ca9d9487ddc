"""What the episodes of one prompt share: rewards that compare them, and work that is done only once for all."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from lightrl.data.media import read_media
from lightrl.records import Prompt, Sample
from lightrl.rewards.applicability import fail_unjudged
from lightrl.rewards.reward_set import RewardSet
from lightrl.rewards.scoring import FailureBudget, Outcome, RewardError, has_reward
from lightrl.rollout.journal import for_all_siblings, waiting_for_siblings
from lightrl.rollout.observations import SeenImage


class _Waiting(NamedTuple):
    """A sample whose episode is waiting for its reward."""

    sample: Sample
    answer: asyncio.Future[float]


class Siblings:
    """The running episodes of one prompt."""

    def __init__(self, size: int, rewards: RewardSet | None = None) -> None:
        """Takes the size of the group and the rewards of the run."""
        self.num_running = size
        self._rewards = rewards
        self._waiting: list[_Waiting] = []
        self._shared: dict[str, asyncio.Future[Any]] = {}
        self._media: tuple[tuple[Any, ...], tuple[Any, ...]] | None = None  # images and videos of the prompt
        self._pictures: WeakValueDictionary[bytes, Any] = WeakValueDictionary()  # of images, by their content

    def media(self, prompt: Prompt) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Returns the prompt's images and videos, which are read from their files only once."""
        if self._media is None:
            images, videos = read_media(prompt)
            self._media = (tuple(images), tuple(videos))
        return self._media

    def picture_of(self, image: SeenImage) -> Any:
        """Returns the pixels of an image that an episode has seen: one object if siblings have seen the same image.

        The engine then computes a prompt that siblings have in common once, as where environments begin alike.
        """
        return self._pictures.setdefault(image.content, image.picture)

    async def once(self, name: str, make: Callable[[], Awaitable[Any]]) -> Any:
        """Returns the result of make(), which is called only for the first sibling that asks by this name."""
        if name not in self._shared:
            self._shared[name] = asyncio.ensure_future(for_all_siblings(name, make))
        with waiting_for_siblings():
            return await asyncio.shield(self._shared[name])  # so that a cancelled sibling does not cancel the others

    async def reward(self, sample: Sample, *, alone: bool = False) -> float:
        """Returns the weighted sum of the run's rewards; raises RewardError if one failed.

        A group reward waits until every running sibling has asked for its own reward, unless alone=True.
        """
        rewards = self._rewards
        if rewards is None:
            raise ValueError("There are no rewards here: engine.reward() is for the episodes of a run.")
        if rewards.collective_label is not None:
            raise _cannot_score_alone(rewards.collective_label)
        if alone or not rewards.compares_siblings:
            return (await self._scored(rewards, [sample]))[0]
        if any(other.sample.key == sample.key and not other.answer.done() for other in self._waiting):
            raise ValueError(
                "The episode asks for two rewards at a time, and --reward compares the samples of a group: await one "
                "after the other, so that siblings are compared with siblings."
            )
        waiting = _Waiting(sample, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            await self._score_if_complete(rewards)
            with waiting_for_siblings():
                return await waiting.answer
        finally:
            waiting.answer.cancel()  # if the episode was cancelled

    async def leave(self) -> None:
        """Records that an episode has ended, so that the others no longer wait for it."""
        self.num_running -= 1
        if self._waiting and self._rewards is not None:
            await self._score_if_complete(self._rewards)

    async def _score_if_complete(self, rewards: RewardSet) -> None:
        waiting = [item for item in self._waiting if not item.answer.done()]  # the others were cancelled
        if len(waiting) < self.num_running or not waiting:
            return
        self._waiting = []
        waiting.sort(key=lambda item: item.sample.key)
        try:
            values = await self._scored(rewards, [item.sample for item in waiting])
        except asyncio.CancelledError:  # of this episode: the others are scored once it has left
            self._waiting += waiting
            raise
        except Exception as error:
            for item in waiting:
                if not item.answer.done():
                    item.answer.set_exception(error)
            return
        for item, value in zip(waiting, values, strict=True):
            if not item.answer.done():
                item.answer.set_result(value)

    async def _scored(self, rewards: RewardSet, samples: Sequence[Sample]) -> list[float]:
        budget = FailureBudget(sys.maxsize)  # the episode fails, which the run counts
        outcomes: dict[str, list[Outcome]] = {}
        for item in rewards.rewards:
            outcomes[item.label] = await rewards.arun(item.label, samples, budget)
        fail_unjudged(samples, outcomes, rewards.conditions)
        values = rewards.combine(outcomes).rewards
        for index, value in enumerate(values):
            if not has_reward(value):
                raise next(part[index] for part in outcomes.values() if isinstance(part[index], RewardError))  # type: ignore[misc]
        return values


def _cannot_score_alone(label: str) -> ValueError:
    return ValueError(
        f"The reward {label!r} is scored by all ranks together, which an episode cannot ask for. Leave it to the run, "
        "which scores the samples when all episodes are over, or use another --reward."
    )
