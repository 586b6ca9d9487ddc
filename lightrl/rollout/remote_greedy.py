"""Greedy responses of other ranks, for estimators that compare a reward with theirs (ReMax), with --rollout_ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightrl.engines.link import Link
from lightrl.records import Sample, ScoredGroup
from lightrl.rollout.collector import Prompts
from lightrl.rollout.remote_collector import RemoteCollector

_GREEDY = -1  # index of a greedy response in its group, beside those of the samples


class GreedyRemoteCollector(RemoteCollector):
    """Has the rollout ranks sample as the base does, and respond greedily to the same prompts."""

    def sample_greedily(self, prompts: Prompts) -> list[Sample]:
        """Returns the greedy response to each of this rank's prompts, which is already scored."""
        groups = self._dealt_out(prompts, self._take_greedy)
        made = [(replace(group.samples[0], sample_index=_GREEDY), group.rewards[0]) for group in groups]
        self._rewards |= {sample.key: reward for sample, reward in made}
        return [sample for sample, _ in made]

    def _take_greedy(self, link: Link, first: int, count: int) -> Sequence[ScoredGroup]:
        """Has the rollout ranks answer the prompts that were sampled last."""
        return self._answered(link, {"do": "greedy", "first": first, "prompts": self._drawn(count)})
