"""examples/remax.py: ReMax over a user's dictionary learns the built-in task, with the same numbers on any ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightrl.testing import run_spmd

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "remax.py"
STEPS = 12


@pytest.mark.long
@pytest.mark.slow
def test_it_learns_on_one_rank_and_on_two() -> None:
    runs = []
    for world_size in (1, 2):
        output = run_spmd(EXAMPLE, "--max_steps", str(STEPS), world_size=world_size)
        rows = re.findall(r"step \d+ reward (\S+) loss (\S+) grad_norm (\S+)", output)
        runs.append([tuple(map(float, row)) for row in rows])
        rewards = [reward for reward, _, _ in runs[-1]]
        assert len(rewards) == STEPS
        assert rewards[0] < 0.15
        assert sum(rewards[-4:]) / 4 > 0.25, rewards
    for alone, together in zip(runs[0][:3], runs[1][:3], strict=True):
        assert together == pytest.approx(alone, rel=1e-4, abs=1e-6)
