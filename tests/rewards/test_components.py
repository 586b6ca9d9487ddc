"""What each reward gave, as it is written onto samples."""

from made_samples import made_sample

from lightrl.records import Prompt, Sample, ScoredGroup
from lightrl.rewards.applicability import fail_unjudged
from lightrl.rewards.components import ComponentKeeper
from lightrl.rewards.reward_set import FailurePolicy, RewardSet, WeightedReward
from lightrl.rewards.scoring import FailureBudget


def test_a_failed_reward_counts_as_the_value_that_is_set() -> None:
    prompt = Prompt(index=0, text="", token_ids=(1,), answer="")
    samples = [made_sample(prompt=prompt, sample_index=index, response_ids=(1,)) for index in range(4)]

    def fails_for_one(sample: Sample) -> float | None:
        if sample.sample_index == 1:
            raise ValueError("no")
        return 3.0 if sample.sample_index < 3 else None

    def of_the_first(sample: Sample) -> float | None:
        return 1.0 if sample.sample_index == 0 else None

    rewards = RewardSet(
        [
            WeightedReward(label="one", weight=2.0, reward=fails_for_one),
            WeightedReward(label="two", weight=1.0, reward=of_the_first),
        ],
        policy=FailurePolicy(max_failures=9, value=-1.0),
    )
    keeper = ComponentKeeper(rewards)
    outcomes = {label: rewards.run(label, samples, FailureBudget(max_failures=9)) for label in ("one", "two")}
    fail_unjudged(samples, outcomes)
    scores = rewards.combine(outcomes).rewards
    group = ScoredGroup(samples=tuple(samples), rewards=tuple(scores), step=0)
    (done,) = keeper.completed([group])
    # The second reward judges the first sample alone; no reward judges the last sample, so both have failed there.
    assert scores == [7.0, -2.0, 6.0, -3.0]
    assert [sample.components["one"] for sample in done.samples] == [(2.0, 3.0), (2.0, -1.0), (2.0, 3.0), (2.0, -1.0)]
    assert str([sample.components["two"][1] for sample in done.samples]) == "[1.0, nan, nan, -1.0]"
