"""The options of a schedule: which prompts are rolled out when, and how old what is learned from may be."""

from __future__ import annotations

from dataclasses import dataclass

from lightrl.config.options import option


@dataclass(kw_only=True, slots=True)
class ScheduleConfig:
    """When samples are started, and when they are trained."""

    over_issue: float = option(0.0, at_least=0, at_most=100)
    """Share of num_prompts that is started in addition to it, such as 0.5. A step ends with the first num_prompts
    groups that may be trained; the others go on in the next step. 0: every step waits for all that it started."""
    partial: bool = True
    """What a group does that goes on in the next step. True: its samples continue where they stopped, under the new
    weights. False: samples that are not finished begin again at their prompt."""
    max_staleness: int = option(0, at_least=0, at_most=1000)
    """Maximum number of steps by which the weights that a group was started under may be behind when it is trained. A
    step waits for a group that would become older; no group is dropped."""
    max_token_staleness: int = option(0, at_least=0)
    """Tokens of weights that are more than this many steps behind are not trained. 0: all are trained."""
    tail_batch: int = option(-1, at_least=-1)
    """What happens to slow groups. -1: nothing special. 0: a step waits for them. N: as soon as there are N of them, a
    step trains the oldest num_prompts groups, which have the engine for themselves."""
    tail_after: int = option(3, at_least=1)
    """Number of steps after its start from which an unfinished group is slow."""
    agree_every: int = option(16, at_least=1)
    """Engine steps between two looks of all ranks at what is finished."""
    max_groups: int = option(0, at_least=0)
    """Maximum number of groups that run at once, over all ranks. 0: no limit."""
    filter: str = ""
    """Function that is given a scored group and says whether it may be trained, as package.module:function, or
    unequal_rewards. A group that it rejects is replaced by another. Empty: all may."""

    @property
    def is_scheduled(self) -> bool:
        """Whether samples are made by a schedule that carries them from step to step."""
        return self.samples_can_be_older or bool(self.filter)

    @property
    def samples_can_be_older(self) -> bool:
        """Whether samples may come from older weights than those of the step that learns from them."""
        return self.over_issue > 0 or self.max_staleness > 0

    def check(self) -> None:
        """Raises ValueError for options that do nothing or contradict each other."""
        if self.over_issue > self.max_staleness:
            raise ValueError(
                f"--rollout.over_issue {self.over_issue:g} starts groups that are trained in a later step, which "
                f"--rollout.max_staleness {self.max_staleness} allows for at most {self.max_staleness} times "
                f"num_prompts of them. Give --rollout.max_staleness {max(1, -int(-self.over_issue // 1))} or more."
            )
        defaults = ScheduleConfig()
        names = ("partial", "max_token_staleness", "tail_batch", "tail_after", "agree_every", "max_groups")
        given = [name for name in names if getattr(self, name) != getattr(defaults, name)]
        if given and not self.is_scheduled:
            raise ValueError(
                f"--rollout.{given[0]} does nothing in a run in which every step waits for all its samples. Give "
                "--rollout.over_issue and --rollout.max_staleness, or leave it out."
            )
        if self.tail_batch == -1 and self.tail_after != defaults.tail_after:
            raise ValueError("--rollout.tail_after does nothing without --rollout.tail_batch of 0 or above.")
