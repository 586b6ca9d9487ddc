"""A scheduled run that is killed by SIGKILL in the middle of a step goes on as if nothing had happened."""

from pathlib import Path

import pytest
from loaded_file import load_file

PATH = Path(__file__).parents[2] / "benchmarks" / "kills.py"


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["tail batches", "agents"])
def test_killed_runs_of_two_ranks_equal_an_undisturbed_one_of_a_single_rank(schedule: str, tmp_path: Path) -> None:
    """A sample of benchmarks/kills.py, which does so for all schedules, on 1, 2 and 3 ranks, and with learning."""
    kills = load_file(PATH)
    flags = [*kills.make_model(tmp_path), *kills.SCHEDULES[schedule], "--lr", "0"]
    undisturbed = kills.digest_of(flags, tmp_path / "one", 1)
    assert kills.digest_of(flags, tmp_path / "two", 2, killed_at=20) == undisturbed
