import pytest

from lightrl.algorithms.registry import advantage
from lightrl.config import DynamicSamplingConfig, GRPOConfig, PPOConfig, WorkflowConfig
from lightrl.roles import Role
from lightrl.trainers import separate
from lightrl.trainers.grpo import GRPOTrainer
from lightrl.trainers.separate import Learner, check_split, in_role, rewards_of_samples


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"dynamic_sampling": DynamicSamplingConfig(enabled=True), "rollout": WorkflowConfig(max_staleness=1)},
            "--dynamic_sampling.enabled and --rollout.max_staleness 1. Give --rollout.filter unequal_rewards",
        ),
        (
            {"rollout": WorkflowConfig(filter="unequal_rewards")},
            "--rollout.filter and --rollout.max_staleness 0. Give --dynamic_sampling.enabled True instead",
        ),
        ({"canary_every": 7}, "--canary_every 7: the fingerprints prove each sync"),
        ({"engine_sleep_level": 2}, "--engine_sleep_level 2: the engine has its device for itself"),
        ({"offload_while_generating": True}, "--offload_while_generating, since no engine shares"),
    ],
)
def test_what_separate_ranks_do_not_have_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=f"--rollout_ranks does not go with {message}"):
        check_split(GRPOConfig(rollout_ranks=1, **options))


class Counted:
    """A reward that may be slow to construct, as one that loads a file."""

    num_made = 0

    def __init__(self):
        Counted.num_made += 1

    def __call__(self, sample):
        return 1.0


class Together(Counted):
    is_collective = True


@pytest.mark.parametrize("name", ["trainer", "rollout"])
def test_a_reward_class_is_constructed_once_in_a_process(name, monkeypatch):
    def start(learner, config, role):
        rewards_of_samples(config)  # as the trainer's own constructor does

    role = Role(name=name, rank=0, num_trainers=1, num_rollout=1)
    monkeypatch.setattr(separate, "split", lambda *_, **__: role)
    monkeypatch.setattr(separate, "RolloutServer", lambda config, role, rewards: None)
    monkeypatch.setattr(Learner, "__init__", start)
    monkeypatch.setattr(Counted, "num_made", 0)
    in_role(GRPOTrainer)(GRPOConfig(rollout_ranks=1, reward=(f"{__name__}:Counted",)))
    assert Counted.num_made == 1


def test_a_filter_that_does_not_exist_is_refused():
    config = GRPOConfig(rollout_ranks=1, rollout=WorkflowConfig(filter="unequal", max_staleness=1))
    with pytest.raises(ValueError, match="Unknown filter 'unequal'. Did you mean unequal_rewards"):
        check_split(config)


def test_a_reward_of_all_ranks_is_refused_whatever_its_name():
    config = GRPOConfig(rollout_ranks=1, reward=(f"{__name__}:Together",))
    with pytest.raises(ValueError, match="--reward Together, which all ranks compute together"):
        rewards_of_samples(config)


@advantage(needs="greedy_baseline")
def over_greedy(samples):
    return samples.rewards - samples.baselines


@pytest.mark.parametrize("name", ["remax", f"{__name__}:over_greedy"])
def test_greedy_baselines_are_refused_for_groups_that_are_made_ahead(name):
    config = GRPOConfig(rollout_ranks=1)
    config.algorithm.advantage = name
    check_split(config)
    config.rollout.max_staleness = 1
    with pytest.raises(ValueError, match=f"--algorithm.advantage {name} and --rollout.max_staleness 1. Give --rollout"):
        check_split(config)


def test_ppo_can_be_split():
    check_split(PPOConfig(rollout_ranks=2))


def test_one_process_is_told_to_start_more(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="--rollout_ranks 1 of 1 rank leaves none to train"):
        in_role(GRPOTrainer)(GRPOConfig(rollout_ranks=1))


def test_a_schedule_of_ranks_that_do_both_is_refused():
    config = GRPOConfig(rollout_ranks=1)
    config.rollout.filter = "unequal_rewards"
    with pytest.raises(ValueError, match="--rollout_ranks does not go with --rollout.filter"):
        check_split(config)


def test_episodes_may_outlive_a_step():
    config = GRPOConfig(rollout_ranks=1)
    config.rollout.max_staleness, config.rollout.workflow = 1, "tools"
    check_split(config)
