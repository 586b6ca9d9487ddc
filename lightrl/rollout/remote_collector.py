"""Samples that other ranks make (--rollout_ranks): the trainer's end of the way that they come."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from lightrl.comm import Comm
from lightrl.data.sampler import Draws
from lightrl.engines.link import Link
from lightrl.metrics import Statistics
from lightrl.records import Prompt, Sample, ScoredGroup
from lightrl.rollout.collector import Prompts
from lightrl.rollout.sample_messages import from_bytes
from lightrl.rollout.saved_groups import group_from_state


class RemoteCollector:
    """Stands in for the collector of a trainer. Rank 0 asks the rollout ranks and deals out what they send."""

    def __init__(self, comm: Comm, link: Link | None, prompts: Sequence[Prompt], sampler: Draws) -> None:
        """link: None on all ranks but the first; prompts: the training data, whose order the sampler decides."""
        self._comm = comm
        self._link = link
        self._prompts = prompts
        self._sampler = sampler
        self._rewards: dict[tuple[int, int], float] = {}  # of the samples given last
        self._statistics: list[Mapping[str, Sequence[Any]]] = []  # of the rollout ranks

    def sample(self, prompts: Prompts, *, step: int, group_size: int, temperature: float) -> list[Sample]:
        """Returns this rank's samples of the step; every rank calls it. They are scored already."""
        groups: list[ScoredGroup] = []
        with self._comm.phase("waiting for samples", local=True):
            if self._link is not None:
                self._link.require_others()  # also where the batch is there already
                groups = self.take(self._link, step)
        outgoing: list[list[ScoredGroup]] = [[] for _ in range(self._comm.world)]
        for position, group in enumerate(groups):
            outgoing[position % self._comm.world].append(group.at(position))
        mine = self._comm.exchange(outgoing)
        self._rewards = {
            sample.key: reward for group in mine for sample, reward in zip(group.samples, group.rewards, strict=True)
        }
        return [sample for group in mine for sample in group.samples]

    def take(self, link: Link, step: int) -> list[ScoredGroup]:
        """Has the rollout ranks make the samples of the step's prompts; returns its groups in their order."""
        end = self._sampler.num_drawn  # the trainer has drawn them already
        drawn = [self._sampler.index_at(ticket) for ticket in range(end - self._sampler.batch_size, end)]
        link.post({"do": "rollout", "step": step, "prompts": drawn})
        groups: list[ScoredGroup] = []
        for content in link.answers():
            answer = from_bytes(content)
            groups += [group_from_state(state, self._prompts) for state in answer["groups"]]
            self._statistics.append(answer["statistics"])
        return sorted(groups, key=lambda group: group.samples[0].position)

    def score(
        self, samples: Sequence[Sample], statistics: Statistics | None = None, *, prefix: str = ""
    ) -> list[float]:
        """Returns the rewards that the samples came with; every rank calls it."""
        received, self._statistics = self._statistics, []
        if statistics is not None:
            for values in received:
                statistics.merge(values)
        return [self._rewards[sample.key] for sample in samples]

    def sample_greedily(self, prompts: Prompts) -> NoReturn:
        """Refuses: estimators that need it are refused before."""
        raise RuntimeError("With --rollout_ranks there are no greedy responses to compare with.")

    def evaluate(self, prompts: Sequence[Prompt], **settings: Any) -> dict[str, float]:
        """Has the rollout ranks evaluate the weights that they were sent last; settings: as of Collector.evaluate()."""
        if not prompts:
            return {}
        metrics: dict[str, float] = {}
        with self._comm.phase("waiting for the evaluation", local=True):
            if self._link is not None:
                self._link.post({"do": "evaluate", "settings": settings})
                metrics = json.loads(self._link.answers()[0])
        return self._comm.broadcast_object(metrics)
