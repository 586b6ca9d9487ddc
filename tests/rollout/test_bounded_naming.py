"""Prompts of groups that replace rejected ones: named at once by rank 0, and chosen alike by the other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from store_link import PROMPT, EagerLink

from lightrl.comm import Comm
from lightrl.config import DataConfig, GRPOConfig
from lightrl.data.curriculum import Curriculum
from lightrl.rollout.bounded_collector import BoundedCollector, Tickets
from lightrl.rollout.bounded_drop import DroppingCollector
from lightrl.rollout.bounded_filter import NamingCollector, filtering
from lightrl.rollout.recorded_schedule import ScheduleLog
from lightrl.trainers.scheduled import unequal_rewards

PROMPTS = [PROMPT] * 50
SAME, DIFFERENT = (1.0, 1.0), (0.0, 1.0)


class NamedLink(EagerLink):
    """A link whose other end starts no group before its prompt is named."""

    def allowed(self) -> int:
        named = [prompt for command in self.posted if command["do"] == "name" for prompt in command["prompts"]]
        return min(super().allowed(), len(named))


class Follower(Comm):
    """The comm of another trainer rank, which gets from rank 0 what it has said."""

    def __init__(self, said: list[Any]) -> None:
        super().__init__()
        self._said = iter(said)

    def broadcast_object(self, item: Any, source: int = 0) -> Any:
        return next(self._said)


class Speaker(Comm):
    """The comm of rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[Any] = []

    def broadcast_object(self, item: Any, source: int = 0) -> Any:
        self.said.append(item)
        return item


def collector(comm: Comm, link: NamedLink | None, folder: Path, kind: type[BoundedCollector]) -> tuple[Any, Curriculum]:
    config = GRPOConfig(num_prompts=2, data=DataConfig(curriculum="half_solved"))
    config.rollout.max_staleness = 1
    curriculum = Curriculum(lambda progress: [1.0 + index for index in range(50)], PROMPTS, 2, seed=0)
    parts: dict[str, Any] = {"config": config, "tickets": Tickets(Comm()), "log": ScheduleLog(folder)}
    made = filtering(kind, unequal_rewards, by=NamingCollector)(comm, link, PROMPTS, curriculum, **parts)  # type: ignore[arg-type]
    return made, curriculum


@pytest.mark.parametrize("kind", [BoundedCollector, DroppingCollector])
def test_replacements_have_prompts_that_every_rank_chooses(kind: type[BoundedCollector], tmp_path: Path) -> None:
    link = NamedLink([SAME, DIFFERENT, SAME, SAME, DIFFERENT, DIFFERENT, DIFFERENT, DIFFERENT, DIFFERENT], limit=4)
    comm = Speaker()
    made, curriculum = collector(comm, link, tmp_path, kind)
    samples = made.sample([], step=0, group_size=2, temperature=1.0)
    assert [sample.ticket for sample in samples if sample.sample_index == 0] == [1, 4]
    named = [command["prompts"] for command in link.posted if command["do"] == "name"]
    assert len(named[0]) == 4  # what may be started for the steps 0 and 1
    assert sum(map(len, named)) == 4 + 3  # 3 groups were rejected
    chosen = curriculum.state_dict()["chosen"]
    assert [prompt for part in named for prompt in part] == chosen
    other, followed = collector(Follower(comm.said), None, tmp_path, kind)
    other.sample([], step=0, group_size=2, temperature=1.0)
    assert followed.state_dict()["chosen"] == chosen
    made.sample([], step=1, group_size=2, temperature=1.0)
    assert len(curriculum.state_dict()["chosen"]) == 6 + 3  # of 3 steps, and in the places of the rejected ones
