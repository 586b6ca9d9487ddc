"""The parts of GRPO's step in one process, on samples changed by hand."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightrl.config import AlgorithmConfig, DynamicSamplingConfig, GRPOConfig, OverlongConfig
from lightrl.records import ScoredGroup
from lightrl.rewards import NO_REWARD
from lightrl.trainers.grpo import GRPOTrainer
from lightrl.trainers.policy_step import describe_rollout


@pytest.fixture(scope="module")
def trainer(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GRPOTrainer]:
    config = GRPOConfig(
        model=str(toy / "model"),
        train_data=str(toy / "train.jsonl"),
        reward=f"{toy / 'reward.py'}:odd_digits",
        num_prompts=2,
        group_size=3,
        strategy="single",
        output_dir=str(tmp_path_factory.mktemp("parts") / "run"),
        lr=0.0,
        algorithm=AlgorithmConfig(advantage="dr_grpo"),
        dynamic_sampling=DynamicSamplingConfig(enabled=True),
        overlong=OverlongConfig(buffer=4, penalty=0.5, mask_truncated=True),
    )
    trainer = GRPOTrainer(config)
    yield trainer
    trainer.close()


@pytest.fixture
def groups(trainer: GRPOTrainer) -> list[ScoredGroup]:
    trainer.step_index = 0
    found = trainer.score(trainer.sample(list(enumerate(trainer.prompts.train[:2]))))
    trainer.report()
    return found


def test_the_ratio_of_a_carried_sample_is_to_the_policy_that_sampled_it(
    trainer: GRPOTrainer, groups: list[ScoredGroup]
) -> None:
    """The first group seems to be of an older version, which gave each of its tokens 0.2 less log probability."""
    trainer.step_index = 1
    old, fresh = groups
    older = [
        dataclasses.replace(sample, sampler_logprobs=tuple(value - 0.2 for value in sample.sampler_logprobs))
        for sample in old.samples
    ]
    newer = [dataclasses.replace(sample, versions=(1,) * len(sample.versions)) for sample in fresh.samples]
    changed = [dataclasses.replace(old, samples=tuple(older)), dataclasses.replace(fresh, samples=tuple(newer))]
    experience = [dataclasses.replace(item, is_trained=True) for item in trainer.advantages(changed)]
    trainer.learn(trainer.pack(experience))
    metrics = trainer.report().metrics
    num_old, num_new = (sum(len(sample.response_ids) for sample in part) for part in (older, newer))
    wanted = (num_old * math.exp(0.2) + num_new) / (num_old + num_new)
    assert metrics["ratio/mean"] == pytest.approx(wanted, abs=1e-4)
    assert metrics["mismatch/max_abs"] < 1e-4  # of the fresh group alone


def test_length_shapes_the_reward_and_truncation_hides_the_sample(
    trainer: GRPOTrainer, groups: list[ScoredGroup]
) -> None:
    samples = [
        dataclasses.replace(sample, response_ids=(5,) * length, finish_reason=reason)
        for sample, length, reason in zip(groups[0].samples, (8, 6, 2), ("length", "stop", "stop"), strict=True)
    ]
    group = dataclasses.replace(groups[0], samples=tuple(samples), rewards=(1.0, 1.0, 0.5))
    found = trainer.advantages([group])
    # Of max_new_tokens 8 the last 4 take up to 0.5: 8 tokens lose 0.5, 6 lose 0.25, 2 nothing.
    assert [item.shaping for item in found] == [-0.5, -0.25, 0.0]
    assert [item.reward for item in found] == [1.0, 1.0, 0.5]
    # 0.5, 0.75 and 0.5 with the mean 7 / 12
    assert [item.advantage for item in found] == pytest.approx([-1 / 12, 1 / 6, -1 / 12], abs=1e-6)
    assert [item.is_trained for item in found] == [False, True, True]
    assert trainer.report().metrics["reward/overlong_penalty"] == pytest.approx(-0.25, abs=1e-6)


def test_nothing_to_train_on_skips_the_update(trainer: GRPOTrainer, groups: list[ScoredGroup]) -> None:
    """Every sample cut off and masked, and no group at all."""
    cut = [
        dataclasses.replace(
            group, samples=tuple(dataclasses.replace(sample, finish_reason="length") for sample in group.samples)
        )
        for group in groups
    ]
    for given in (cut, []):
        trainer.learn(trainer.pack(trainer.advantages(given)))
        metrics = trainer.report().metrics
        assert metrics["skipped_updates"] == 1
        assert "loss" not in metrics


def test_a_step_without_any_reward_tells_no_mean(trainer: GRPOTrainer, groups: list[ScoredGroup]) -> None:
    samples = groups[0].samples
    describe_rollout(samples, [NO_REWARD] * len(samples), trainer.statistics)
    assert "reward/mean" not in trainer.report().metrics
    describe_rollout(samples, [NO_REWARD, 1.0, 0.0], trainer.statistics)
    assert trainer.report().metrics["reward/mean"] == 0.5


def test_a_sample_of_another_rank_is_known_to_be_stale(
    trainer: GRPOTrainer, groups: list[ScoredGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that split a model run each other's samples."""
    trainer.step_index = 1
    mine = trainer.advantages(groups[:1])
    keys = {item.key for item in mine}
    monkeypatch.setattr(trainer.strategy.comm, "all_gather_object", lambda item: [item, {(7, 2)}])
    assert trainer._stale_everywhere(mine) == keys | {(7, 2)}
