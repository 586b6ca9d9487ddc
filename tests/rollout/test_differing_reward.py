"""The reward that must differ within a group: heard where groups are scored, and told to ranks that do not score."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_samples import made_sample

from lightrl.config import DynamicSamplingConfig, GRPOConfig, PPOConfig
from lightrl.records import Prompt, Sample, ScoredGroup
from lightrl.rewards import NO_REWARD
from lightrl.rewards.reward_set import RewardSet
from lightrl.rewards.scoring import FailureBudget, has_reward
from lightrl.rollout.differing_reward import DifferingReward, differing_reward_of
from lightrl.rollout.saved_groups import group_from_state, group_state

PROMPTS = [Prompt(index=index, text="", token_ids=(1,)) for index in range(4)]


def group(prompt: int, rewards: tuple[float, float]) -> ScoredGroup:
    samples = tuple(
        made_sample(
            prompt=PROMPTS[prompt],
            position=prompt,
            sample_index=index,
            response_ids=(7,),
            sampler_logprobs=(-0.1,),
            text="x",
        )
        for index in range(2)
    )
    return ScoredGroup(samples=samples, rewards=rewards, step=0)


def named(sample: Sample) -> float | None:
    """Does not judge prompt 0, gives both samples of prompt 1 the same, fails for 2, and tells those of 3 apart."""
    if sample.prompt.index == 2:
        raise ValueError("no verdict")
    return {1: 1.0, 3: float(sample.sample_index)}.get(sample.prompt.index)


def test_a_rank_that_does_not_score_judges_as_the_one_that_does() -> None:
    rewards = RewardSet.of(named)
    scoring, told = DifferingReward("named", rewards), DifferingReward("named", RewardSet.of(named))
    groups = [group(index, (0.0, 1.0)) for index in range(4)]
    rewards.run("named", [sample for one in groups for sample in one.samples], FailureBudget(9))
    sent = [group_from_state(group_state(one), PROMPTS) for one in scoring.completed(groups)]
    assert [one.rewards for one in sent] == [(0.0, 1.0)] * 4  # still the sums
    judged = [told.judged(replace(one, rewards=(0.0, 1.0))) for one in sent]
    assert [one.has_signal for one in judged] == [scoring.judged(one).has_signal for one in groups]
    assert [one.has_signal for one in judged] == [True, False, False, True]
    assert not any(map(has_reward, judged[2].rewards))
    scoring.forget()
    assert [scoring.judged(one).rewards for one in groups] == [(0.0, 1.0)] * 4  # nothing heard


@pytest.mark.parametrize("is_told", [False, True])
def test_the_reward_alone_decides_where_each_reward_is_compared_by_itself(is_told: bool) -> None:
    """Prompts 1 and 3 have equal sums and another reward that differs. Prompt 0 is not judged, and its sums differ."""
    rewards = RewardSet.of(named)
    judging = DifferingReward("named", rewards)
    groups = [_with_another(group(index, (0.0, 1.0) if index == 0 else (1.0, 1.0))) for index in (0, 1, 3)]
    rewards.run("named", [sample for one in groups for sample in one.samples], FailureBudget(9))
    if is_told:
        groups = [group_from_state(group_state(one), PROMPTS) for one in judging.completed(groups)]
        judging = DifferingReward("named", RewardSet.of(named))
    assert [one.has_signal for one in groups] == [True] * 3
    assert [judging.judged(one).has_signal for one in groups] == [True, False, True]


def _with_another(one: ScoredGroup) -> ScoredGroup:
    samples = [replace(sample, components={"other": (1.0, float(sample.sample_index))}) for sample in one.samples]
    return replace(one, samples=tuple(samples))


def test_a_failure_stays_one_on_its_way() -> None:
    [sent] = DifferingReward("named", RewardSet.of(named)).completed([group(1, (NO_REWARD, 1.0))])
    back = group_from_state(group_state(sent), PROMPTS)
    assert [has_reward(sample.judged or 0.0) for sample in back.samples] == [False, True]


def test_only_a_run_that_names_a_reward_has_one() -> None:
    rewards = RewardSet.of(named)
    assert differing_reward_of(PPOConfig(), rewards) is None
    assert differing_reward_of(GRPOConfig(), rewards) is None
    sampling = DynamicSamplingConfig(enabled=True, reward="named")
    assert differing_reward_of(GRPOConfig(dynamic_sampling=sampling), rewards) is not None
    with pytest.raises(ValueError, match=r"'wrong' is no reward of this run .* There is named\."):
        DifferingReward("wrong", rewards)
