"""Real worker processes: what hangs, crashes or eats memory costs its own sample only."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from reward_samples import answered, doing_as_told, forgiving, meeting, patient
from reward_samples import run as run_reward

from lightrl.rewards import NoVerdictError, RewardError, load_reward, score, worker_pool
from lightrl.rewards.messages import packed_for_worker
from lightrl.rewards.reward_set import make_runner
from lightrl.rewards.scoring import FailureBudget, Isolation, Outcome, ScoringLimits, kind_of
from lightrl.rewards.worker_pool import WorkerError, WorkerPool


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(partial(doing_as_told, scale=2.0), Isolation(timeout_s=1.5), num_workers=1, timeout_s=60)
    yield pool
    pool.close()


def run(pool: WorkerPool, *texts: str) -> list[Any]:
    return list(pool.run([answered(text) for text in texts]))


def test_values_come_in_order_and_errors_in_their_place(pool: WorkerPool) -> None:
    two, four, error, nan, unsure = run(pool, "1", "2", "one", "nan", "no verdict")
    assert (two, four) == (2.0, 4.0)
    assert nan != nan
    assert isinstance(error, WorkerError)
    assert str(error).startswith("ValueError: could not convert")
    assert "in doing_as_told" in str(error.__cause__)
    assert isinstance(unsure, NoVerdictError)
    assert run(pool) == []


def test_what_hangs_crashes_or_eats_memory_costs_only_itself(pool: WorkerPool) -> None:
    sleep, eat, crash, one, stuck, two = run(pool, "sleep", "eat", "crash", "1", "hang in C", "2")
    assert "no result after 1.5 s" in str(sleep)
    assert "MemoryError" in str(eat)
    assert "ended with exit code 7" in str(crash)
    assert "its process was killed" in str(stuck)
    assert (one, two) == (2.0, 4.0)


def test_the_runs_own_limit_counts_and_may_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    limited, free = (WorkerPool(doing_as_told, Isolation(), num_workers=1, timeout_s=limit) for limit in (0.3, 0))
    try:
        assert "no result after 0.3 s" in str(run(limited, "sleep")[0])
        monkeypatch.setattr(worker_pool, "_GRACE_S", 0.0)
        assert run(free, "1") == [1.0]
    finally:
        limited.close()
        free.close()


def test_no_verdict_is_no_failure_of_an_isolated_reward() -> None:
    outcomes, budget = run_reward(doing_as_told, [answered("no verdict"), answered("1")])
    assert outcomes[0].is_no_verdict
    assert outcomes[1] == 1.0
    assert (len(budget.no_verdicts), len(budget.failures)) == (1, 0)


def test_the_rest_is_not_waited_for_past_the_budget() -> None:
    started = time.monotonic()
    with pytest.raises(RewardError, match="ValueError: could not convert"):
        score(patient, [answered("x"), *[answered("sleep")] * 6])  # 100 s each
    assert time.monotonic() - started < 90


def test_a_worker_of_a_run_that_was_given_up_is_not_asked_before_it_is_done() -> None:
    pool = WorkerPool(doing_as_told, Isolation(timeout_s=1.0), num_workers=2, timeout_s=60)
    try:
        given_up = pool.run([answered("1"), answered("sleep"), answered("sleep"), answered("sleep")])
        assert next(given_up) == 1.0
        given_up.close()  # type: ignore[attr-defined]
        assert run(pool, "2", "3", "4") == [2.0, 3.0, 4.0]
    finally:
        pool.close()


def test_episodes_that_ask_at_the_same_time_are_scored_at_the_same_time(tmp_path: Path) -> None:
    reward = partial(meeting, folder=str(tmp_path), count=2)
    runner = make_runner(reward, ScoringLimits(timeout_s=60, num_workers=2))

    async def both() -> list[list[Outcome]]:
        return await asyncio.gather(*(runner.arun([answered(text)], FailureBudget()) for text in "ab"))

    try:
        assert asyncio.run(both()) == [[1.0], [1.0]]
    finally:
        runner.close()


def test_no_process_is_started_while_another_is_idle() -> None:
    pool = WorkerPool(doing_as_told, Isolation(), num_workers=4, timeout_s=60)
    try:
        assert [run(pool, "1"), run(pool, "2"), run(pool, "3")] == [[1.0], [2.0], [3.0]]
        assert sum(worker._process is not None for worker in pool._workers) == 1
    finally:
        pool.close()


def test_a_forgiving_reward_has_no_verdict_where_it_is_stopped() -> None:
    isolation = kind_of(forgiving).isolation
    assert isolation is not None
    pool = WorkerPool(forgiving, isolation, num_workers=2, timeout_s=0)
    try:
        three, sleep, crash, error = run(pool, "3", "sleep", "crash", "x")
    finally:
        pool.close()
    assert three == 3.0
    assert isinstance(sleep, NoVerdictError)
    assert isinstance(crash, NoVerdictError)
    assert isinstance(error, WorkerError)


def test_a_reward_of_a_file_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "own_isolated.py"
    path.write_text(
        "from lightrl.rewards import isolated_reward\n"
        "@isolated_reward()\n"
        "def doubled(sample, *, add: float = 0.0):\n"
        "    return 2 * float(sample.text) + add\n"
    )
    reward = load_reward(f"{path}:doubled", {"add": "1"})
    pool = WorkerPool(reward, Isolation(), num_workers=1, timeout_s=5)
    try:
        assert run(pool, "1.5") == [4.0]
    finally:
        pool.close()


def test_rewards_of_one_file_and_of_files_with_one_name_are_told_apart(tmp_path: Path) -> None:
    for folder, first in (("a", 0.0), ("b", 2.0)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own.py").write_text(
            "from lightrl.rewards import isolated_reward\n"
            f"@isolated_reward()\ndef f(sample): return {first}\n"
            f"@isolated_reward()\ndef g(sample): return {first + 1}\n"
        )
    names = [f"{tmp_path}/{folder}/own.py:{name}" for folder in "ab" for name in "fg"]
    rewards = [load_reward(name) for name in names]
    assert [score(reward, [answered("")]) for reward in rewards] == [[0.0], [1.0], [2.0], [3.0]]
    path = tmp_path / "a" / "own.py"
    path.write_text(path.read_text().replace("return 0.0", "return 7"))
    assert score(load_reward(names[0]), [answered("")]) == [7.0]  # as changed in between, by hand in a notebook


def test_no_worker_outlives_an_owner_that_was_killed() -> None:
    program = (
        "from reward_samples import answered, doing_as_told\n"
        "from lightrl.rewards.scoring import Isolation\n"
        "from lightrl.rewards.worker_pool import WorkerPool\n"
        "pool = WorkerPool(doing_as_told, Isolation(), num_workers=1, timeout_s=300)\n"
        "print(*pool.run([answered('1')]), pool._workers[0]._process.pid, flush=True)\n"
        "list(pool.run([answered('hang in C')]))\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=env, text=True) as owner:
        assert owner.stdout
        value, worker = owner.stdout.readline().split()
        assert value == "1.0"
        time.sleep(0.5)  # it is in its second sample
        assert Path(f"/proc/{worker}").exists()
        owner.kill()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{worker}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{worker}").exists()


def test_a_process_that_ends_before_it_is_ready_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ending.py"
    path.write_text("from lightrl.rewards import isolated_reward\n@isolated_reward()\ndef one(sample): return 1.0\n")
    reward = load_reward(f"{path}:one")
    path.write_text("import os\nos._exit(3)\n")
    pool = WorkerPool(reward, Isolation(), num_workers=1, timeout_s=5)
    with pytest.raises(RuntimeError, match="for the reward 'one' ended with exit code 3 before it was ready"):
        run(pool, "1")


def test_what_another_process_cannot_find_is_told_at_once() -> None:
    with pytest.raises(ValueError, match="'<lambda>' is isolated, and its processes cannot find it"):
        packed_for_worker(lambda sample: 0.0)
