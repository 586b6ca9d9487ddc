"""Journal: records what an episode has heard from outside, so that its code can be rerun and continue from there.

The code of the episode runs from its beginning, and each call gets the journal's answer, by the number of the call.
What an episode computes between two calls must therefore depend only on what it has heard.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from lightrl.engines.base import Completion

T = TypeVar("T")


@dataclass(slots=True)
class Journal:
    """Everything that one episode has heard from the engine and from tools."""

    ticket: int
    sample_index: int
    start_version: int  # of the weights when the ticket was started
    completions: dict[int, Completion] = field(default_factory=dict)  # by the number of the call
    partials: dict[int, Completion] = field(default_factory=dict)  # of calls that the last phase has stopped halfway
    results: dict[int, Any] = field(default_factory=dict)  # of tools
    num_calls: int = 0  # in the present run of the episode's code
    num_results: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """The name of the episode, unique in the whole run."""
        return (self.ticket, self.sample_index)

    def rewind(self) -> None:
        """Prepares for the episode's code to run from its beginning."""
        self.num_calls = self.num_results = 0

    def forget(self) -> None:
        """Erases the journal for an episode that starts over from its prompt."""
        self.completions, self.partials, self.results = {}, {}, {}
        self.rewind()

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

    def versions_of_calls(self) -> list[Sequence[int]]:
        """Returns the weight versions of each call's tokens; empty for a call that was given up."""
        count = max(self.completions, default=-1) + 1
        return [self.completions[number].versions if number in self.completions else () for number in range(count)]

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
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Journal:
        """Returns the journal that state_dict() saved."""
        return cls(
            state["ticket"],
            state["sample"],
            state["start_version"],
            {int(number): completion_from(item) for number, item in state["completions"].items()},
            {int(number): completion_from(item) for number, item in state["partials"].items()},
            {int(number): item for number, item in state["results"].items()},  # keys in JSON are strings
        )


CURRENT: ContextVar[Journal | None] = ContextVar("journal", default=None)  # of the episode whose code is running


async def remembered(result: Awaitable[T]) -> T:
    """Awaits a tool's result, or returns the one in the episode's journal instead. Results must be plain values.

    Make these calls in the same order each time the episode's code runs.
    """
    journal = CURRENT.get()
    if journal is None:
        return await result
    number = journal.num_results
    journal.num_results += 1
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
