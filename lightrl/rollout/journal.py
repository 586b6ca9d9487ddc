"""Journal: records what an episode has heard from outside, so that its code can be rerun and continue from there.

The code of the episode runs from its beginning, and each call gets the journal's answer, by the number of the call.
What an episode computes between two calls must therefore depend only on what it has heard.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from lightrl.engines.base import Completion, EnginePrompt

T = TypeVar("T")
Number = int | str  # of a call in its episode; or NAME/k for the k-th call in engine.once(NAME, ...)


@dataclass(slots=True)
class Journal:
    """Everything that one episode has heard from the engine and from tools."""

    ticket: int
    sample_index: int
    start_version: int  # of the weights when the ticket was started
    completions: dict[Number, Completion] = field(default_factory=dict)  # by the number of the call
    partials: dict[Number, Completion] = field(default_factory=dict)  # of calls that the last phase has stopped halfway
    results: dict[Number, Any] = field(default_factory=dict)  # of tools
    shown: dict[Number, str] = field(default_factory=dict)  # digests of the images and videos that a call showed
    num_calls: int = 0  # in the present run of the episode's code
    num_results: int = 0
    num_waits: int = 0  # for siblings, at the moment
    shared: list[Number] = field(default_factory=list)  # calls for all siblings in this run of the code, in order
    # Of all episodes under way.
    begun: Mapping[tuple[int, int], Journal] = field(default_factory=dict, repr=False, compare=False)

    @property
    def key(self) -> tuple[int, int]:
        """The name of the episode, unique in the whole run."""
        return (self.ticket, self.sample_index)

    def rewind(self) -> None:
        """Prepares for the episode's code to run from its beginning."""
        self.num_calls = self.num_results = self.num_waits = 0
        self.shared = []

    def forget(self) -> None:
        """Erases the journal for an episode that starts over from its prompt."""
        self.completions, self.partials, self.results, self.shown = {}, {}, {}, {}
        self.rewind()

    @property
    def is_among_siblings(self) -> bool:
        """Whether the episode waits for a result that depends on its siblings."""
        return self.num_waits > 0

    @property
    def num_kept_bytes(self) -> int:
        """Bytes of memory that the engine keeps for stopped calls (--rollout.keep_cache)."""
        return sum(item.kept.num_bytes for item in self.partials.values() if item.kept is not None)

    def let_go(self) -> None:
        """Frees the memory of stopped calls; they will continue by computing their tokens again."""
        for item in self.partials.values():
            if item.kept is not None:
                item.kept.take()

    def next_call(self) -> int:
        """Returns the number of the next call of the engine, and counts it."""
        self.num_calls += 1
        return self.num_calls - 1

    def next_result(self) -> Number:
        """Returns the number of the next result of a tool, and counts it."""
        if (shared := next_shared()) is not None:
            return shared
        self.num_results += 1
        return self.num_results - 1

    def holder(self, number: Number) -> Journal:
        """Returns the sibling's journal that holds a call for all siblings; this one if none does."""
        for other in self.begun.values():
            if other.ticket == self.ticket and number in {*other.completions, *other.partials, *other.results}:
                return other
        return self

    def forget_other(self, number: Number, asked: EnginePrompt) -> None:
        """Erases a call whose prompt was another one: its tokens are no answer to what the code asks now.

        The results of tools behind it go with it, since they answer what its tokens asked for.
        """
        digest = _digest(asked) if asked.images or asked.videos else ""
        known = self.shown.get(number, digest)  # checkpoints of older versions have none
        if digest:
            self.shown[number] = digest
        for records in (self.completions, self.partials):
            if number not in records:
                continue
            has_other_ids = tuple(records[number].prompt_token_ids) != tuple(asked.token_ids)
            if known != digest if digest else has_other_ids:  # with images the record has their tokens, too
                del records[number]
                for result in [result for result in self.results if self._is_behind(result, number)]:
                    del self.results[result]

    def _is_behind(self, result: Number, call: Number) -> bool:
        """Returns whether the code asks for a tool's result after this call, which it makes now."""
        if isinstance(result, str) and isinstance(call, str):
            (name, place), (shared, own) = result.rsplit("/", 1), call.rsplit("/", 1)
            return name == shared and int(place) > int(own)
        return isinstance(result, int) and isinstance(call, int) and result >= self.num_results

    def versions_of_calls(self) -> list[Sequence[int] | None]:
        """Returns the weight versions of each call's tokens; None for a call that was given up.

        Calls for all siblings come last, in reverse order, so that the k-th of them has the index -k.
        """
        count = max((number for number in self.completions if isinstance(number, int)), default=-1) + 1
        numbers: list[Number] = [*range(count), *reversed(self.shared)]
        return [self.completions[number].versions if number in self.completions else None for number in numbers]

    # ---- Checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the journal as plain values and tensors."""
        return {
            "ticket": self.ticket,
            "sample": self.sample_index,
            "start_version": self.start_version,
            "completions": {number: completion_state(item) for number, item in self.completions.items()},
            "partials": {number: completion_state(item) for number, item in self.partials.items()},
            "results": dict(self.results),
            "shown": dict(self.shown),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Journal:
        """Returns the journal that state_dict() saved."""
        return cls(
            state["ticket"],
            state["sample"],
            state["start_version"],
            {_number(key): completion_from(item) for key, item in state["completions"].items()},
            {_number(key): completion_from(item) for key, item in state["partials"].items()},
            {_number(key): item for key, item in state["results"].items()},
            {_number(key): item for key, item in state.get("shown", {}).items()},
        )


def _digest(asked: EnginePrompt) -> str:
    """Returns a digest of a prompt with its images and videos, to tell whether a call asks for the same again."""
    shapes = [image.size for image in asked.images], [video.shape for video in asked.videos]
    digest = hashlib.sha256(repr((asked.token_ids, shapes)).encode())
    for item in (*asked.images, *asked.videos):
        digest.update(item.tobytes())
    return digest.hexdigest()


def _number(key: Number) -> Number:
    """Returns the number that a key stands for; keys in JSON are strings."""
    return int(key) if str(key).isdecimal() else key


CURRENT: ContextVar[Journal | None] = ContextVar("journal", default=None)  # of the episode whose code is running
_SHARED: ContextVar[Iterator[str] | None] = ContextVar("shared", default=None)  # numbers, within once()


@contextmanager
def waiting_for_siblings() -> Iterator[None]:
    """Marks the episode whose code is running as waiting for its siblings."""
    journal = CURRENT.get()
    if journal is None:
        yield
        return
    journal.num_waits += 1
    try:
        yield
    finally:
        journal.num_waits -= 1


async def for_all_siblings(name: str, make: Callable[[], Awaitable[T]]) -> T:
    """Awaits work for all siblings: its calls have names, because after a kill another sibling may be the first to ask.

    Otherwise they would count among the calls of the sibling that asked, whose later calls would get wrong answers.
    """
    _SHARED.set(f"{name}/{place}" for place in itertools.count())
    return await make()  # called only now, since it may start tasks


def next_shared() -> str | None:
    """Returns the number of the next call of work for all siblings; None outside such work."""
    numbers = _SHARED.get()
    return None if numbers is None else next(numbers)


async def remembered(result: Awaitable[T]) -> T:
    """Awaits a tool's result, or returns the one in the episode's journal instead. Results must be plain values.

    Make these calls in the same order each time the episode's code runs.
    """
    journal = CURRENT.get()
    if journal is None:
        return await result
    number = journal.next_result()
    if isinstance(number, str):
        journal = journal.holder(number)
    if number in journal.results:
        if hasattr(result, "close"):
            result.close()  # a coroutine that will not run
        known: T = journal.results[number]
        return known
    journal.results[number] = made = await result
    return made


def completion_state(item: Completion) -> dict[str, Any]:
    """Returns a completion as plain values and tensors."""
    return {
        "sample": item.sample_index,
        "prompt": torch.tensor(item.prompt_token_ids, dtype=torch.int64),
        "ids": torch.tensor(item.output_token_ids, dtype=torch.int64),
        "logprobs": torch.tensor(item.logprobs, dtype=torch.float64),
        "versions": torch.tensor(item.versions, dtype=torch.int64),
        "finish_reason": item.finish_reason,
        "routing": None if item.routing is None else torch.from_numpy(item.routing),
    }


def completion_from(state: Mapping[str, Any]) -> Completion:
    """Returns the completion that completion_state() saved."""
    return Completion(
        request_id=-1,
        sample_index=state["sample"],
        prompt_token_ids=tuple(state["prompt"].tolist()),
        output_token_ids=tuple(state["ids"].tolist()),
        logprobs=tuple(state["logprobs"].tolist()),
        versions=tuple(state["versions"].tolist()),
        finish_reason=state["finish_reason"],
        routing=None if state["routing"] is None else state["routing"].numpy(),
    )
