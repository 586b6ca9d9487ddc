"""Late groups: 300 random schedules, and an engine with which they are dropped alike on any ranks and after a kill."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lightrl.rollout.late_drop import DroppingScheduler
from lightrl.rollout.scheduler import AsyncScheduler, Rules
from lightrl.testing import run_spmd

PROGRAM = Path(__file__).parents[1] / "programs" / "scheduled_program.py"


def test_a_late_group_gives_its_place_to_another() -> None:
    # A batch of 1, a bound of 1, and 2 groups at once. Ticket 0 never ends: step 1 would wait for it, and step 2 may
    # not train it.
    rules = Rules(batch_size=1, max_staleness=1, over_issue=1.0)
    waits, drops = AsyncScheduler(rules), DroppingScheduler(rules)
    for made in (waits, drops):
        assert made.start(0) == [0, 1]
        made.finish([1])
    assert waits.batch(0) == drops.batch(0) == (1,)
    for made in (waits, drops):
        made.take((1,))
        assert made.start(1) == [2]
        made.finish([2])
    assert waits.batch(1) is None
    assert drops.drop_late(1) == []
    assert drops.batch(1) == (2,)
    drops.take((2,))
    assert drops.drop_late(2) == [0]
    assert drops.num_started == 2  # tickets 1 and 2
    assert drops.start(2) == [3, 4]


def test_a_finished_group_that_is_too_old_is_dropped() -> None:
    # A batch of 1 and a bound of 1: three finished groups of version 0 for steps 0 and 1.
    made = DroppingScheduler(Rules(batch_size=1, max_staleness=1, over_issue=2.0))
    made.start(0)
    made.num_started = 1  # as after two groups that were lost
    made.start(0)
    assert list(made.started) == [0, 1, 2]
    made.finish([0, 1, 2])
    for step in (0, 1):
        assert made.drop_late(step) == []
        assert made.batch(step) == (step,)
        made.take((step,))
    assert made.drop_late(2) == [2]
    assert not made.finished


def play(seed: int, num_steps: int = 12) -> Counter[str]:
    """Plays a random schedule on two ranks that hear the same facts in another order, with kills between steps."""
    draw = random.Random(seed)
    eta = draw.randint(1, 4)
    rules = Rules(
        batch_size=draw.randint(1, 6),
        max_staleness=eta,
        over_issue=draw.choice([0.5, 1.0, eta]),
        max_groups=draw.choice([0, 0, draw.randint(1, 8)]),
        on_policy_min_ratio=draw.choice([0.0, 0.0, 0.3, 0.5, 1.0]),
    )
    slow, failing = draw.choice([0.05, 0.2, 0.5]), draw.choice([0.0, 0.1, 0.3])
    ranks = [DroppingScheduler(rules), DroppingScheduler(rules)]
    left: dict[int, int] = {}
    trained: Counter[int] = Counter()
    lost: Counter[int] = Counter()
    dropped: Counter[int] = Counter()
    for step in range(num_steps):
        late = [rank.drop_late(step) for rank in ranks]
        assert late[0] == late[1]
        dropped.update(late[0])
        for _ in range(3000):
            tickets = ranks[0].start(step)
            assert ranks[1].start(step) == tickets
            left |= {ticket: draw.randint(20, 60) if draw.random() < slow else draw.randint(1, 6) for ticket in tickets}
            batch = ranks[0].batch(step)
            assert ranks[1].batch(step) == batch
            if batch is not None:
                break
            for ticket in ranks[0].running:
                left[ticket] -= draw.randint(0, 2)
            over = [ticket for ticket in ranks[0].running if left[ticket] <= 0]
            gone = [ticket for ticket in over if draw.random() < failing]
            done = [ticket for ticket in over if ticket not in gone]
            for rank, facts in zip(ranks, (done, done[::-1]), strict=True):
                rank.finish(facts)
                rank.lose(gone)
            lost.update(gone)
        assert batch is not None, "no step waits for ever"
        assert all(step - ranks[0].started[ticket] <= eta for ticket in batch)
        fresh = sum(ranks[0].started[ticket] == step for ticket in batch)
        assert fresh >= rules.on_policy_min_ratio * len(batch) or len(batch) < rules.batch_size
        trained.update(batch)
        for rank in ranks:
            rank.take(batch)
        if draw.random() < 0.3:  # a kill
            states = [rank.state_dict() for rank in ranks]
            ranks = [DroppingScheduler(rules), DroppingScheduler(rules)]
            for rank, state in zip(ranks, states, strict=True):
                rank.load_state_dict(state)
    everything = trained + lost + dropped + Counter(list(ranks[0].started))
    assert everything == Counter(range(ranks[0].next_ticket))  # each ticket became one thing
    return Counter(trained=trained.total(), dropped=dropped.total())


def test_300_random_schedules_keep_the_bound_and_count_what_they_drop() -> None:
    total: Counter[str] = Counter()
    for seed in range(300):
        total += play(seed)
    assert total["dropped"] > 100
    assert total["trained"] > total["dropped"]


def run(folder: Path, world: int, killed_after: int) -> dict[str, Any]:
    output = folder / f"{world}.json"
    run_spmd(PROGRAM, str(output), str(killed_after), "True", "-1", "drop", world_size=world, timeout_s=200)
    made: dict[str, Any] = json.loads(output.read_text())
    return made


@pytest.mark.slow
def test_late_groups_are_dropped_alike_on_any_ranks_and_after_a_kill(tmp_path: Path) -> None:
    one, two = run(tmp_path, 1, -1), run(tmp_path, 2, 2)
    assert one["batches"] == two["batches"]
    assert one["dropped"] == two["dropped"]
    rows = [(step, row) for step, batch in enumerate(one["batches"]) for row in batch]
    assert max(step - min(row[5]) for step, row in rows) == 1
    trained = {row[2] for _, row in rows}
    running, finished = one["carried"][-1]
    counted = sum(int(item[1]) for item in one["dropped"])
    failed = {ticket for ticket in range(max(running + finished + [*trained]) + 1) if ticket % 7 == 6}
    known = trained | set(running) | set(finished) | failed
    assert counted == max(known) + 1 - len(known)
    assert counted > 0
