"""AReaL's calls: the same samples on any number of ranks, oldest first, nothing lost, bounds kept; the example."""

import json
import re
from pathlib import Path
from typing import Any, cast

import pytest

from lightrl.records import Prompt
from lightrl.rollout.rollouts import Rollouts, _SubmittedScheduler
from lightrl.rollout.scheduler import Rules
from lightrl.testing import run_spmd

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "rollouts.py"


def calls(folder: Path, world: int) -> dict[str, Any]:
    output = folder / f"{world}.json"
    run_spmd(ROOT / "tests" / "programs" / "rollouts_program.py", str(output), world_size=world, timeout_s=200)
    made: dict[str, Any] = json.loads(output.read_text())
    return made


def answers(rows: list[Any]) -> list[float]:
    return [row[1] for row in rows]


def test_a_call_that_loses_many_prompts_still_waits_for_all_that_it_asked_for() -> None:
    scheduler = _SubmittedScheduler(Rules(batch_size=1, max_staleness=99), [cast(Prompt, None)] * 24)
    scheduler.count = 8
    assert scheduler.start(0) == [*range(24)]
    scheduler.lose(range(0, 12, 2))  # more than five batches
    scheduler.finish(range(1, 14, 2))
    assert scheduler.batch(0) is None  # 7 of 8
    scheduler.finish([12])
    assert scheduler.batch(0) == (1, 3, 5, 7, 9, 11, 12, 13)
    scheduler.lose(range(14, 24))
    scheduler.count = 9
    with pytest.raises(RuntimeError, match="waits for 9 prompts, of which 8 are finished; none is running"):
        scheduler.batch(0)


def test_a_prompt_with_images_is_refused() -> None:
    prompt = Prompt(index=0, text="", token_ids=(1,), images=("red.png",))
    with pytest.raises(ValueError, match="images or videos, which the tensors of Rollouts cannot hold"):
        Rollouts.__new__(Rollouts).submit(prompt)


def test_weights_that_are_ahead_of_the_prompts_are_named() -> None:
    scheduler = _SubmittedScheduler(Rules(batch_size=2, max_staleness=1), [cast(Prompt, None)] * 6)
    scheduler.count = 2
    assert scheduler.start(0) == [0, 1, 2, 3]
    scheduler.finish(range(4))
    assert scheduler.batch(0) == (0, 1)
    with pytest.raises(RuntimeError, match="of which 4 are finished; none is running and 2 are queued. These are too"):
        scheduler.batch(2)


@pytest.mark.slow
def test_the_calls_on_one_rank_and_on_two(tmp_path: Path) -> None:
    made, two = calls(tmp_path, 1), calls(tmp_path, 2)
    assert "The ranks have submitted different prompts (7, 7 on ranks 0, 1, ...)" in two.pop("different")
    made.pop("different")
    refused = answers(two.pop("collective")), answers(made.pop("collective"))
    assert refused == ([2, 2, 2, 2], [1, 1, 1, 1])  # a barrier of one rank waits for nobody
    assert two == made

    assert answers(made["rollout_batch"]) == [0, 0, 1, 1, 2, 2, 3, 3, 5, 5]  # 4 was rejected
    for _, _, ids, mask, versions in made["rollout_batch"]:
        assert mask == [0] * (len(mask) - sum(mask)) + [1] * sum(mask)
        assert [version == -1 for version in versions] == [not trained for trained in mask]
        assert len(ids) == len(mask)
    assert made["rejected"] == 2  # both samples of 4
    assert answers(made["failing"]) == [1, 1]
    assert made["failed"] == [4, 4 / 6, 2]  # two groups of two
    assert "was given no prompt" in made["no prompt"]
    assert "Every episode of the step has failed or was rejected" in made["all fail"]
    assert answers(made["tensors"]) == [100, 100]
    assert [row[0] for row in made["tensors"]] == [10, 10]  # the eleventh prompt that was submitted

    assert made["too late"].startswith("WaitTimeoutError: wait() has run out of time")
    assert answers(made["wait"]) == [5, 7]  # 3 and 6 are long
    assert "Rollouts are paused: call resume()" in made["paused"]
    assert made["pending"] == 3
    assert answers(made["wait again"]) == [3, 6, 8]
    assert "waits for 1 prompts, of which 0 are finished; none is running and 0 are queued" in made["nothing"]
    assert "gives no prompt (any more)" in made["empty"]

    steps = [made[f"step {step}"] for step in range(6)]
    tickets = [row[0] for batch in steps for row in batch]
    assert [len(batch) for batch in steps] == [2] * 6
    assert len(set(tickets)) == 12
    assert set(range(12)) - {4} <= set(tickets)  # each prompt once, no long one left behind, all in order
    for step, batch in enumerate(steps):
        assert all(step - version <= 1 for row in batch for version in row[4] if version >= 0)
    assert {"rollout/carried", "reward/episode_reward"} <= set(made["metrics"])


@pytest.mark.slow
def test_the_example_learns_the_built_in_task_on_two_ranks() -> None:
    rows = re.findall(r"step \d+ reward (\S+)", run_spmd(EXAMPLE, "25", world_size=2, timeout_s=200))
    rewards = [float(row) for row in rows]
    assert len(rewards) == 25
    assert sum(rewards[:2]) / 2 < 0.25
    assert sum(rewards[-5:]) / 5 > 0.4, rewards
    assert len(EXAMPLE.read_text().splitlines()) < 60
