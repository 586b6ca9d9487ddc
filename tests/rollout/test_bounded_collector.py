"""What a step takes is tested with what is produced, in test_production.py."""

import pytest

from lightrl.comm import Comm
from lightrl.config import GRPOConfig
from lightrl.data.sampler import PromptSampler
from lightrl.records import Prompt, Sample, ScoredGroup
from lightrl.rewards.scoring import RewardError
from lightrl.rollout.bounded_collector import BoundedCollector, UsedTickets
from lightrl.rollout.recorded_schedule import ScheduleLog
from lightrl.rollout.sample_messages import to_bytes
from lightrl.rollout.saved_groups import group_state

PROMPT = Prompt(index=0, text="", token_ids=(1,))


def test_used_tickets_are_a_number_and_what_is_beyond_it():
    used = UsedTickets(Comm())
    used.add([1, 2, 5])
    assert used.state_dict() == {"first": 0, "beyond": [1, 2, 5]}
    used.add([0, 3])
    assert used.state_dict() == {"first": 4, "beyond": [5]}
    again = UsedTickets(Comm())
    again.load_state_dict(used.state_dict())
    again.add([4])
    assert again.state_dict() == {"first": 6, "beyond": []}


class StoreLink:
    """A link whose other end has started and finished two groups."""

    def __init__(self, failures):
        self.values = {}
        for number in range(2):
            sample = Sample(
                prompt=PROMPT,
                position=0,
                sample_index=0,
                response_ids=(7,),
                sampler_logprobs=(-0.1,),
                versions=(0,),
                finish_reason="stop",
                text="",
                ticket=number,
                start_version=0,
            )
            state = group_state(ScoredGroup(samples=(sample,), rewards=(1.0,), step=0))
            statistics = {"reward/failures": ("sum", failures, 0.0)}
            self.values |= {
                f"start/{number}": b"0",
                f"finish/{number}": str(1 - number).encode(),
                f"group/{number}": to_bytes({"groups": [state], "statistics": statistics}),
            }

    def claimed(self, key):
        return 2

    def count(self, key, add=0):
        return 2

    def has(self, key):
        return key in self.values

    def take(self, key):
        return self.values.pop(key)

    def wait(self, is_done, what):
        assert is_done()


def collector(link, folder, **options):
    config = GRPOConfig(num_prompts=2, **options)
    config.rollout.max_staleness = 1
    sampler = PromptSampler(1, 2, 0)
    used = UsedTickets(Comm())
    return BoundedCollector(Comm(), link, [PROMPT], sampler, config=config, used=used, log=ScheduleLog(folder))


def test_a_step_takes_the_groups_by_ticket(tmp_path):
    link = StoreLink(failures=0.0)
    groups = collector(link, tmp_path).take(link, 0)
    assert [group.ticket for group in groups] == [0, 1]
    assert link.values == {}


def test_failed_rewards_of_a_step_are_added_up(tmp_path):
    link = StoreLink(failures=1.0)
    assert len(collector(link, tmp_path, max_reward_failures=2).take(link, 0)) == 2
    link = StoreLink(failures=1.0)
    with pytest.raises(RewardError, match="2 rewards have failed, more than --max_reward_failures 1"):
        collector(link, tmp_path, max_reward_failures=1).take(link, 0)
