from dataclasses import replace

import pytest
from made_samples import made_sample

from lightrl.records import ScoredGroup, Status
from lightrl.rollout.production import segments
from lightrl.rollout.recorded_schedule import SCHEDULE, RecordedSample, ScheduleLog, digest_of, read_schedule


def group(ticket, *responses):
    samples = tuple(
        made_sample(sample_index=index, response_ids=ids, versions=versions, ticket=ticket, start_version=3)
        for index, (ids, versions) in enumerate(responses)
    )
    return ScoredGroup(samples=samples, rewards=(0.0,) * len(samples), step=0)


def calls_of(made):
    """One call of the engine for each sample."""
    return [[segments(sample.versions, sample.start_version)] for sample in made.samples]


def append(folder, step, *groups):
    ScheduleLog(folder).append(step, groups, [calls_of(made) for made in groups])


def test_a_call_is_recorded_as_runs_of_versions():
    assert segments((3, 3, 4, 3), 1) == [[3, 2], [4, 1], [3, 1]]
    assert segments((), 1) == [[1, 0]]  # without a token
    assert segments(None, 1) == []  # given up


def test_a_schedule_says_how_each_sample_was_made(tmp_path):
    made = group(7, ((5, 6, 7), (3, 3, 4)), ((8,), (4,)))
    append(tmp_path, 0, made, group(9, ((5,), (3,))))
    append(tmp_path, 1)
    first, second = read_schedule(tmp_path)
    assert [(item.ticket, item.start_version) for item in first] == [(7, 3), (9, 3)]
    assert first[0].samples == (
        RecordedSample(sample_index=0, calls=(((3, 2), (4, 1)),)),
        RecordedSample(sample_index=1, calls=(((4, 1),),)),
    )
    assert first[0].digest == digest_of(made)
    assert second == ()


def test_other_tokens_have_another_digest():
    made = group(0, ((5, 6), (0, 0)), ((7,), (0,)))
    assert digest_of(made) == digest_of(replace(made, samples=made.samples[::-1]))
    assert len({digest_of(made), digest_of(group(0, ((5,), (0,)), ((6, 7), (0, 0))))}) == 2


def test_a_schedule_has_each_call_of_an_episode_and_what_was_left_out(tmp_path):
    made = group(7, ((5, 6, 7), (3, 3, 4)), ((), ()))
    made = replace(made, samples=(made.samples[0], replace(made.samples[1], status=Status.FAILED)))
    ScheduleLog(tmp_path).append(0, [made], [[[[[3, 1]], [[3, 1], [4, 1]]], [[[3, 2]], []]]])
    ((found,),) = read_schedule(tmp_path)
    assert found.samples == (
        RecordedSample(sample_index=0, calls=(((3, 1),), ((3, 1), (4, 1)))),
        RecordedSample(sample_index=1, calls=(((3, 2),), ()), status=Status.FAILED),
    )


def test_a_resumed_run_drops_what_came_after_its_checkpoint(tmp_path):
    for step in range(3):
        append(tmp_path, step, group(step, ((5,), (3,))))
    with (tmp_path / SCHEDULE).open("a") as file:
        file.write('{"step": 4, "gro')  # cut short by a kill
    append(tmp_path, 2, group(12, ((5,), (3,))))
    assert [[item.ticket for item in batch] for batch in read_schedule(tmp_path)] == [[0], [1], [12]]


def test_of_a_long_file_only_the_end_is_read(tmp_path):
    for step in range(3):
        append(tmp_path, step, group(step, ((5,), (3,))))
    path = tmp_path / SCHEDULE
    first, *others = path.read_text().splitlines(keepends=True)
    unreadable = "x" * len(first) + "\n"
    path.write_text(unreadable + "".join(others))
    append(tmp_path, 2)
    assert path.read_text().startswith(unreadable + others[0] + '{"step": 3, "groups": []}')


def test_a_kill_in_the_middle_of_a_line_costs_only_that_line(tmp_path, monkeypatch):
    for step in range(3):
        append(tmp_path, step, group(step, ((5, 6), (0, 0))))
    path = tmp_path / SCHEDULE
    whole = path.read_text()
    end = whole.rindex("}", 0, whole.rindex("}"))  # of the only group in the last line
    path.write_text(whole[: end + 1])
    assert [item.ticket for (item,) in read_schedule(tmp_path)] == [0, 1]

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("os.truncate", killed)
        with pytest.raises(KeyboardInterrupt):
            append(tmp_path, 2)
    assert len(read_schedule(tmp_path)) == 2  # what is there stays until there is something better
    append(tmp_path, 2)
    assert len(read_schedule(tmp_path)) == 3


def test_a_run_without_a_schedule_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no schedule.jsonl: it is no run with --rollout.max_staleness"):
        read_schedule(tmp_path)
