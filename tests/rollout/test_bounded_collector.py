"""What a step takes is tested with what is produced, in test_production.py."""

import pytest
from store_link import PROMPT, StoreLink

from lightrl.comm import Comm
from lightrl.config import GRPOConfig
from lightrl.data.sampler import PromptSampler
from lightrl.records import Status
from lightrl.rewards.scoring import RewardError
from lightrl.rollout.bounded_collector import BoundedCollector, Tickets
from lightrl.rollout.recorded_schedule import ScheduleLog
from lightrl.rollout.sample_messages import to_bytes


def test_used_tickets_are_a_number_and_what_is_beyond_it():
    used = Tickets(Comm())
    used.add([1, 2, 5])
    assert used.state_dict() == {"first": 0, "beyond": [1, 2, 5]}
    used.add([0, 3])
    assert used.state_dict() == {"first": 4, "beyond": [5]}
    again = Tickets(Comm())
    again.load_state_dict(used.state_dict())
    again.add([4])
    assert again.state_dict() == {"first": 6, "beyond": []}


class FinishedLink(StoreLink):
    """A link whose other end has started and finished two groups."""

    def __init__(self, failures, status=Status.COMPLETED):
        super().__init__()
        for number in (1, 0):
            self.start(0)
            statistics = {"reward/failures": ("sum", failures, 0.0)}
            self.finish(number, 0, statuses=[status], statistics=statistics, failure="on fire")


def collector(link, folder, used=None, **options):
    config = GRPOConfig(num_prompts=2, **options)
    config.rollout.max_staleness = 1
    sampler = PromptSampler(1, 2, 0)
    used = used or Tickets(Comm())
    return BoundedCollector(Comm(), link, [PROMPT], sampler, config=config, tickets=used, log=ScheduleLog(folder))


def test_a_step_takes_the_groups_by_ticket(tmp_path):
    link = FinishedLink(failures=0.0)
    made = collector(link, tmp_path)
    groups = made.take(link, 0, 0, 2)
    assert [group.ticket for group in groups] == [0, 1]
    assert link.values == {}
    assert made._tickets.first == 2


def test_a_step_waits_for_what_was_claimed_a_moment_ago(tmp_path):
    link = FinishedLink(failures=0.0)
    made, version = collector(link, tmp_path), link.values.pop("start/1")
    assert not made._learn_news(link)
    link.values["start/1"] = version
    assert made._learn_news(link)


def test_failed_rewards_of_a_step_are_added_up(tmp_path):
    link = FinishedLink(failures=1.0)
    assert len(collector(link, tmp_path, max_reward_failures=2).take(link, 0, 0, 2)) == 2
    link = FinishedLink(failures=1.0)
    with pytest.raises(RewardError, match="2 rewards have failed, more than --max_reward_failures 1"):
        collector(link, tmp_path, max_reward_failures=1).take(link, 0, 0, 2)


def test_a_step_whose_episodes_have_all_failed_ends_the_run(tmp_path):
    link = FinishedLink(0.0, Status.FAILED)
    with pytest.raises(RuntimeError, match=r"Every episode of the step has failed. The first:\non fire"):
        collector(link, tmp_path).take(link, 0, 0, 2)


def test_the_age_of_each_token_is_checked_where_it_is_used(tmp_path):
    link = FinishedLink(0.0)
    with pytest.raises(RuntimeError, match="Step 3 has tokens of weights 0, which are 2 steps behind"):
        collector(link, tmp_path).take(link, 2, 0, 2)


class RacingLink(FinishedLink):
    """A link whose other end starts and finishes its first group while this end looks at what was claimed."""

    def __init__(self):
        super().__init__(failures=0.0)
        self.later = {key: self.values.pop(key) for key in ("start/0", "finish/0", "finish/1")}
        self.later["finish/0"], self.num_claimed = b"0", 0

    def claimed(self, key):
        num_claimed, self.num_claimed = self.num_claimed, 1
        if num_claimed == 0:
            self.values |= self.later
        return num_claimed

    def count(self, key, add=0):
        return int("finish/0" in self.values)

    def post(self, command):
        assert command == {"do": "save"}

    def answers(self):
        return []


def test_a_checkpoint_can_be_taken_while_a_group_starts_and_finishes(tmp_path):
    link = RacingLink()
    made = collector(link, tmp_path)
    assert made._tickets.state_dict()["finished"] == []
    assert [item["ticket"] for item in made._tickets.state_dict()["finished"]] == [0]


class FinishingLink(FinishedLink):
    """A link whose other end still has a group running when it is asked, and has finished it a moment later."""

    def answers(self):
        return [to_bytes([{"ticket": 1, "version": 0, "done": [], "partials": []}])]


def test_a_group_that_finishes_while_a_checkpoint_is_taken_is_in_it_once(tmp_path):
    made = collector(FinishingLink(failures=0.0), tmp_path)
    state = made._tickets.state_dict()
    assert ([item["ticket"] for item in state["finished"]], state["running"]) == ([0, 1], [])


class FullLink(RacingLink):
    """A link whose other end has no room for the groups of a checkpoint."""

    def __init__(self):
        self.values = {}

    def put(self, key, content):
        self.values[key] = content

    def claimed(self, key):
        return int(self.values[key])

    def count(self, key, add=0):
        return 0


def test_a_checkpoint_keeps_the_groups_of_the_one_before_that_no_rank_has_continued(tmp_path):
    waiting = [{"ticket": ticket, "version": 0, "done": [], "partials": []} for ticket in range(2)]
    used = Tickets(Comm())
    used.load_state_dict({"first": 0, "beyond": [], "finished": [], "running": waiting})
    made = collector(FullLink(), tmp_path, used)
    assert used.state_dict()["running"] == waiting
    del made._started[0]  # dropped, or taken by a step
    assert used.state_dict()["running"] == waiting[1:]
