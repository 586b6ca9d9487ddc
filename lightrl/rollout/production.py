"""Production of samples that never stops (--rollout.max_staleness above 0): a rollout rank's engine is always busy.

Between two steps of the engine a rank takes new weights, starts groups within the bound on their age, and hands over
those that are finished. The ranks of an engine's group follow its first rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from lightrl.alone import Alone
from lightrl.config import RolloutConfig
from lightrl.data.sampler import PromptSampler
from lightrl.engines.base import Completion, EngineGroup, SamplingParams
from lightrl.engines.colocated import ColocatedEngine
from lightrl.engines.link import Command, Link
from lightrl.metrics import Statistics
from lightrl.records import Prompt, Sample, ScoredGroup
from lightrl.rewards.components import ComponentKeeper
from lightrl.rewards.reward_set import RewardSet
from lightrl.rollout.collector import Collector, Scorer, engine_prompt, seed_of_prompt
from lightrl.rollout.fresh_share import bounded_rules, num_steps_started
from lightrl.rollout.journal import completion_from, completion_state
from lightrl.rollout.sample_messages import from_bytes, to_bytes
from lightrl.rollout.saved_groups import group_state

CLAIMS = "claims"  # counter of the groups that were started since the run began or was resumed
FINISHED = "finished"
CONTINUED = "continued"  # counter of the groups that were continued from a checkpoint
IDLE_S = 0.002


class TicketOrder:
    """The order of the tickets still to be made: first those unfinished in a checkpoint, then all unused ones."""

    def __init__(self, first: int, used: Sequence[int], begun: Sequence[int] = ()) -> None:
        """Begins after the tickets that were used.

        Args:
            first: The ticket below which all were used.
            used: Used tickets above it.
            begun: Tickets that a checkpoint holds unfinished, in its order.
        """
        self._tickets: list[int] = [*begun]
        self._rest = self._unused(first, frozenset((*used, *begun)))

    @staticmethod
    def _unused(first: int, used: frozenset[int]) -> Iterator[int]:
        ticket = first
        while True:
            if ticket not in used:
                yield ticket
            ticket += 1

    def __getitem__(self, number: int) -> int:
        """Returns the ticket of a claim, counted from 0."""
        while len(self._tickets) <= number:
            self._tickets.append(next(self._rest))
        return self._tickets[number]


@dataclass(slots=True)
class Running:
    """A group that the engine is working on."""

    number: int  # of the claim
    ticket: int
    version: int
    prompt: Prompt
    done: list[Completion] = field(default_factory=list)


@dataclass(slots=True)
class Made:
    """A group whose samples are complete."""

    group: Running
    samples: list[Sample]
    # For each sample and each of its calls of the engine: the versions of the tokens; None for a call given up.
    calls: list[list[Sequence[int] | None]]
    failure: str = ""  # the first traceback of an episode that failed


@dataclass(slots=True)
class _Order:
    """Work that the ranks of an engine's group do together before the engine's next step."""

    num_commands: int
    claims: list[tuple[int, int]]  # (number of the claim, version at the start)


class Production:
    """Makes and scores groups continuously, and carries out the trainer's commands in between."""

    keeper: ComponentKeeper | None = None  # for an estimator that needs each reward by itself

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
        self._scorer = Scorer(Alone(), rewards)  # runs in a thread, which must not wait for other ranks
        self._sampling = replace(
            collector.sampling, max_new_tokens=config.max_new_tokens, temperature=config.temperature
        )
        self._sampler = PromptSampler(len(prompts), config.num_prompts, config.seed)
        self._named: list[int] | None = [] if config.data.curriculum else None  # data indices, by the number of a claim
        self._dropped: set[int] = set()  # numbers of groups that the trainer no longer wants
        self._most_groups = config.num_prompts  # that run here at once
        if config.rollout.max_groups:
            share = config.rollout.max_groups * group.size // link.role.num_rollout
            self._most_groups = min(self._most_groups, max(1, share))
        self._order: TicketOrder | None = None  # None: the trainer has not said yet where the run begins
        self._begun: list[int] = []  # by number: version at the start of each group of the checkpoint
        self._may_go_on = False  # whether some of these may still wait for a rank to continue them
        self._first_step = 0
        self._groups: dict[int, Running] = {}  # by ticket
        self._requests: dict[int, Running] = {}
        self._scoring = ThreadPoolExecutor(1)  # a slow reward must not stop the engine
        self._scored: list[tuple[Made, Future[bytes]]] = []

    def begin(self, command: Command) -> None:
        """Starts the run or continues it, as the trainer's command says."""
        tickets = [ticket for ticket, _ in command["begun"]]
        self._order, self._first_step = TicketOrder(command["first"], command["used"], tickets), command["step"]
        self._begun = [version for _, version in command["begun"]]
        self._may_go_on = bool(self._begun)

    def name(self, command: Command) -> None:
        """Receives the prompts that the trainer has chosen for the next groups."""
        assert self._named is not None, "only a run with a curriculum has them"
        self._named += command["prompts"]

    def drop(self, command: Command) -> None:
        """Ends groups that are too old; others may be started in their place."""
        late = set(command["numbers"])
        self._dropped |= late  # including groups of a checkpoint that no rank has taken yet
        for group in [group for group in self._groups.values() if group.number in late]:
            del self._groups[group.ticket]
            self._give_up(group)

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

    def save(self) -> list[dict[str, Any]]:
        """Hands over finished groups and returns the others as plain values and tensors; these continue to run."""
        states = self._states()
        self.finish_scoring()
        self._hand_over()
        return states if self._group.rank == 0 else []

    # ---- Between two steps of the engine -----------------------------------------------------------------------

    def _next_order(self) -> _Order:
        self._link.require_others()
        self._hand_over()
        has_command = self._link.has_command()
        return _Order(int(has_command), [] if has_command else self._claims())

    def _claims(self) -> list[tuple[int, int]]:
        """Claims as many groups as the bound allows under the engine's weights, and as the engine has room for."""
        config, version = self._config, self._engine.version
        if self._order is None or version is None:
            return []
        num_steps = num_steps_started(bounded_rules(config), version, config.max_steps) - self._first_step
        room = self._most_groups - len(self._groups)
        claims: list[tuple[int, int]] = []
        # With a curriculum, the first names may come only after the weights.
        known = len(self._begun) if self._named is None else min(len(self._begun), len(self._named))
        while self._may_go_on and len(claims) < room:
            if (number := self._link.claim(CONTINUED, known)) is None:
                self._may_go_on = known < len(self._begun)
                break
            claims.append((number, self._begun[number]))
        limit = num_steps * config.num_prompts + len(self._dropped)
        if self._named is not None:
            limit = min(limit, len(self._named))
        while len(claims) < room and (number := self._link.claim(CLAIMS, limit)) is not None:
            self._link.put(f"start/{number}", str(version).encode())
            claims.append((number, version))
        return claims

    def _start(self, number: int, version: int) -> None:
        assert self._order is not None, "a claim comes after the beginning"
        if number in self._dropped:
            return
        ticket = self._order[number]
        group = self._groups[ticket] = Running(number, ticket, version, self._prompt(number, ticket))
        if number < len(self._begun):
            self._go_on(group, from_bytes(self._link.peek(f"begun/{number}")))
        else:
            self._submit(group)

    def _prompt(self, number: int, ticket: int) -> Prompt:
        return self._prompts[self._sampler.index_at(ticket) if self._named is None else self._named[number]]

    def _seed(self, ticket: int) -> int:
        return seed_of_prompt(self._config.seed, *divmod(ticket, self._config.num_prompts))

    def _scored_group(self, made: Made) -> bytes:
        """Scores one group alone; the trainer adds up the failures of a step's groups."""
        statistics = Statistics()
        rewards = self._scorer.score(made.samples, statistics)
        step = made.group.ticket // self._config.num_prompts
        group = ScoredGroup(samples=tuple(made.samples), rewards=tuple(rewards), step=step)
        if self.keeper is not None:
            (group,) = self.keeper.completed([group])
        calls = [[segments(versions, made.group.version) for versions in calls] for calls in made.calls]
        message = {"groups": [group_state(group)], "statistics": statistics.take(), "calls": calls}
        return to_bytes({**message, "failure": made.failure})

    def _end(self, made: Made) -> None:
        """Starts scoring a complete group while the engine keeps running."""
        del self._groups[made.group.ticket]
        if self._group.rank == 0:
            self._scored.append((made, self._scoring.submit(self._scored_group, made)))

    def _hand_over(self) -> None:
        done = [item for item in self._scored if item[1].done()]
        self._scored = [item for item in self._scored if item not in done]
        for made, future in done:
            self._link.put(f"group/{made.group.number}", future.result())
            place = self._link.count(FINISHED, 1) - 1
            self._link.put(f"finish/{place}", str(made.group.number).encode())

    # ---- Samples of one turn -----------------------------------------------------------------------------------

    def _params(self, ticket: int) -> SamplingParams:
        return replace(self._sampling, n=self._config.group_size, seed=self._seed(ticket))

    def _submit(self, group: Running) -> None:
        self._requests[self._engine.submit(engine_prompt(group.prompt), self._params(group.ticket))] = group

    def _give_up(self, group: Running) -> None:
        requests = [request for request, other in self._requests.items() if other is group]
        self._engine.abort(requests)
        for request in requests:
            del self._requests[request]

    def _step(self) -> None:
        if not self._engine.has_unfinished():
            time.sleep(IDLE_S)
            return
        for completion in self._engine.step():
            self._note(self._requests[completion.request_id], completion)

    def _note(self, group: Running, completion: Completion) -> None:
        group.done.append(completion)
        if len(group.done) == self._config.group_size:
            self._requests = {request: other for request, other in self._requests.items() if other is not group}
            ended = sorted(group.done, key=lambda item: item.sample_index)
            samples = [self._sample(group, item) for item in ended]
            self._end(Made(group, samples, [[item.versions] for item in ended]))

    def _sample(self, group: Running, completion: Completion) -> Sample:
        made = self._collector.sample_of(group.ticket % self._config.num_prompts, group.prompt, completion)
        return replace(made, ticket=group.ticket, start_version=group.version)

    def _states(self) -> list[dict[str, Any]]:
        """Stops every sample, returns the groups for a checkpoint, and continues the samples."""
        stopped: dict[int, list[Completion]] = {ticket: [] for ticket in self._groups}
        groups, self._requests = self._requests, {}
        for completion in self._engine.abort():
            group = groups[completion.request_id]
            if completion.finish_reason == "abort":
                stopped[group.ticket].append(completion)
            else:
                self._requests[completion.request_id] = group
                self._note(group, completion)
        states = [
            {
                "ticket": ticket,
                "version": group.version,
                "done": [completion_state(item) for item in group.done],
                "partials": [completion_state(item) for item in stopped[ticket]],
            }
            for ticket, group in self._groups.items()
        ]
        for ticket, group in self._groups.items():
            self._resume(group, stopped[ticket])
        return states

    def _go_on(self, group: Running, state: Mapping[str, Any]) -> None:
        """Continues a group of a checkpoint."""
        group.done = [completion_from(item) for item in state["done"]]
        self._resume(group, [completion_from(item) for item in state["partials"]])

    def _resume(self, group: Running, partials: Sequence[Completion]) -> None:
        for partial in partials:
            request = self._engine.submit(engine_prompt(group.prompt), self._params(group.ticket), partial)
            self._requests[request] = group


def segments(versions: Sequence[int] | None, start_version: int) -> list[list[int]]:
    """Compresses the versions of a call's tokens to runs, [version, number of tokens], in order.

    A call that was given up, None, has no run. One without a token, which an engine cuts before the placeholder of an
    image, has the run [start_version, 0], where start_version is that of its group.
    """
    if versions is None:
        return []
    return [[version, len([*part])] for version, part in groupby(versions)] or [[start_version, 0]]
