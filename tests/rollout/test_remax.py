"""The baseline of the likeliest response in the episode: its gradient is the closed form."""

from __future__ import annotations

import pytest
import torch
from episode_program import collector_of, prompts_of, start
from torch.testing import assert_close

from lightrl.builtin.model import tiny_model
from lightrl.comm import Comm
from lightrl.config import AlgorithmConfig, WorkflowConfig
from lightrl.data.packing import pack
from lightrl.metrics import Statistics
from lightrl.models.policy import Policy
from lightrl.records import Experience, Sample
from lightrl.rewards.reward_set import RewardSet
from lightrl.rewards.scoring import group_reward
from lightrl.rollout.collector import Collector
from lightrl.rollout.episode_collector import EpisodeCollector
from lightrl.rollout.workflow import load_workflow
from lightrl.strategy import StrategyBase
from lightrl.trainers.objective import PolicyObjective


def odd_share(sample: Sample) -> float:
    return sum(character in "13579" for character in sample.text) / 4


@group_reward
def rank_in_group(group: list[Sample]) -> list[float]:
    return [float(sum(odd_share(other) < odd_share(one) for other in group)) for one in group]


@pytest.fixture(scope="module")
def strategy() -> StrategyBase:
    return start(strategy_name="single")


def test_the_gradient_is_the_closed_form(strategy: StrategyBase) -> None:
    prompts = prompts_of(strategy.tokenizer)
    like = collector_of(strategy)  # for its limits
    workflow = load_workflow(WorkflowConfig(workflow="remax"))
    collector = EpisodeCollector(strategy, RewardSet.of(odd_share), workflow, seed=3, limits=like._limits)
    plain = Collector(strategy, odd_share, seed=3, max_new_tokens=like._limits.max_new_tokens)
    samples = collector.sample(prompts, step=2, group_size=3, temperature=1.0)
    # The samples are those of a plain run, and the baselines are the rewards of its greedy responses.
    theirs = plain.sample(prompts, step=2, group_size=3, temperature=1.0)
    greedy = plain.sample_greedily(prompts)
    assert [sample.response_ids for sample in samples] == [sample.response_ids for sample in theirs]
    gains = [odd_share(one) - odd_share(greedy[index // 3]) for index, one in enumerate(theirs)]
    statistics = Statistics()
    rewards = collector.score(samples, statistics)
    assert rewards == gains
    assert any(rewards)
    total = statistics.reduce(strategy.comm)["episode/greedy_reward"]
    assert total == pytest.approx(3 * sum(map(odd_share, greedy)))

    config = AlgorithmConfig(advantage="reinforce", loss="policy_gradient", aggregation="token_mean")
    objective = PolicyObjective(config)
    scored = zip(samples, rewards, strict=True)
    experience = objective.advantages([Experience(sample=one, reward=r, advantage=0.0) for one, r in scored], Comm())
    assert [item.advantage for item in experience] == pytest.approx(gains)
    model = Policy(tiny_model()[0])  # the weights that the engine has
    batch = pack(experience, temperature=1.0)
    objective.loss(model(batch), batch, Statistics()).backward()
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    # -(1/N) sum over the samples of (R - b) times the sum of log p of their tokens, N in all: by the model of
    # transformers, on each sample alone.
    reference = tiny_model()[0]
    logprobs = []
    for sample, gain in zip(samples, gains, strict=True):
        ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
        scores = reference(input_ids=ids).logits[0].log_softmax(-1)
        first = len(sample.prompt_ids)
        for place, token in enumerate(sample.response_ids, start=first):
            logprobs.append(gain * scores[place - 1, token])
    (-torch.stack(logprobs).mean()).backward()
    wanted = [parameter.grad for parameter in reference.parameters() if parameter.grad is not None]
    assert_close(found, wanted, atol=1e-6, rtol=1e-5)
    assert max(float(grad.abs().max()) for grad in found) > 1e-3


def test_rewards_of_groups_are_asked_for_in_episodes(strategy: StrategyBase) -> None:
    prompts = prompts_of(strategy.tokenizer)
    limits = collector_of(strategy)._limits
    workflow = load_workflow(WorkflowConfig(workflow="episodes:Judged"))
    collector = EpisodeCollector(strategy, RewardSet.of(rank_in_group), workflow, seed=3, limits=limits)
    samples = collector.sample(prompts, step=2, group_size=4, temperature=1.0)
    for first in range(0, len(samples), 4):
        group = [sample for sample in samples[first : first + 4] if sample.reward is not None]
        assert len(group) == 3  # one of four leaves without asking
        assert [sample.reward for sample in group] == rank_in_group(group)
    assert not collector._siblings
