"""Which groups a step drops; that others take their places is tested with what is produced, in test_production.py."""

from store_link import PROMPT, StoreLink

from lightrl.comm import Comm
from lightrl.config import DataConfig, GRPOConfig
from lightrl.data.sampler import PromptSampler
from lightrl.metrics import Statistics
from lightrl.rollout.bounded_collector import Tickets
from lightrl.rollout.bounded_drop import DroppingCollector
from lightrl.rollout.recorded_schedule import ScheduleLog


def collector(link, folder, curriculum=""):
    config = GRPOConfig(num_prompts=1, data=DataConfig(curriculum=curriculum))
    config.rollout.max_staleness = 1
    used = Tickets(Comm())
    parts = {"config": config, "tickets": used, "log": ScheduleLog(folder)}
    return DroppingCollector(Comm(), link, [PROMPT], PromptSampler(1, 1, 0), **parts), used


def tickets(made, step):
    """Returns the tickets of a step's batch, and how many groups it dropped."""
    samples = made.sample([], step=step, group_size=1, temperature=1.0)
    statistics = Statistics()
    made.score(samples, statistics)
    return [sample.ticket for sample in samples], statistics.reduce(Comm())["rollout/dropped"]


def test_a_step_waits_for_no_slow_group_and_drops_it_once_it_is_too_old(tmp_path):
    link = StoreLink()
    made, used = collector(link, tmp_path)
    for version in (0, 0, 1):
        link.start(version)
    link.finish(1, 0)
    link.finish(2, 1)
    assert tickets(made, 0) == ([1], 0)
    assert tickets(made, 1) == ([2], 0)  # ticket 0 could still be trained, and is not waited for
    link.start(2)
    link.finish(3, 2)
    assert tickets(made, 2) == ([3], 1)
    assert link.posted == [{"do": "drop", "numbers": [0]}]
    assert (used.first, used.beyond) == (4, set())
    link.finish(0, 0)  # it was being scored
    link.start(3)
    link.finish(4, 3)
    assert tickets(made, 3) == ([4], 0)
    assert link.values == {}


def test_a_dropped_group_has_another_prompt_chosen_instead(tmp_path):
    link = StoreLink()
    made, _ = collector(link, tmp_path, "half_solved")
    named = []
    for step in range(4):
        for version in [0, 0] if step == 0 else [step]:
            link.start(version)
        link.finish(step + 1, step)
        tickets(made, step)
        named.append(sum(len(command["prompts"]) for command in link.posted if command["do"] == "name"))
    # The prompts of the steps up to the next, which may start early; step 2 dropped ticket 0.
    assert named == [2, 3, 4 + 1, 5 + 1]


def test_a_finished_group_is_dropped_too_and_the_oldest_come_first(tmp_path):
    link = StoreLink()
    made, used = collector(link, tmp_path)
    for version in (0, 0, 0, 1, 1):
        link.start(version)
    for number in (4, 3, 2, 1, 0):
        link.finish(number, int(number > 2))
    assert tickets(made, 0) == ([0], 0)
    assert tickets(made, 1) == ([1], 0)
    assert tickets(made, 2) == ([3], 1)
    assert used.first == 4
    assert [*link.values] == ["group/4"]
