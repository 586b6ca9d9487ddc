"""Makes the samples of an asynchronous run again by its schedule, with an engine on the trainer's ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from lightrl.config import RolloutConfig
from lightrl.data.sampler import PromptSampler
from lightrl.engines.base import Completion
from lightrl.engines.colocated import ColocatedEngine
from lightrl.engines.stop_strings import cut_to
from lightrl.metrics import Statistics
from lightrl.records import Prompt, Sample, ScoredGroup
from lightrl.rollout.collector import Collector, Prompts, engine_prompt, sampling_of, seed_of_prompt
from lightrl.rollout.recorded_schedule import RecordedGroup, RecordedSample, digest_of
from lightrl.strategy import StrategyBase

_Name = tuple[int, int]  # ticket and sample


class ReplayedCollector:
    """Replaces the collector of a trainer. At each step it makes the tokens that belong to the weights of that step."""

    def __init__(
        self,
        collector: Collector,
        strategy: StrategyBase,
        schedule: Sequence[Sequence[RecordedGroup]],
        *,
        config: RolloutConfig,
        prompts: Sequence[Prompt],
    ) -> None:
        self._collector = collector
        self._strategy = strategy
        self._config = config
        sampling = sampling_of(config)["sampling"]
        self._sampling = replace(sampling, temperature=config.temperature, max_new_tokens=config.max_new_tokens)
        self._prompts = prompts
        self._sampler = PromptSampler(len(prompts), config.num_prompts, config.seed)
        comm = strategy.comm
        self._batches = [  # of this rank: (position, group)
            [pair for pair in enumerate(batch) if pair[0] % comm.world == comm.rank] for batch in schedule
        ]
        self._made: dict[_Name, Completion] = {}  # the tokens made so far

    def sample(self, prompts: Prompts, *, step: int, group_size: int, temperature: float) -> list[Sample]:
        """Makes all tokens of this step's weights, and returns this rank's samples of the step."""
        if step >= len(self._batches):
            raise ValueError(
                f"The schedule ends after step {len(self._batches)}: give --max_steps {len(self._batches)} at most."
            )
        serving, comm = self._strategy.serving, self._strategy.comm
        with serving.session() as engine, comm.phase("replay", local=True):
            self._make(engine, step)
        with comm.phase("comparison with the schedule", local=True):
            return [sample for position, group in self._batches[step] for sample in self._take(position, group, step)]

    def score(
        self, samples: Sequence[Sample], statistics: Statistics | None = None, *, prefix: str = ""
    ) -> list[float]:
        """Scores the samples again."""
        return self._collector.score(samples, statistics, prefix=prefix)

    def evaluate(self, prompts: Sequence[Prompt], **settings: Any) -> dict[str, float]:
        """Evaluates the prompts as any other run does."""
        return self._collector.evaluate(prompts, **settings)

    def _make(self, engine: ColocatedEngine, version: int) -> None:
        """Makes all tokens that belong to a version of the weights."""
        names: dict[int, _Name] = {}
        without: set[_Name] = set()  # samples without a token, of which the engine only gives the prompt
        for group, sample, total in self._due(version):
            name = (group.ticket, sample.sample_index)
            seed, index = self._seed(group.ticket), sample.sample_index
            params = replace(self._sampling, max_new_tokens=max(1, total), seed=seed, first_sample=index)
            request = engine.submit(engine_prompt(self._prompt(group)), params, self._made.pop(name, None))
            names[request] = name
            if not total:
                without.add(name)
        while engine.has_unfinished():
            for completion in engine.step():
                name = names[completion.request_id]
                self._made[name] = cut_to(completion, 0, "length") if name in without else completion

    def _due(self, version: int) -> Iterator[tuple[RecordedGroup, RecordedSample, int]]:
        """Yields each sample with tokens of this version, and the length of the sample after these tokens."""
        for batch in self._batches[version:]:
            for _, group in batch:
                for sample in group.samples:
                    totals = accumulate(count for _, count in sample.segments)
                    for (made_by, _), total in zip(sample.segments, totals, strict=True):
                        if made_by == version:
                            yield group, sample, total

    def _seed(self, ticket: int) -> int:
        return seed_of_prompt(self._config.seed, *divmod(ticket, self._config.num_prompts))

    def _prompt(self, group: RecordedGroup) -> Prompt:
        return self._prompts[self._sampler.index_at(group.ticket) if group.prompt is None else group.prompt]

    def _take(self, position: int, group: RecordedGroup, step: int) -> list[Sample]:
        made = [self._sample(position, group, sample) for sample in group.samples]
        found = ScoredGroup(samples=tuple(made), rewards=(0.0,) * len(made), step=step)
        if digest_of(found) != group.digest:
            raise ValueError(
                f"Step {step + 1}: the samples of ticket {group.ticket} are not those of the recorded run. Repeat it "
                "with the same model, data, reward and engine, on the same kind of machine. If the losses of the steps "
                "before differ more from step to step, the cause is rounding (docs/async.md)."
            )
        return made

    def _sample(self, position: int, group: RecordedGroup, sample: RecordedSample) -> Sample:
        completion = self._made.pop((group.ticket, sample.sample_index))
        made = self._collector.sample_of(position, self._prompt(group), completion)
        return replace(made, ticket=group.ticket, start_version=group.start_version)
