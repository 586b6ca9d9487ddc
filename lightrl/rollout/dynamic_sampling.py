"""Dynamic sampling (DAPO, arXiv:2503.14476): replaces groups of equal rewards, which teach nothing, by other groups.

All ranks base every decision on the same gathered facts, and a group stays on the rank that sampled it. So the batch is
the same at any world size, and all ranks draw the same number of rounds.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightrl.comm import Comm
from lightrl.config import DynamicSamplingConfig
from lightrl.data.sampler import shard
from lightrl.metrics import Statistics
from lightrl.records import Prompt, ScoredGroup
from lightrl.rewards.reward_set import RewardSet
from lightrl.rollout.differing_reward import DifferingReward
from lightrl.rollout.saved_groups import group_from_state, group_state

logger = logging.getLogger(__name__)

DrawGroups = Callable[[int, int], list[ScoredGroup]]  # takes a count and the first position


class DynamicSampling:
    """Fills the batch of each step with groups of unequal rewards, and keeps surplus groups for later steps."""

    def __init__(
        self,
        config: DynamicSamplingConfig,
        *,
        prompts: Sequence[Prompt],
        num_prompts: int,
        comm: Comm,
        statistics: Statistics,
    ) -> None:
        """Takes the whole data set, to which saved groups refer, and the number of groups in a batch of all ranks."""
        self._config = config
        self._prompts = prompts
        self._num_prompts = num_prompts
        self._comm = comm
        self._statistics = statistics
        self._spares: list[ScoredGroup] = []  # of this rank
        self._has_warned = False
        self._differing: DifferingReward | None = None

    def hear(self, rewards: RewardSet) -> None:
        """Listens to the reward that must differ; raises ValueError if the option names none of the run."""
        if self._config.reward:
            self._differing = DifferingReward(self._config.reward, rewards)

    def fill(self, step: int, draw: DrawGroups) -> list[ScoredGroup]:
        """Returns this rank's groups of the batch, which has num_prompts groups, or fewer after the last round.

        Args:
            step: the number of the step, from 0.
            draw: draw(count, first) samples and scores the step's prompts first to first + count - 1 over all ranks,
                and returns this rank's groups. Every rank calls it with the same arguments.
        """
        kept = self._young_spares(step)
        num_kept, num_drawn, num_rounds = self._count(kept), 0, 0
        while num_kept < self._num_prompts and num_rounds < self._config.max_rounds:
            count = math.ceil((self._num_prompts - num_kept) * self._config.oversample)
            if self._differing is not None:
                self._differing.forget()
            drawn = draw(count, num_drawn)
            judged = drawn if self._differing is None else [self._differing.judged(group) for group in drawn]
            self._count_dropped(judged)
            kept += [group for group, one in zip(drawn, judged, strict=True) if one.has_signal]
            num_kept, num_drawn, num_rounds = self._count(kept), num_drawn + count, num_rounds + 1
        chosen = self._choose(kept)
        self._statistics.maximum("dynamic_sampling/rounds", num_rounds)
        self._statistics.maximum("dynamic_sampling/fill", min(1.0, num_kept / self._num_prompts))
        self._statistics.add("dynamic_sampling/carried", sum(group.step < step for group in chosen))
        self._statistics.add("dynamic_sampling/spare", len(self._spares))
        self._warn_if_short(step, num_kept, num_drawn)
        return chosen

    def _count(self, groups: Sequence[ScoredGroup]) -> int:
        return int(self._comm.all_reduce(len(groups), "sum"))

    def _young_spares(self, step: int) -> list[ScoredGroup]:
        young = [group for group in self._spares if step - group.step <= self._config.carry_over]
        self._statistics.add("dynamic_sampling/expired", len(self._spares) - len(young))
        return young

    def _choose(self, kept: list[ScoredGroup]) -> list[ScoredGroup]:
        """Takes the oldest groups of all ranks for the batch and renumbers them; the others become spares."""
        names = sorted(name for part in self._comm.all_gather_object([_name(group) for group in kept]) for name in part)
        positions = {name: position for position, name in enumerate(names[: self._num_prompts])}
        kept = sorted(kept, key=_name)
        self._spares = [group for group in kept if _name(group) not in positions] if self._config.carry_over else []
        return [group.at(positions[_name(group)]) for group in kept if _name(group) in positions]

    def _count_dropped(self, drawn: Sequence[ScoredGroup]) -> None:
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
                "learns from those alone. Watch dynamic_sampling/fill; dropped_easy and dropped_hard say whether the "
                "data are too easy or too hard.",
                *(step + 1, num_drawn, num_kept, self._num_prompts),
            )

    # ---- Checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the spare groups of all ranks as plain values and tensors; every rank calls it."""
        parts = self._comm.all_gather_object(self._spares)
        held = [(group, rank) for rank, part in enumerate(parts) for group in part]
        held.sort(key=lambda pair: _name(pair[0]))
        spares, ranks = [group_state(group) for group, _ in held], [rank for _, rank in held]
        return {"spares": spares, "ranks": ranks, "world": self._comm.world}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Returns the saved spare groups to the ranks that had them; deals them out if there are other ranks now.

        Sums of floating-point numbers depend on which rank has a group.
        """
        spares, rank, world = state["spares"], self._comm.rank, self._comm.world
        if state.get("world") == world:  # missing in checkpoints of older versions
            mine = [item for item, owner in zip(spares, state["ranks"], strict=True) if owner == rank]
        else:
            mine = shard(spares, rank, world)
        self._spares = [group_from_state(item, self._prompts) for item in mine]


def _name(group: ScoredGroup) -> tuple[int, int]:
    """Returns a name for a group that is the same on every rank: the step that sampled it, and its position there."""
    return (group.step, group.samples[0].position)
