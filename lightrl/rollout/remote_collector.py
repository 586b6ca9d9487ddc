"""The trainer's side of sampling on other ranks (--rollout_ranks)."""

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
    """Replaces the collector of a trainer: rank 0 requests samples from the rollout ranks and deals them out."""

    completes_groups = True  # with what each reward gave, if the estimator needs it

    def __init__(self, comm: Comm, link: Link | None, prompts: Sequence[Prompt], sampler: Draws) -> None:
        """Takes the link (None except on rank 0), and the training prompts, whose order the sampler decides."""
        self._comm = comm
        self._link = link
        self._prompts = prompts
        self._sampler = sampler
        self._rewards: dict[tuple[int, int], float] = {}  # of the samples returned last
        self._statistics: list[Mapping[str, Sequence[Any]]] = []  # of the rollout ranks

    def sample(self, prompts: Prompts, *, step: int, group_size: int, temperature: float) -> list[Sample]:
        """Returns this rank's samples of the step, which are already scored; every rank calls it."""
        first, count = prompts[0][0] if prompts else 0, int(self._comm.all_reduce(len(prompts), "sum"))
        groups: list[ScoredGroup] = []
        with self._comm.phase("waiting for samples", local=True):
            if self._link is not None:
                self._link.require_others()  # even if the batch is already there
                groups = self.take(self._link, step, first, count)
        outgoing: list[list[ScoredGroup]] = [[] for _ in range(self._comm.world)]
        for position, group in enumerate(groups, start=first):
            outgoing[position % self._comm.world].append(group.at(position))
        mine = self._comm.exchange(outgoing)
        self._rewards = {
            sample.key: reward for group in mine for sample, reward in zip(group.samples, group.rewards, strict=True)
        }
        return [sample for group in mine for sample in group.samples]

    def take(self, link: Link, step: int, first: int, count: int) -> list[ScoredGroup]:
        """Has the rollout ranks sample the step's prompts first, first + 1, ..., which the trainer drew last.

        Returns the groups in the order of the prompts.
        """
        end = self._sampler.num_drawn
        drawn = [self._sampler.index_at(ticket) for ticket in range(end - count, end)]
        link.post({"do": "rollout", "step": step, "first": first, "prompts": drawn})
        groups: list[ScoredGroup] = []
        for content in link.answers():
            answer = from_bytes(content)
            groups += [group_from_state(state, self._prompts) for state in answer["groups"]]
            self._statistics.append(answer["statistics"])
        return sorted(groups, key=lambda group: group.samples[0].position)

    def score(
        self, samples: Sequence[Sample], statistics: Statistics | None = None, *, prefix: str = ""
    ) -> list[float]:
        """Returns the rewards that came with the samples; every rank calls it."""
        received, self._statistics = self._statistics, []
        if statistics is not None:
            for values in received:
                statistics.merge(values)
        return [self._rewards[sample.key] for sample in samples]

    def sample_greedily(self, prompts: Prompts) -> NoReturn:
        """Raises an error; estimators that need greedy responses are refused earlier."""
        raise RuntimeError("With --rollout_ranks there are no greedy responses to compare with.")

    def evaluate(self, prompts: Sequence[Prompt], **settings: Any) -> dict[str, float]:
        """Has the rollout ranks evaluate the weights that they received last; settings as for Collector.evaluate()."""
        if not prompts:
            return {}
        metrics: dict[str, float] = {}
        with self._comm.phase("waiting for the evaluation", local=True):
            if self._link is not None:
                self._link.post({"do": "evaluate", "settings": settings})
                metrics = json.loads(self._link.answers()[0])
        return self._comm.broadcast_object(metrics)
