"""Schedules with an engine: the same batches on any number of ranks and after a kill, partial or from the prompt."""

import json
from pathlib import Path
from typing import Any

import pytest

from lightrl.testing import run_spmd

PROGRAM = Path(__file__).parents[1] / "programs" / "scheduled_program.py"
LIMIT = 40  # of a turn, in the program


def play(folder: Path, world: int, *, killed_after: int = -1, partial: bool = True, tail: int = -1) -> dict[str, Any]:
    output = folder / f"{world}-{killed_after}-{partial}-{tail}.json"
    run_spmd(PROGRAM, str(output), str(killed_after), str(partial), str(tail), "wait", world_size=world, timeout_s=200)
    made: dict[str, Any] = json.loads(output.read_text())
    return made


def samples_of(made: dict[str, Any]) -> list[Any]:
    return [row for batch in made["batches"] for row in batch]


@pytest.mark.slow
def test_batches_depend_neither_on_the_ranks_nor_on_a_kill(tmp_path: Path) -> None:
    one = play(tmp_path, 1)
    assert play(tmp_path, 2, killed_after=2)["batches"] == one["batches"]
    three = play(tmp_path, 3)
    assert three["batches"] == one["batches"]
    assert three["carried"] == one["carried"]
    assert three["tool_calls"] == one["tool_calls"]

    rows = samples_of(one)
    assert one["carried"][0][0]  # some groups went on
    mixed = 0
    for step, batch in enumerate(one["batches"]):
        assert sorted({row[0] for row in batch}) == [0, 1, 2, 3]
        for position, _, ticket, start, ids, versions, own, reward in batch:
            assert position == sorted({row[2] for row in batch}).index(ticket)
            assert step - start <= 3
            assert len(ids) == len(versions) == len(own)
            assert versions == sorted(versions)
            assert min(versions) >= start
            assert sum(own) <= LIMIT + 3
            assert reward == 1.0
            mixed += len(set(versions)) > 1
    assert mixed > 0
    tickets = [(row[2], row[1]) for row in rows]
    assert len(set(tickets)) == len(tickets)
    assert not {ticket % 7 for ticket, _ in tickets} & {6}  # they failed, and others took their places


@pytest.mark.slow
def test_without_partial_samples_begin_again_under_the_new_weights(tmp_path: Path) -> None:
    made = play(tmp_path, 1, partial=False)
    late = [row for row in samples_of(made) if row[5][0] > row[3]]
    assert late
    assert all(len(set(row[5])) == 1 for row in samples_of(made))
    assert play(tmp_path, 2, partial=False, killed_after=1)["batches"] == made["batches"]


@pytest.mark.slow
def test_tail_batches_are_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    made = play(tmp_path, 1, tail=1)
    assert play(tmp_path, 2, tail=1, killed_after=3)["batches"] == made["batches"]
    assert made["batches"] != play(tmp_path, 1)["batches"]
