"""Production of samples that never stops (--rollout.max_staleness above 0): a rollout rank's engine is always busy.

Between two steps of the engine a rank takes new weights, starts groups within the bound on their age, and hands over
those that are finished. Ranks of an engine's group do what its first rank says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from lightrl.comm import Comm
from lightrl.config import RolloutConfig
from lightrl.data.sampler import PromptSampler
from lightrl.engines.base import Completion, EngineGroup, SamplingParams
from lightrl.engines.colocated import ColocatedEngine
from lightrl.engines.link import Command, Link
from lightrl.metrics import Statistics
from lightrl.records import Prompt, Sample, ScoredGroup
from lightrl.rewards.reward_set import RewardSet
from lightrl.rollout.collector import ROLLOUT_STREAM, Collector, Scorer, engine_prompt
from lightrl.rollout.sample_messages import to_bytes
from lightrl.rollout.saved_groups import group_state
from lightrl.seeding import mix_seed

CLAIMS = "claims"  # counter of the groups that were started since the run began or was resumed
FINISHED = "finished"
_IDLE_S = 0.002


class TicketOrder:
    """Names the tickets that are still to be made, in order: all from the first one on but those that were used."""

    def __init__(self, first: int, used: Sequence[int]) -> None:
        self._tickets: list[int] = []
        self._rest = self._unused(first, frozenset(used))

    @staticmethod
    def _unused(first: int, used: frozenset[int]) -> Iterator[int]:
        ticket = first
        while True:
            if ticket not in used:
                yield ticket
            ticket += 1

    def __getitem__(self, number: int) -> int:
        """Returns the ticket that is claimed as this one, counted from 0."""
        while len(self._tickets) <= number:
            self._tickets.append(next(self._rest))
        return self._tickets[number]


@dataclass(slots=True)
class _Running:
    """A group on its way through the engine."""

    number: int  # of the claim
    ticket: int
    version: int
    prompt: Prompt
    done: list[Completion]


@dataclass(slots=True)
class _Order:
    """What the ranks of an engine's group do together before the engine's next step."""

    num_commands: int
    claims: list[tuple[int, int]]  # (number of the claim, version at the start)


class Production:
    """Makes and scores groups without end, and carries out the trainer's commands in between."""

    def __init__(
        self,
        config: RolloutConfig,
        link: Link,
        engine: ColocatedEngine,
        group: EngineGroup,
        *,
        prompts: Sequence[Prompt],
        rewards: RewardSet,
        collector: Collector,
    ) -> None:
        self._config = config
        self._link = link
        self._engine = engine
        self._group = group
        self._prompts = prompts
        self._collector = collector
        self._scorer = Scorer(Comm(), rewards)  # of this rank alone
        self._sampler = PromptSampler(len(prompts), config.num_prompts, config.seed)
        self._order: TicketOrder | None = None  # None: the trainer has not said yet where the run begins
        self._first_step = 0
        self._running: dict[int, _Running] = {}  # by request
        self._scoring = ThreadPoolExecutor(1)  # a slow reward must not stop the engine
        self._scored: list[tuple[_Running, Future[bytes]]] = []

    def begin(self, step: int, first: int, used: Sequence[int]) -> None:
        """Starts the run, or goes on with it: behind this step, with the tickets from the first one on but the used."""
        self._order, self._first_step = TicketOrder(first, used), step

    def run(self, carry_out: Callable[[Command], bool]) -> None:
        """Produces until carry_out() of a command returns False."""
        try:
            while True:
                order = self._group.broadcast(self._next_order() if self._group.rank == 0 else None)
                assert order is not None
                for _ in range(order.num_commands):
                    if not carry_out(self._link.next_command()):
                        return
                for number, version in order.claims:
                    self._start(number, version)
                self._step()
        finally:
            self._scoring.shutdown(wait=False, cancel_futures=True)

    def finish_scoring(self) -> None:
        """Waits until no reward is being computed, so that an evaluation can compute its own."""
        for _, future in self._scored:
            future.exception()

    # ---- Between two steps of the engine -----------------------------------------------------------------------

    def _next_order(self) -> _Order:
        self._link.require_others()
        self._hand_over()
        has_command = self._link.has_command()
        return _Order(int(has_command), [] if has_command else self._claims())

    def _claims(self) -> list[tuple[int, int]]:
        """Claims groups: as many as the bound allows under the weights that the engine has, and as it has room for."""
        config, version = self._config, self._engine.version
        if self._order is None or version is None:
            return []
        num_steps = min(config.rollout.max_staleness + version + 1, config.max_steps) - self._first_step
        room = config.num_prompts - len(self._running)
        claims: list[tuple[int, int]] = []
        while len(claims) < room and (number := self._link.claim(CLAIMS, num_steps * config.num_prompts)) is not None:
            self._link.put(f"start/{number}", str(version).encode())
            claims.append((number, version))
        return claims

    def _start(self, number: int, version: int) -> None:
        assert self._order is not None, "a claim comes after the beginning"
        config, ticket = self._config, self._order[number]
        self._sampler.num_drawn = ticket
        (index,) = self._sampler.draw(1)
        prompt = self._prompts[index]
        params = SamplingParams(
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            n=config.group_size,
            seed=mix_seed(ROLLOUT_STREAM, config.seed, *divmod(ticket, config.num_prompts)),
        )
        request = self._engine.submit(engine_prompt(prompt), params)
        self._running[request] = _Running(number, ticket, version, prompt, [])

    def _step(self) -> None:
        if not self._engine.has_unfinished():
            time.sleep(_IDLE_S)
            return
        for completion in self._engine.step():
            running = self._running[completion.request_id]
            running.done.append(completion)
            if len(running.done) == self._config.group_size:
                del self._running[completion.request_id]
                if self._group.rank == 0:
                    self._scored.append((running, self._scoring.submit(self._scored_group, running)))

    def _scored_group(self, running: _Running) -> bytes:
        """Scores a group by itself; the trainer adds the failures of a step's groups up."""
        statistics = Statistics()
        samples = [self._sample(running, item) for item in sorted(running.done, key=lambda item: item.sample_index)]
        rewards = self._scorer.score(samples, statistics)
        step = running.ticket // self._config.num_prompts
        group = ScoredGroup(samples=tuple(samples), rewards=tuple(rewards), step=step)
        return to_bytes({"groups": [group_state(group)], "statistics": statistics.take()})

    def _sample(self, running: _Running, completion: Completion) -> Sample:
        position = running.ticket % self._config.num_prompts
        made = self._collector.sample_of(position, running.prompt, completion)
        return replace(made, ticket=running.ticket, start_version=running.version)

    def _hand_over(self) -> None:
        """Gives the trainer what has been scored."""
        done = [item for item in self._scored if item[1].done()]
        self._scored = [item for item in self._scored if item not in done]
        for running, future in done:
            self._link.put(f"group/{running.number}", future.result())
            place = self._link.count(FINISHED, 1) - 1
            self._link.put(f"finish/{place}", str(running.number).encode())
