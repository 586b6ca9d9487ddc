"""Runs that choose their next prompts by the results so far (--data.curriculum)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from lightrl.config import RolloutConfig
from lightrl.data.curriculum import BUILTIN_CURRICULA, Curriculum, Weigh, require_equal
from lightrl.imports import load_object, require_call
from lightrl.records import Experience, ScoredGroup
from lightrl.rollout.scheduled_collector import Filter
from lightrl.trainers.fit import Trainer
from lightrl.trainers.run import RunContext
from lightrl.trainers.scheduled import ScheduledTrainer, load_filter
from lightrl.trainers.variants import variant


def with_curriculum(trainer_class: Callable[[Any], Trainer]) -> Callable[[Any], Trainer]:
    """Returns the trainer class of a run with a curriculum, made from an ordinary trainer class."""
    return variant(trainer_class, _ScheduledCurriculum, name="Curriculum", option="--data.curriculum")


class CurriculumTrainer(Trainer):
    """Mixin for a trainer's class that tells the curriculum the results of each step's prompts."""

    made_by = "lightrl.trainers.curriculum:with_curriculum"
    curriculum: Curriculum
    prompts: Any  # the trainer's PromptData

    def __init__(self, run: RunContext | RolloutConfig, **parts: Any) -> None:
        config: RolloutConfig = run.config if isinstance(run, RunContext) else run
        self._weigh = load_curriculum(config.data.curriculum)
        self._fresh: list[tuple[int, int, float]] = []  # (ticket, data index, mean reward) of this rank's new groups
        super().__init__(run, **parts)

    def resume(self) -> None:
        """Resumes the run with the curriculum in place of the sampler."""
        config, prompts = self.config, self.prompts.train
        assert isinstance(config, RolloutConfig)
        self.curriculum = Curriculum(self._weigh, prompts, config.num_prompts, config.seed)
        self.prompts.sampler = self.saved["sampler"] = self.curriculum
        super().resume()

    def roll_out(self, count: int, first: int = 0) -> list[ScoredGroup]:
        """Makes groups, and notes all of them if dynamic sampling will drop some."""
        groups: list[ScoredGroup] = super().roll_out(count, first)  # type: ignore[misc]
        if self._drops_groups:
            self._note_all(groups)
        return groups

    def learn_from(self, groups: Sequence[ScoredGroup]) -> list[Experience]:
        """Learns from the groups after telling the curriculum the results of all ranks."""
        if not self._drops_groups:
            self._note_all(groups)
        fresh, self._fresh = self._fresh, []
        everyones = self.strategy.comm.all_gather_object((fresh, self.curriculum.fingerprint))
        require_equal([fingerprint for _, fingerprint in everyones])
        results = sorted(item for part, _ in everyones for item in part)
        self.curriculum.observe(self.step_index, [(index, mean) for _, index, mean in results])
        learned: list[Experience] = super().learn_from(groups)  # type: ignore[misc]
        return learned

    @property
    def _drops_groups(self) -> bool:
        """Whether the trainer has dynamic sampling, which learns from some of the groups that it draws."""
        return getattr(self, "dynamic_sampling", None) is not None

    def _note_all(self, groups: Sequence[ScoredGroup]) -> None:
        for group in groups:
            self.note(group)

    def noting(self, keep: Filter) -> Filter:
        """Returns a filter that also tells the curriculum of the groups that it rejects."""

        def noted(group: ScoredGroup) -> bool:
            is_kept = keep(group)
            if not is_kept:
                self.note(group)
            return is_kept

        return noted

    def note(self, group: ScoredGroup) -> None:
        """Keeps a group's result for the next step."""
        known = [reward for reward in group.rewards if not math.isnan(reward)]
        if known:
            self._fresh.append((group.ticket, group.samples[0].prompt.index, math.fsum(known) / len(known)))


class _ScheduledCurriculum(CurriculumTrainer, ScheduledTrainer):
    """Trainer of a scheduled run whose curriculum also learns of the groups that a filter rejects."""

    def filter_of(self, config: RolloutConfig) -> Filter | None:
        """Returns the run's filter, wrapped to tell the curriculum of the groups that it rejects."""
        keep = load_filter(config)
        return None if keep is None else self.noting(keep)


def load_curriculum(name: str) -> Weigh:
    """Returns the function that --data.curriculum names; raises ValueError if it does not exist."""
    found = load_object(name, builtin=BUILTIN_CURRICULA, what="curriculum", example="my_curriculum")
    if not callable(found):
        raise ValueError(f"--data.curriculum {name}: this is no function of lightrl.data.curriculum.Progress.")
    require_call(f"--data.curriculum {name}", found, "progress")
    weigh: Weigh = found
    return weigh
