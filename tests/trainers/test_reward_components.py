"""Groups whose samples know what each reward gave."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest

from lightrl.algorithms.advantages import ScoredSamples, gdpo
from lightrl.algorithms.registry import advantage
from lightrl.config import AlgorithmConfig, GRPOConfig, RolloutConfig
from lightrl.records import Prompt, Sample, ScoredGroup
from lightrl.rewards.applicability import fail_unjudged
from lightrl.rewards.reward_set import FailurePolicy, RewardSet, WeightedReward
from lightrl.rewards.scoring import FailureBudget
from lightrl.trainers.grpo import GRPOTrainer
from lightrl.trainers.objective import components_of
from lightrl.trainers.reward_components import ComponentKeeper
from lightrl.trainers.scheduled import check_schedule


def first_digit(sample: Sample) -> float:
    return float(sample.response_ids[0])


def of_even_ones(sample: Sample) -> float | None:
    """Does not apply to every second sample, and fails for one."""
    if sample.key == (1, 2):
        raise ValueError("no")
    return float(len(sample.response_ids)) if sample.sample_index % 2 == 0 else None


@advantage(whiten=True, needs=("components", "greedy_baseline"), min_group=2)
def over_greedy(samples: ScoredSamples) -> Any:
    return gdpo(samples) + samples.scores - samples.baselines


@pytest.fixture(scope="module", params=["gdpo", f"{__name__}:over_greedy"])
def trainer(
    request: pytest.FixtureRequest, toy_options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GRPOTrainer]:
    folder = str(tmp_path_factory.mktemp("components") / "run")
    options = {**toy_options, "max_reward_failures": 9, "num_prompts": 3, "output_dir": folder}
    config = GRPOConfig(**options, algorithm=AlgorithmConfig(advantage=request.param))
    trainer = GRPOTrainer(config, reward=[first_digit, of_even_ones])
    yield trainer
    trainer.close()


def test_every_sample_knows_what_each_reward_gave(trainer: GRPOTrainer) -> None:
    for _ in range(2):  # an evaluation between them leaves nothing behind
        groups = trainer.make_groups(list(enumerate(trainer.prompts.train[:3])))
        for sample in (sample for group in groups for sample in group.samples):
            assert list(sample.components) == ["first_digit", "of_even_ones"]
            assert sample.components["first_digit"] == (1.0, first_digit(sample))
            given = math.nan if sample.key == (1, 2) else of_even_ones(sample)
            found = sample.components["of_even_ones"][1]
            assert found == given or (math.isnan(found) and (given is None or math.isnan(given)))
        trainer.evaluate()
    found = trainer.compute_advantages(groups)
    assert len(found) == 3 * trainer.config.group_size - 1  # without the sample whose reward failed
    assert sum(map(abs, (item.advantage for item in found))) > 0
    shaped = [dataclasses.replace(item, shaping=-0.5) for item in found]
    assert components_of(shaped)[""].values.tolist() == [-0.5] * len(found)
    trainer.report()


def test_a_failed_reward_counts_as_the_value_that_is_set() -> None:
    prompt = Prompt(index=0, text="", token_ids=(1,), answer="")
    samples = [
        Sample(
            prompt=prompt,
            position=0,
            sample_index=index,
            response_ids=(1,),
            sampler_logprobs=(0.0,),
            versions=(0,),
            finish_reason="stop",
            text="",
        )
        for index in range(4)
    ]

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


def test_samples_without_single_rewards_are_refused(trainer: GRPOTrainer) -> None:
    groups = trainer.make_groups(list(enumerate(trainer.prompts.train[:1])))
    bare = [dataclasses.replace(sample, components={}) for sample in groups[0].samples]
    with pytest.raises(ValueError, match="samples without the values of their single rewards"):
        trainer.compute_advantages([dataclasses.replace(groups[0], samples=tuple(bare))])
    assert trainer.components is not None
    scored = [dataclasses.replace(sample, is_scored=True) for sample in groups[0].samples]
    with pytest.raises(ValueError, match="The workflow asks for the run's rewards itself and gives its episode one"):
        trainer.components.completed([dataclasses.replace(groups[0], samples=tuple(scored))])


def test_a_schedule_is_refused() -> None:
    config = GRPOConfig(algorithm=AlgorithmConfig(advantage="gdpo"))
    with pytest.raises(
        ValueError, match="--algorithm.advantage gdpo needs each reward by itself, and a schedule keeps"
    ):
        check_schedule(config)
    check_schedule(GRPOConfig())
    check_schedule(RolloutConfig())
