"""Production of episodes that never stops: agents continue from turn to turn while new weights come in."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from lightrl.alone import Alone
from lightrl.config import RolloutConfig
from lightrl.engines.base import EngineGroup
from lightrl.engines.colocated import ColocatedEngine
from lightrl.engines.link import Link
from lightrl.rollout.episode_collector import EpisodeCollector, EpisodeFailure, EpisodeJob, EpisodeScorer
from lightrl.rollout.journal import Journal
from lightrl.rollout.phases import PhasedDriver
from lightrl.rollout.production import IDLE_S, Made, Production, Running

_Ended = dict[int, Any]  # by sample: an episode, an EpisodeFailure, or None for one that its workflow rejected


class EpisodeProduction(Production):
    """Plays the episodes of groups with the run's workflow. The first rank of an engine's group plays all of them."""

    _collector: EpisodeCollector

    def __init__(
        self, config: RolloutConfig, link: Link, engine: ColocatedEngine, group: EngineGroup, **parts: Any
    ) -> None:
        """Takes the parts of Production; its rewards are separate from those that running episodes ask for."""
        super().__init__(config, link, engine, group, **parts)
        self._scorer = EpisodeScorer(Alone(), parts["rewards"])
        self._driver = PhasedDriver(engine, group)
        self._journals: dict[int, list[Journal]] = {}  # of each group, by ticket
        self._ended: dict[int, _Ended] = {}  # of unfinished groups, by ticket

    def run(self, *arguments: Any) -> None:
        """Produces as Production does; all episodes end when it returns."""
        try:
            super().run(*arguments)
        finally:
            self._driver.close()

    def _submit(self, group: Running) -> None:
        self._play(group, [Journal(group.ticket, index, group.version) for index in range(self._config.group_size)])

    def _go_on(self, group: Running, state: Mapping[str, Any]) -> None:
        self._play(group, [Journal.from_state(item) for item in state["journals"]])

    def _play(self, group: Running, journals: list[Journal]) -> None:
        """Starts the code of a group's episodes, each of which runs as far as its journal has answers."""
        if self._group.rank:
            return
        self._journals[group.ticket], self._ended[group.ticket] = journals, {}
        for journal in journals:
            job = self._job(group, journal.sample_index)
            self._driver.begin(journal, partial(self._collector.play, self._driver, job))

    def _give_up(self, group: Running) -> None:
        """Ends the episodes of a group; the engine drops their requests at its next step."""
        journals = self._journals.pop(group.ticket, ())
        self._ended.pop(group.ticket, None)
        self._driver.end([journal.key for journal in journals])

    def _job(self, group: Running, index: int) -> EpisodeJob:
        seed, size = self._seed(group.ticket), self._config.group_size
        sampling = replace(self._sampling, seed=0)  # the client seeds each turn
        return EpisodeJob(group.ticket, group.prompt, index, seed, sampling, size)

    def _step(self) -> None:
        if not self._groups:
            time.sleep(IDLE_S)
            return
        self._driver.step(1)
        complete = self._group.broadcast(self._take_complete() if self._group.rank == 0 else None)
        for ticket in complete or ():
            group = self._groups[ticket]
            self._end(self._made(group) if self._group.rank == 0 else Made(group, [], []))

    def _take_complete(self) -> list[int]:
        """Returns the tickets of the groups whose last episode has ended."""
        complete = []
        for (ticket, index), made in self._driver.take_ended().items():
            self._ended[ticket][index] = made
            if len(self._ended[ticket]) == self._config.group_size:
                complete.append(ticket)
        return complete

    def _made(self, group: Running) -> Made:
        ended, journals = self._ended.pop(group.ticket), self._journals.pop(group.ticket)
        position = group.ticket % self._config.num_prompts
        samples = [
            replace(
                self._collector.as_sample(self._job(group, index)._replace(position=position), ended[index]),
                ticket=group.ticket,
                start_version=group.version,
            )
            for index in sorted(ended)
        ]
        failure = next((item.details for item in ended.values() if isinstance(item, EpisodeFailure)), "")
        return Made(group, samples, [journal.versions_of_calls() for journal in journals], failure)

    def _states(self) -> list[dict[str, Any]]:
        self._driver.pause(keep=True)
        if self._group.rank:
            return []
        return [
            {
                "ticket": ticket,
                "version": group.version,
                "journals": [journal.state_dict() for journal in self._journals[ticket]],
            }
            for ticket, group in self._groups.items()
        ]
