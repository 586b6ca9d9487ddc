"""Dynamic sampling (DAPO, arXiv:2503.14476): a group of equal rewards teaches nothing, so it is replaced by another.

Every decision is made from what all ranks have told each other, and a group keeps the rank that sampled it. So the
batch is the same at any world size, and no rank draws a round that another does not.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lightrl.comm import Comm
from lightrl.config import DynamicSamplingConfig
from lightrl.data.sampler import shard
from lightrl.metrics import Statistics
from lightrl.records import Prompt, Sample, ScoredGroup

logger = logging.getLogger(__name__)

DrawGroups = Callable[[int, int], list[ScoredGroup]]


class DynamicSampling:
    """Fills the batch of each step with groups of unequal rewards, and keeps those it has no place for."""

    def __init__(self, config: DynamicSamplingConfig, *, num_prompts: int, comm: Comm, statistics: Statistics) -> None:
        self._config = config
        self._num_prompts = num_prompts
        self._comm = comm
        self._statistics = statistics
        self._spares: list[ScoredGroup] = []  # of this rank
        self._has_warned = False

    def fill(self, step: int, draw: DrawGroups) -> list[ScoredGroup]:
        """This rank's groups of the step's batch: num_prompts over all ranks, or fewer if the rounds do not suffice.

        Args:
            draw: draw(first, count) samples and scores prompts first to first + count - 1 of the step over all ranks,
                and returns this rank's groups. Every rank calls it with the same numbers.
        """
        kept = self._not_expired(step)
        num_kept, num_drawn, num_rounds = self._count(kept), 0, 0
        while num_kept < self._num_prompts and num_rounds < self._config.max_rounds:
            count = math.ceil((self._num_prompts - num_kept) * self._config.oversample)
            drawn = draw(num_drawn, count)
            self._tell_dropped(drawn)
            kept += [group for group in drawn if group.has_signal]
            num_kept, num_drawn, num_rounds = self._count(kept), num_drawn + count, num_rounds + 1
        chosen = self._deal(kept)
        self._statistics.maximum("dynamic_sampling/rounds", num_rounds)
        self._statistics.maximum("dynamic_sampling/fill", min(1.0, num_kept / self._num_prompts))
        self._statistics.add("dynamic_sampling/carried", sum(group.step < step for group in chosen))
        self._statistics.add("dynamic_sampling/spare", len(self._spares))
        self._warn_if_short(step, num_kept, num_drawn)
        return chosen

    def _count(self, groups: Sequence[ScoredGroup]) -> int:
        return int(self._comm.all_reduce(len(groups), "sum"))

    def _not_expired(self, step: int) -> list[ScoredGroup]:
        young = [group for group in self._spares if step - group.step <= self._config.carry_over]
        self._statistics.add("dynamic_sampling/expired", len(self._spares) - len(young))
        return young

    def _deal(self, kept: list[ScoredGroup]) -> list[ScoredGroup]:
        """The oldest groups get the batch's places, over all ranks, and are renumbered by them; the rest are spares."""
        names = sorted(name for part in self._comm.all_gather_object([_name(group) for group in kept]) for name in part)
        places = {name: place for place, name in enumerate(names[: self._num_prompts])}
        kept = sorted(kept, key=_name)
        self._spares = [group for group in kept if _name(group) not in places] if self._config.carry_over else []
        return [_moved(group, places[_name(group)]) for group in kept if _name(group) in places]

    def _tell_dropped(self, drawn: Sequence[ScoredGroup]) -> None:
        dropped = [group for group in drawn if not group.has_signal]
        self._statistics.add("dynamic_sampling/dropped_easy", sum(group.is_solved for group in dropped))
        self._statistics.add("dynamic_sampling/dropped_hard", sum(not group.is_solved for group in dropped))

    def _warn_if_short(self, step: int, num_kept: int, num_drawn: int) -> None:
        if num_kept >= self._num_prompts or self._has_warned:
            return
        self._has_warned = True
        if self._comm.is_main:
            logger.warning(
                "Step %d: of %d prompts drawn, and those carried over, only %d of %d have unequal rewards. The step "
                "learns from those alone; dynamic_sampling/fill says how many it is from now on. dropped_easy and "
                "dropped_hard say whether the data are too easy or too hard.",
                *(step + 1, num_drawn, num_kept, self._num_prompts),
            )

    # ---- Checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The spare groups of all ranks, as plain values and tensors; every rank calls it."""
        parts = self._comm.all_gather_object(self._spares)
        spares = sorted((group for part in parts for group in part), key=_name)
        return {"spares": [_group_state(group) for group in spares]}

    def load_state_dict(self, state: Mapping[str, Any], prompts: Sequence[Prompt]) -> None:
        """Deals the spare groups out to the ranks that there are now. prompts: the whole data set."""
        spares = shard(state["spares"], self._comm.rank, self._comm.world)
        self._spares = [_group_from(item, prompts) for item in spares]


def _name(group: ScoredGroup) -> tuple[int, int]:
    """One and the same on whatever rank: when it was sampled, and as which of that step."""
    return (group.step, group.samples[0].position)


def _moved(group: ScoredGroup, position: int) -> ScoredGroup:
    return replace(group, samples=tuple(replace(sample, position=position) for sample in group.samples))


def _group_state(group: ScoredGroup) -> dict[str, Any]:
    return {
        "step": group.step,
        "prompt": group.samples[0].prompt.index,
        "position": group.samples[0].position,
        "rewards": torch.tensor(group.rewards, dtype=torch.float64),
        "baseline": group.baseline,
        "prompt_ids": torch.tensor(group.samples[0].prompt_ids, dtype=torch.int64),
        "samples": [_sample_state(sample) for sample in group.samples],
    }


def _sample_state(sample: Sample) -> dict[str, Any]:
    return {
        "index": sample.sample_index,
        "ids": torch.tensor(sample.response_ids, dtype=torch.int64),
        "logprobs": torch.tensor(sample.sampler_logprobs, dtype=torch.float64),
        "versions": torch.tensor(sample.versions, dtype=torch.int64),
        "finish_reason": sample.finish_reason,
        "text": sample.text,
    }


def _group_from(state: Mapping[str, Any], prompts: Sequence[Prompt]) -> ScoredGroup:
    return ScoredGroup(
        step=state["step"],
        rewards=tuple(state["rewards"].tolist()),
        baseline=state["baseline"],
        samples=tuple(
            Sample(
                prompt=prompts[state["prompt"]],
                position=state["position"],
                sample_index=item["index"],
                response_ids=tuple(item["ids"].tolist()),
                sampler_logprobs=tuple(item["logprobs"].tolist()),
                versions=tuple(item["versions"].tolist()),
                finish_reason=item["finish_reason"],
                text=item["text"],
                prompt_ids=tuple(state["prompt_ids"].tolist()),
            )
            for item in state["samples"]
        ),
    )
