"""The trainer's side of sampling on other ranks (--rollout_ranks)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightrl.comm import Comm
from lightrl.data.sampler import Draws
from lightrl.engines.link import Command, Link
from lightrl.metrics import Statistics
from lightrl.records import Prompt, Sample, ScoredGroup
from lightrl.rollout.collector import Prompts
from lightrl.rollout.sample_messages import from_bytes
from lightrl.rollout.saved_groups import group_from_state

_GREEDY = -1  # index of a greedy response in its group, beside those of the samples


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
        mine = self._dealt_out(prompts, lambda link, first, count: self.take(link, step, first, count))
        self._rewards = {
            sample.key: reward for group in mine for sample, reward in zip(group.samples, group.rewards, strict=True)
        }
        return [sample for group in mine for sample in group.samples]

    def _dealt_out(
        self, prompts: Prompts, take: Callable[[Link, int, int], Sequence[ScoredGroup]]
    ) -> list[ScoredGroup]:
        """Returns this rank's share of the groups that take(link, first, count) gives rank 0; every rank calls it."""
        first, count = prompts[0][0] if prompts else 0, int(self._comm.all_reduce(len(prompts), "sum"))
        groups: Sequence[ScoredGroup] = ()
        with self._comm.phase("waiting for samples", local=True):
            if self._link is not None:
                self._link.require_others()  # even if the batch is already there
                groups = take(self._link, first, count)
        outgoing: list[list[ScoredGroup]] = [[] for _ in range(self._comm.world)]
        for position, group in enumerate(groups, start=first):
            outgoing[position % self._comm.world].append(group.at(position))
        return self._comm.exchange(outgoing)

    def take(self, link: Link, step: int, first: int, count: int) -> list[ScoredGroup]:
        """Has the rollout ranks sample the step's prompts first, first + 1, ..., which the trainer drew last.

        Returns the groups in the order of the prompts.
        """
        return self._answered(link, {"do": "rollout", "step": step, "first": first, "prompts": self._drawn(count)})

    def _drawn(self, count: int) -> list[int]:
        """Returns the data indices of the prompts that the trainer drew last."""
        end = self._sampler.num_drawn
        return [self._sampler.index_at(ticket) for ticket in range(end - count, end)]

    def _answered(self, link: Link, command: Command) -> list[ScoredGroup]:
        """Has the rollout ranks carry out a command, and returns their groups in the order of the prompts."""
        link.post(command)
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

    def sample_greedily(self, prompts: Prompts) -> list[Sample]:
        """Raises an error: GreedyRemoteCollector has greedy responses, where an estimator needs them."""
        raise RuntimeError("This collector has no greedy responses to compare with.")

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


class GreedyRemoteCollector(RemoteCollector):
    """Has the rollout ranks respond greedily too, for estimators that compare with such responses (ReMax)."""

    def sample_greedily(self, prompts: Prompts) -> list[Sample]:
        """Returns the greedy response to each of this rank's prompts, which is already scored."""
        groups = self._dealt_out(prompts, self._take_greedy)
        made = [(replace(group.samples[0], sample_index=_GREEDY), group.rewards[0]) for group in groups]
        self._rewards |= {sample.key: reward for sample, reward in made}
        return [sample for sample, _ in made]

    def _take_greedy(self, link: Link, first: int, count: int) -> Sequence[ScoredGroup]:
        """Has the rollout ranks answer the prompts that were sampled last."""
        return self._answered(link, {"do": "greedy", "first": first, "prompts": self._drawn(count)})
