"""Schedulers without engines: closed forms, scripted steps, and 300 random schedules that must keep every promise."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from lightrl.rollout.scheduler import (
    AsyncScheduler,
    Rules,
    Scheduler,
    SyncScheduler,
    admissible,
    forced_first,
)

# ---- Closed forms --------------------------------------------------------------------------------------------------


def test_admission_is_the_smaller_of_two_rooms() -> None:
    # (eta + version + 1) B - started = (1 + 3 + 1) 4 - 17 = 3; max_groups - running = 5 - 3 = 2.
    rules = Rules(batch_size=4, max_staleness=1, max_groups=5)
    assert admissible(rules, version=3, started=17, running=3) == 2
    assert admissible(rules, version=3, started=17, running=0) == 3
    assert admissible(rules, version=3, started=25, running=0) == 0
    assert admissible(Rules(batch_size=4), version=3, started=12, running=9) == 4  # eta 0: a batch per version


def test_old_groups_that_need_the_places_come_first() -> None:
    # A batch of 1, bound 3. Tickets 0 to 2 began under version 0 and must be trained in steps 1, 2 and 3; 4 is younger.
    started, rules = {0: 0, 1: 0, 2: 0, 4: 1}, Rules(batch_size=1, max_staleness=3)
    assert forced_first(started, {4}, step=1, rules=rules) is None  # 3 groups would be left for steps 2 and 3
    assert forced_first(started, {2, 4}, step=1, rules=rules) == (2,)
    assert forced_first({0: 0, 1: 0, 4: 1}, {4}, step=1, rules=rules) == (4,)


def test_over_issue_starts_six_for_four_and_carries_two() -> None:
    made = AsyncScheduler(Rules(batch_size=4, max_staleness=1, over_issue=0.5))
    assert made.start(0) == [0, 1, 2, 3, 4, 5]
    made.finish([5, 1, 2])
    assert made.batch(0) is None
    made.finish([4])
    assert made.batch(0) == (1, 2, 4, 5)
    made.take((1, 2, 4, 5))
    assert made.running == [0, 3]
    assert made.start(1) == [6, 7, 8, 9]
    made.finish([6, 7, 8, 9])
    assert made.batch(1) is None  # 0 and 3 are due
    made.finish([0, 3])
    assert made.batch(1) == (0, 3, 6, 7)


def test_a_saved_state_has_what_runs_and_what_is_finished() -> None:
    made, resumed = (AsyncScheduler(Rules(batch_size=2, max_staleness=1, over_issue=1)) for _ in range(2))
    assert made.start(0) == [0, 1, 2, 3]
    made.finish([0, 2, 3])
    made.take((0, 2))
    resumed.load_state_dict(made.state_dict())
    assert (resumed.running, resumed.finished) == ([1], {3})
    assert resumed.start(1) == made.start(1) == [4, 5]  # with 1 and 3 there are four
    resumed.finish([1])
    assert resumed.batch(1) == (1, 3)


def test_lost_groups_are_replaced_until_the_rounds_are_over() -> None:
    made = SyncScheduler(Rules(batch_size=2, max_rounds=2))
    assert made.start(0) == [0, 1]
    made.lose([0])
    assert made.start(0) == []  # 1 still runs: a round ends before the next one begins
    made.finish([1])
    assert made.start(0) == [2]
    made.lose([2])
    assert made.start(0) == [3]
    made.lose([3])
    assert made.start(0) == [4]
    made.lose([4])  # 4 lost = 2 rounds of 2
    assert made.start(0) == []
    assert made.batch(0) == (1,)
    made.take((1,))
    assert made.start(1) == [5, 6]
    assert made.num_started == 4  # two full steps


def test_a_finished_group_that_is_rejected_is_replaced() -> None:
    made = AsyncScheduler(Rules(batch_size=2, max_staleness=1, over_issue=0.1))
    assert made.start(0) == [0, 1, 2]  # 2 x 1.1, rounded up
    made.finish([0, 1])
    made.lose([0])
    assert made.batch(0) is None
    assert made.start(0) == [3]
    made.finish([3])
    assert made.batch(0) == (1, 3)


def test_an_asynchronous_step_that_has_lost_too_many_groups_ends_with_a_batch_at_most() -> None:
    made = AsyncScheduler(Rules(batch_size=1, max_staleness=3, over_issue=3, max_rounds=2))
    assert made.start(0) == [0, 1, 2, 3]
    made.lose([0, 1])
    assert made.start(0) == []
    made.finish([3])
    assert made.batch(0) is None  # 2 still runs
    made.finish([2])
    assert made.batch(0) == (2,)
    made.take((2,))
    assert made.start(1) == [4, 5, 6]


def test_a_ticket_that_does_not_run_is_refused() -> None:
    made = SyncScheduler(Rules(batch_size=1))
    made.start(0)
    made.finish([0])
    with pytest.raises(ValueError, match="Ticket 0 is not running"):
        made.finish([0])
    with pytest.raises(ValueError, match="Ticket 7 is not running"):
        made.lose([7])


# ---- Tail batches --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tail_batch", [-1, 0, 2])
def test_slow_groups_are_trained_once_and_tail_batches_end(tail_batch: int) -> None:
    rules = Rules(batch_size=4, max_staleness=6, over_issue=0.5, tail_batch=tail_batch, tail_after=2)
    made, trained, tails = AsyncScheduler(rules), [], []
    work = {ticket: 9 if ticket % 5 == 0 else 1 for ticket in range(200)}  # every fifth is slow
    waited = Counter[int]()
    for step in range(20):
        made.start(step)
        tails += [step] if made.is_tail(step) else []
        slow = made.slow(step)[:4]
        while (batch := made.batch(step)) is None:
            for ticket in made.may_run(step):
                work[ticket] -= 1
            made.finish([ticket for ticket in made.running if work[ticket] <= 0])
            made.start(step)
            waited[step] += 1
        if tail_batch == 0 or step in tails:
            assert set(slow) <= set(batch)
        if step in tails:
            assert len(slow) >= tail_batch
        made.take(batch)
        trained += batch
    assert bool(tails) == (tail_batch > 0)
    assert len(tails) < 10  # ordinary steps go on between them
    assert max(Counter(trained).values()) == 1
    assert set(range(0, 60, 5)) <= set(trained)


def test_only_its_members_run_in_a_tail_batch() -> None:
    rules = Rules(batch_size=2, max_staleness=5, over_issue=1.0, tail_batch=1, tail_after=1)
    made = AsyncScheduler(rules)
    assert made.start(0) == [0, 1, 2, 3]
    made.finish([1, 2])
    made.take((1, 2))
    assert made.start(1) == []
    assert made.is_tail(1)
    assert made.may_run(1) == [0, 3]
    made.finish([0])
    assert made.may_run(1) == [3]
    made.lose([3])
    assert made.batch(1) is None
    assert made.start(1) == [4]  # no over-issue, yet a whole batch
    assert made.may_run(1) == [4]


def test_a_slow_group_that_is_finished_needs_no_tail_batch() -> None:
    made = AsyncScheduler(Rules(batch_size=1, max_staleness=3, over_issue=1, tail_batch=1, tail_after=1))
    assert made.start(0) == [0, 1]
    made.finish([0, 1])
    made.take((0,))
    assert made.start(1) == [2]
    assert made.slow(1) == [1]
    assert not made.is_tail(1)


def test_a_tail_batch_that_has_lost_too_many_groups_does_not_wait_for_those_that_may_not_run() -> None:
    made = AsyncScheduler(Rules(batch_size=1, max_staleness=4, over_issue=4, tail_batch=1, tail_after=1, max_rounds=2))
    assert made.start(0) == [0, 1, 2, 3, 4]
    made.finish([0])
    made.take((0,))
    made.start(1)
    assert made.is_tail(1)
    made.lose([1])
    made.lose([2])  # 2 rounds of 1
    assert made.batch(1) is None
    assert made.may_run(1) == [3]
    made.finish([3])
    assert made.batch(1) == (3,)  # 4 waits for the next step


# ---- 300 random schedules ------------------------------------------------------------------------------------------


class FirstDone(AsyncScheduler):
    """Takes groups as they finish: what a plain queue does."""

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self.order: list[int] = []

    def finish(self, tickets: Iterable[int]) -> None:
        tickets = list(tickets)
        super().finish(tickets)
        self.order += tickets

    def _choose(self, step: int) -> tuple[int, ...] | None:
        waiting = [ticket for ticket in self.order if ticket in self.finished]
        size = self.rules.batch_size
        return tuple(waiting[:size]) if len(waiting) >= size else None


class DueOnly(AsyncScheduler):
    """Waits for groups in the step in which they become due, and looks no further ahead."""

    def _choose(self, step: int) -> tuple[int, ...] | None:
        due = {ticket for ticket, version in self.started.items() if version <= step - self.rules.max_staleness}
        chosen = (sorted(due & self.finished) + sorted(self.finished - due))[: self.rules.batch_size]
        return tuple(chosen) if len(chosen) == self.rules.batch_size and due <= set(chosen) else None


@dataclass
class Outcome:
    """What a random schedule did."""

    ages: list[int] = field(default_factory=list)
    trained: Counter[int] = field(default_factory=Counter)
    lost: Counter[int] = field(default_factory=Counter)
    is_stuck: bool = False


def play(kind: type[Scheduler], seed: int, num_steps: int = 12) -> Outcome:
    """Plays a random schedule on two ranks that hear the same facts in another order, with kills between steps."""
    draw = random.Random(seed)
    eta = draw.randint(0, 4)
    rules = Rules(
        batch_size=draw.randint(1, 6),
        max_staleness=eta,
        over_issue=draw.choice([0.0, 0.5, 1.0, eta]) if eta else 0.0,
        max_groups=draw.choice([0, 0, draw.randint(1, 8)]),
        tail_batch=draw.choice([-1, -1, 0, draw.randint(1, 3)]),
        tail_after=draw.randint(1, 4),
    )
    slow, failing = draw.choice([0.05, 0.2, 0.5]), draw.choice([0.0, 0.1, 0.3])
    is_continuous = draw.random() < 0.4  # separate ranks: they learn of new weights late
    ranks = [kind(rules), kind(rules)]
    left: dict[int, int] = {}
    made, version = Outcome(), 0
    for step in range(num_steps):
        for _ in range(3000):
            version = min(step, version + draw.randint(0, 1)) if is_continuous and step - version < eta else step
            tickets = ranks[0].start(version)
            assert ranks[1].start(version) == tickets
            left |= {ticket: draw.randint(20, 60) if draw.random() < slow else draw.randint(1, 6) for ticket in tickets}
            batch = ranks[0].batch(step)
            assert ranks[1].batch(step) == batch
            if batch is not None:
                break
            for ticket in ranks[0].may_run(step):
                left[ticket] -= draw.randint(0, 2)  # a stall, or not
            over = [ticket for ticket in ranks[0].running if left[ticket] <= 0]
            draw.shuffle(over)
            lost = [ticket for ticket in over if draw.random() < failing]
            done = [ticket for ticket in over if ticket not in lost]
            for rank, facts in zip(ranks, (done, done if kind is FirstDone else done[::-1]), strict=True):
                rank.finish(facts)
                rank.lose(lost)
            made.lost.update(lost)
        else:
            made.is_stuck = True
            return made
        made.ages += [step - ranks[0].started[ticket] for ticket in batch]
        made.trained.update(batch)
        for rank in ranks:
            rank.take(batch)
        if kind is AsyncScheduler and draw.random() < 0.3:  # a kill; the partial outputs of a restart are kept
            states = [rank.state_dict() for rank in ranks]
            assert states[0] == states[1]
            ranks = [kind(rules), kind(rules)]
            for rank, state in zip(ranks, states, strict=True):
                rank.load_state_dict(state)
    everything = made.trained + made.lost + Counter(list(ranks[0].started))
    assert everything == Counter(range(ranks[0].next_ticket))  # no ticket is forgotten, and none is there twice
    oldest = min(ranks[0].started.values(), default=num_steps)
    assert kind is not AsyncScheduler or num_steps - oldest <= eta  # what is left can be trained in time too
    made.ages = [age - eta for age in made.ages]
    return made


def test_300_random_schedules_keep_every_promise() -> None:
    for seed in range(300):
        made = play(AsyncScheduler, seed)
        assert not made.is_stuck, seed
        assert max(made.ages) <= 0, seed  # never older than the bound, hence trained within bound + 1 steps
        assert max(made.trained.values()) == 1, seed


@pytest.mark.parametrize("variant", [FirstDone, DueOnly])
def test_simpler_rules_break_the_bound(variant: type[Scheduler]) -> None:
    outcomes = [play(variant, seed) for seed in range(100)]
    assert any(made.is_stuck or max(made.ages) > 0 for made in outcomes)


def test_the_oldest_weights_come_first_where_ranks_have_started_out_of_order():
    # Ranks take new weights at different moments: ticket 2 was started under older weights than ticket 1, and at step 3
    # of a bound of 2 it is due.
    started = {0: 1, 1: 2, 2: 1, 3: 2}
    assert forced_first(started, {0, 1, 2, 3}, step=3, rules=Rules(batch_size=2, max_staleness=2)) == (0, 2)
