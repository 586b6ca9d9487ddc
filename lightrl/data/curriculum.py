"""Draws prompts with weights that depend on the results so far (--data.curriculum)."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from lightrl.data.sampler import Draws
from lightrl.imports import place_of
from lightrl.records import Prompt
from lightrl.seeding import mix_seed

_DRAW_STREAM = 0x4355525249  # separates these random draws from all others of the same seed
_MAX_TRIES = 64  # attempts to draw a prompt that the batch does not contain yet
BUILTIN_CURRICULA = {"half_solved": "lightrl.data.curriculum:half_solved"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptResult:
    """The results of a prompt so far."""

    num_groups: int
    mean: float  # of the mean rewards of its groups
    last: float  # mean reward of the newest group
    step: int  # of the newest group


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Everything that a curriculum may depend on. It is equal on all ranks, and after a resume."""

    step: int  # number of the next step
    prompts: Sequence[Prompt]  # the whole data set
    results: Mapping[int, PromptResult]  # by index in the data set; without prompts that were never finished


Weigh = Callable[[Progress], Sequence[float]]  # one weight for each prompt of the data set; 0: do not draw it now


def require_equal(fingerprints: Sequence[int | None]) -> None:
    """Raises ValueError if a curriculum gave ranks different weights, so that each drew prompts of its own."""
    by_rank = {rank: item for rank, item in enumerate(fingerprints) if item is not None}
    if len(set(by_rank.values())) > 1:
        first = min(by_rank)
        others = ", ".join(str(rank) for rank, item in by_rank.items() if item != by_rank[first])
        raise ValueError(
            f"--data.curriculum gave other weights on rank {others} than on rank {first}, from equal results. It must "
            "depend on its argument alone: on no rank, time, random number or earlier call."
        )


def half_solved(progress: Progress) -> list[float]:
    """Prefers prompts that are solved about half the time, and new ones as much; rewards must be from 0 to 1."""
    weights = [1.0] * len(progress.prompts)
    for index, result in progress.results.items():
        share = min(1.0, max(0.0, result.last))
        weights[index] = max(0.05, 4 * share * (1 - share))
    return weights


class Curriculum(Draws):
    """Gives each ticket a prompt, the same on all ranks. It takes the place of data.sampler.PromptSampler.

    A draw depends on seed, ticket and weights. The weights change only between two steps, when results come in. The
    prompts of batch_size consecutive tickets differ if enough prompts have a weight above 0.
    """

    def __init__(self, weigh: Weigh, prompts: Sequence[Prompt], batch_size: int, seed: int) -> None:
        self.batch_size = batch_size
        self.num_drawn = 0
        self._weigh = weigh
        self._prompts = prompts
        self._seed = seed
        self._step = 0
        self._results: dict[int, PromptResult] = {}
        self._chosen: list[int] = []  # indices in the data set, by ticket
        self._bounds: list[float] = []  # cumulative sums of the weights; empty: not computed yet

    def index_at(self, ticket: int) -> int:
        """Returns the data index of a ticket's prompt, which is chosen at the first request."""
        while len(self._chosen) <= ticket:
            self._chosen.append(self._choose(len(self._chosen)))
        return self._chosen[ticket]

    @property
    def fingerprint(self) -> int | None:
        """A number for the weights of the current step, equal on ranks with equal weights; None: not computed here."""
        return hash(tuple(self._bounds)) if self._bounds else None

    def observe(self, step: int, means: Iterable[tuple[int, float]]) -> None:
        """Takes the mean rewards of the step's groups, by data index, on which the next draws depend."""
        self._step, self._bounds = step + 1, []
        for index, mean in means:
            before = self._results.get(index, PromptResult(num_groups=0, mean=0.0, last=0.0, step=0))
            count = before.num_groups + 1
            mean_of_all = before.mean + (mean - before.mean) / count
            self._results[index] = PromptResult(num_groups=count, mean=mean_of_all, last=mean, step=step)

    def _choose(self, ticket: int) -> int:
        bounds = self._bounds = self._bounds or self._weigh_all()
        recent = set(self._chosen[max(0, ticket - self.batch_size + 1) :])
        for attempt in range(_MAX_TRIES):
            share = mix_seed(_DRAW_STREAM, self._seed, ticket, attempt) % 2**53 / 2**53
            index = min(bisect_right(bounds, share * bounds[-1]), len(bounds) - 1)
            if index not in recent:
                break
        return index

    def _weigh_all(self) -> list[float]:
        progress = Progress(step=self._step, prompts=self._prompts, results=self._results)
        given = self._weigh(progress)
        if not isinstance(given, Iterable):
            raise ValueError(
                f"--data.curriculum returned {given!r}{place_of(self._weigh)}. It must return a weight for each of the "
                f"{len(self._prompts)} prompts of the data set."
            )
        weights = [float(weight) for weight in given]
        if len(weights) != len(self._prompts) or not all(0 <= weight < math.inf for weight in weights):
            raise ValueError(_describe_bad(weights, len(self._prompts)))
        bounds = list(accumulate(weights))
        if not bounds[-1] > 0:
            raise ValueError(_describe_bad(weights, len(self._prompts)))
        while weights[-1] == 0:  # rounding must not lead to a prompt of weight 0 at the end
            weights.pop(), bounds.pop()
        return bounds

    # ---- Checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the results and choices as plain numbers."""
        return {
            "num_drawn": self.num_drawn,
            "num_prompts_in_data": len(self._prompts),
            "step": self._step,
            "chosen": list(self._chosen),
            "results": [
                [index, item.num_groups, item.mean, item.last, item.step] for index, item in self._results.items()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state; raises ValueError if the saved run had no curriculum, or other data."""
        if "results" not in state:
            raise ValueError(
                "The checkpoint is of a run without --data.curriculum: give the same options, or start a new run."
            )
        saved, now = state.get("num_prompts_in_data", len(self._prompts)), len(self._prompts)
        if saved != now:
            raise ValueError(
                f"The saved curriculum has results of {saved} prompts, and the data has {now}: they would count for "
                "other prompts. Resume with the same data, or start a new run."
            )
        self.num_drawn, self._step = int(state["num_drawn"]), int(state["step"])
        self._chosen, self._bounds = [int(index) for index in state["chosen"]], []
        self._results = {
            int(index): PromptResult(num_groups=int(count), mean=float(mean), last=float(last), step=int(step))
            for index, count, mean, last, step in state["results"]
        }


def _describe_bad(weights: Sequence[float], num_prompts: int) -> str:
    wrong = [weight for weight in weights if not 0 <= weight < math.inf]
    given = f"{len(weights)} weights, " + (f"among them {wrong[0]}" if wrong else f"of the sum {sum(weights):g}")
    return (
        f"--data.curriculum returned {given}, for {num_prompts} prompts: it must return a number of 0 or above for "
        "each prompt of the data set, and one above 0 for some."
    )
