"""Groups that are written and read again."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from made_samples import made_sample

from lightrl.records import Prompt, Sample, ScoredGroup, Status
from lightrl.rollout.record import num_steps, read_groups, step_folder, write_groups

PROMPTS = [Prompt(index=index, text="", token_ids=(1, index)) for index in range(5)]


def sample(position: int, index: int, **changes: object) -> Sample:
    made = made_sample(
        prompt=PROMPTS[position],
        position=position,
        sample_index=index,
        response_ids=(5, 6),
        sampler_logprobs=(-1 / 3, -0.1),
        versions=(2, 3),
        text="5\u20286",
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def group(position: int, **changes: object) -> ScoredGroup:
    made = ScoredGroup(samples=(sample(position, 0), sample(position, 1)), rewards=(1 / 3, 0.1), step=7)
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def test_all_that_a_group_holds_comes_back(tmp_path: Path) -> None:
    branch = sample(0, 1_000_000, own=(False, True))
    odd = sample(
        0,
        0,
        own=(True, False),
        images=(b"\x89PNG", b"2"),
        turns=(0, 1),
        numbers={"tool_calls": 2.0},
        reward=0.5,
        turn_rewards=(0.5, 0.0),
        is_scored=True,
        components={"right": (2.0, 1.0), "other": (-0.5, math.nan)},
        ticket=9,
        branches=(branch,),
    )
    failed = sample(0, 1, response_ids=(), sampler_logprobs=(), versions=(), status=Status.FAILED, turns=())
    routed = sample(
        0, 2, routing=np.arange(8, dtype=np.int16).reshape(4, 2, 1), allowed=np.array([[0, 5], [0, 9]], np.int32)
    )
    wanted = group(0, samples=(odd, failed, routed), rewards=(0.1, math.nan, 1.0), baseline=math.nan)
    write_groups(tmp_path, 0, [wanted, group(1)], rank=0, world=1)
    found, other = read_groups(tmp_path, 0, PROMPTS, rank=0, world=1)
    assert found.samples == wanted.samples
    assert found.samples[2].routing is not None
    assert np.array_equal(found.samples[2].routing, routed.routing)
    assert np.array_equal(found.samples[2].allowed, routed.allowed)
    assert (found.rewards[0], found.rewards[2], found.step) == (0.1, 1.0, 7)
    assert math.isnan(found.rewards[1])
    assert found.baseline is not None
    assert math.isnan(found.baseline)
    assert other == group(1)


def test_other_ranks_read_by_position(tmp_path: Path) -> None:
    write_groups(tmp_path, 0, [group(4), group(0)], rank=0, world=2)
    write_groups(tmp_path, 0, [group(1)], rank=1, world=2)

    def read(rank: int, world: int) -> list[int]:
        found = read_groups(tmp_path, 0, PROMPTS, rank=rank, world=world)
        return [item.samples[0].position for item in found]

    assert [read(rank, 2) for rank in range(2)] == [[4, 0], [1]]  # as it was
    assert read(0, 1) == [0, 1, 4]
    assert sorted(read(0, 3) + read(1, 3) + read(2, 3)) == [0, 1, 4]
    assert num_steps(tmp_path) == 1


def test_a_run_that_repeats_a_step_on_other_ranks_replaces_its_groups(tmp_path: Path) -> None:
    write_groups(tmp_path, 0, [group(0)], rank=0, world=2)
    write_groups(tmp_path, 0, [group(1)], rank=1, world=2)
    write_groups(tmp_path, 0, [group(0), group(1)], rank=0, world=1)
    found = read_groups(tmp_path, 0, PROMPTS, rank=0, world=1)
    assert [item.samples[0].position for item in found] == [0, 1]


def test_a_step_whose_writing_was_cut_off_is_incomplete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_groups(tmp_path, 0, [group(0)], rank=0, world=1)
    assert len({path.stat().st_mode for path in step_folder(tmp_path, 0).iterdir()}) == 1

    def fail(*_: object) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(Path, "write_text", fail)
        disk.setattr(Path, "write_bytes", fail)
        with pytest.raises(OSError, match="No space left"):
            write_groups(tmp_path, 0, [group(1)], rank=0, world=1)
    with pytest.raises(ValueError, match="no complete step of a record: it holds no file"):
        read_groups(tmp_path, 0, PROMPTS, rank=0, world=1)


def test_a_record_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    write_groups(tmp_path, 0, [group(0)], rank=0, world=2)
    with pytest.raises(ValueError, match="no complete step of a record: it holds rank-0-of-2.jsonl"):
        read_groups(tmp_path, 0, PROMPTS, rank=0, world=1)
    write_groups(tmp_path, 1, [group(3)], rank=0, world=1)
    with pytest.raises(ValueError, match="recorded of other prompts: line 4 of the data"):
        read_groups(tmp_path, 1, PROMPTS[::-1], rank=0, world=1)
