"""Which groups a step rejects; that others take their places is tested with what is produced, in test_production.py."""

import pytest
from store_link import PROMPT, EagerLink

from lightrl.comm import Comm
from lightrl.config import GRPOConfig
from lightrl.data.sampler import PromptSampler
from lightrl.metrics import Statistics
from lightrl.records import Status
from lightrl.rollout.bounded_collector import BoundedCollector, Tickets
from lightrl.rollout.bounded_drop import DroppingCollector
from lightrl.rollout.bounded_filter import filtering
from lightrl.rollout.recorded_schedule import ScheduleLog, read_schedule
from lightrl.trainers.scheduled import unequal_rewards

SAME, DIFFERENT = (1.0, 1.0), (0.0, 1.0)


def collector(link, folder, kind=BoundedCollector, size=2, keep=unequal_rewards):
    config = GRPOConfig(num_prompts=size)
    config.rollout.max_staleness = 1
    used = Tickets(Comm())
    parts = {"config": config, "tickets": used, "log": ScheduleLog(folder)}
    return filtering(kind, keep)(Comm(), link, [PROMPT], PromptSampler(1, size, 0), **parts), used


def step_of(made, step):
    """Returns the tickets of a step's batch, and its metrics."""
    samples = made.sample([], step=step, group_size=2, temperature=1.0)
    statistics = Statistics()
    made.score(samples, statistics)
    return [sample.ticket for sample in samples if sample.sample_index == 0], statistics.reduce(Comm())


@pytest.mark.parametrize("kind", [BoundedCollector, DroppingCollector])
def test_other_groups_take_the_places_of_rejected_ones(kind, tmp_path):
    link = EagerLink([SAME, DIFFERENT, SAME, SAME, DIFFERENT, DIFFERENT, DIFFERENT], limit=4)
    made, used = collector(link, tmp_path, kind)
    tickets, metrics = step_of(made, 0)
    assert tickets == [1, 4]
    assert metrics["rollout/filtered"] == 3
    # Of the groups that were judged 3 have the mean 1, and 2 have the mean 1/2: (3 + 1) / 5.
    assert metrics["reward/mean"] == pytest.approx(0.8, abs=1e-6)
    assert [number for command in link.posted for number in command["numbers"]] == [0, 2, 3]
    assert (used.first, used.beyond) == (5, set())
    assert [[group.ticket for group in batch] for batch in read_schedule(tmp_path)] == [[1, 4]]
    link.version = 1
    tickets, metrics = step_of(made, 1)
    assert (tickets, metrics["rollout/filtered"]) == ([5, 6], 0)
    assert not [key for key in link.values if key.startswith(("group/", "finish/"))]


def test_a_step_that_has_rejected_five_batches_goes_on_with_what_it_has(tmp_path):
    link = EagerLink([SAME] * 11 + [DIFFERENT] * 9, limit=4)
    made, used = collector(link, tmp_path)
    # Ten groups are rejected and replaced, two at a time. Of the next two, one is rejected and leaves its place empty.
    tickets, metrics = step_of(made, 0)
    assert (tickets, metrics["rollout/filtered"]) == ([11], 11)
    assert sum(len(command["numbers"]) for command in link.posted) == 10
    assert used.first == 12
    assert step_of(made, 1)[0] == [12, 13]


def test_a_step_may_have_no_group_at_all(tmp_path):
    made, used = collector(EagerLink([SAME] * 14, limit=4), tmp_path)
    tickets, metrics = step_of(made, 0)
    assert (tickets, metrics["rollout/filtered"], used.first) == ([], 12, 12)


def test_a_filter_is_asked_once_about_each_group_that_waits(tmp_path):
    asked = []

    def keep(group):
        asked.append(group.ticket)
        return group.has_signal

    link = EagerLink([DIFFERENT, SAME, DIFFERENT], limit=2)
    made, _ = collector(link, tmp_path, keep=keep)
    assert step_of(made, 0)[0] == [0, 2]
    assert asked == [0, 1, 2]


def test_failed_episodes_are_no_matter_of_the_filter(tmp_path):
    made, _ = collector(EagerLink([SAME] * 4, limit=4, statuses=[Status.FAILED]), tmp_path)
    with pytest.raises(RuntimeError, match=r"Every episode of the step has failed. The first:\non fire"):
        step_of(made, 0)


def test_a_group_of_which_one_episode_failed_is_judged(tmp_path):
    statuses = [Status.COMPLETED, Status.FAILED]
    made, _ = collector(EagerLink([SAME, DIFFERENT, DIFFERENT], limit=2, statuses=statuses), tmp_path)
    assert step_of(made, 0)[0] == [1, 2]
