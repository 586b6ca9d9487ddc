"""The parts of GRPO's step in one process, on samples changed by hand."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lightrl.config import (
    AlgorithmConfig,
    DynamicSamplingConfig,
    EvalConfig,
    GRPOConfig,
    OverlongConfig,
    RolloutLogConfig,
)
from lightrl.records import PackedBatch, ScoredGroup, TokenScores
from lightrl.rewards import NO_REWARD
from lightrl.rollout.scheduled_collector import SingleTurn
from lightrl.trainers.grpo import GRPOTrainer
from lightrl.trainers.loggers.attach import Loggers
from lightrl.trainers.objective import PolicyObjective
from lightrl.trainers.policy_step import describe_rollout
from lightrl.trainers.scheduled import YoungUpdates


@pytest.fixture(scope="module")
def trainer(toy_options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[GRPOTrainer]:
    config = GRPOConfig(
        **toy_options,
        num_prompts=2,
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


def as_older(group: ScoredGroup, num_older_tokens: int = 99) -> ScoredGroup:
    """Makes step 1 take the group for one of step 0, whose weights gave its tokens 0.2 less log probability."""
    samples = [
        dataclasses.replace(
            sample,
            sampler_logprobs=tuple(value - 0.2 for value in sample.sampler_logprobs),
            versions=tuple(int(index >= num_older_tokens) for index in range(len(sample.versions))),
        )
        for sample in group.samples
    ]
    return dataclasses.replace(group, samples=tuple(samples))


def learn_in_step_1(trainer: GRPOTrainer, groups: list[ScoredGroup]) -> dict[str, float]:
    trainer.step_index = 1
    experience = [dataclasses.replace(item, is_trained=True) for item in trainer.compute_advantages(groups)]
    batch = trainer.compute_old_logprobs(trainer.pack(experience))
    trainer.train(trainer.compute_reference_logprobs(batch))
    return trainer.report().metrics


def num_tokens(group: ScoredGroup) -> int:
    return sum(len(sample.response_ids) for sample in group.samples)


def test_the_ratio_of_a_carried_sample_is_to_the_policy_that_sampled_it(
    trainer: GRPOTrainer, groups: list[ScoredGroup]
) -> None:
    fresh = [dataclasses.replace(sample, versions=(1,) * len(sample.versions)) for sample in groups[1].samples]
    old, new = as_older(groups[0]), dataclasses.replace(groups[1], samples=tuple(fresh))
    metrics = learn_in_step_1(trainer, [old, new])
    wanted = (num_tokens(old) * math.exp(0.2) + num_tokens(new)) / (num_tokens(old) + num_tokens(new))
    assert metrics["ratio/mean"] == pytest.approx(wanted, abs=1e-4)
    assert metrics["mismatch/max_abs"] < 1e-4  # of the fresh group alone


def test_a_correction_weighs_a_carried_sample_by_both_policies(
    trainer: GRPOTrainer, groups: list[ScoredGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weight is e^0.2 = 1.2214; the clip compares with the weights before the update, which lr 0 leaves alone."""
    algorithm = dataclasses.replace(trainer.config.algorithm, correction="tis")
    monkeypatch.setattr(trainer.config, "algorithm", algorithm)
    monkeypatch.setattr(trainer, "objective", PolicyObjective(algorithm, group_size=3))
    metrics = learn_in_step_1(trainer, [as_older(group) for group in groups])
    assert metrics["correction/ratio_max"] == pytest.approx(math.exp(0.2), abs=1e-4)
    assert metrics["correction/ratio"] == pytest.approx(math.exp(0.2), abs=1e-4)
    assert metrics["ratio/mean"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(("proximal", "weight"), [("recompute", 0.2), ("interpolate", 0.1)])
def test_decoupled_ppo_weighs_older_samples(
    proximal: Any, weight: float, trainer: GRPOTrainer, groups: list[ScoredGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy has gone 0.2 up since the samples: recomputed, that is the weight; interpolated, half of it is."""
    algorithm = dataclasses.replace(trainer.config.algorithm, proximal=proximal)
    monkeypatch.setattr(trainer.config, "algorithm", algorithm)
    monkeypatch.setattr(trainer, "objective", PolicyObjective(algorithm, group_size=3))
    metrics = learn_in_step_1(trainer, [as_older(group) for group in groups])
    assert metrics["correction/ratio_max"] == pytest.approx(math.exp(weight), abs=1e-4)
    assert metrics["ratio/mean"] == pytest.approx(math.exp(0.2 - weight), abs=1e-4)
    assert metrics["rollout/staleness_max"] == 1


def test_a_mismatch_that_was_not_measured_is_not_reported(trainer: GRPOTrainer, groups: list[ScoredGroup]) -> None:
    metrics = learn_in_step_1(trainer, [as_older(group) for group in groups])
    assert not [name for name in metrics if name.startswith("mismatch/")]


def test_further_prompts_of_a_step_take_its_next_positions(trainer: GRPOTrainer) -> None:
    """Dynamic sampling draws until a batch is full; a position is a sample's key, so none comes twice in a step."""
    assert [position for position, _ in trainer.prompts.draw(2)] == [0, 1]
    assert [position for position, _ in trainer.prompts.draw(3, first=2)] == [2, 3, 4]


def test_a_step_is_drawn_once_unless_dynamic_sampling_fills_it(
    trainer: GRPOTrainer, groups: list[ScoredGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without dynamic sampling, one call asks for all prompts; with it, the sampler decides on the calls."""
    asked: list[int] = []

    def roll_out(count: int, first: int = 0) -> list[ScoredGroup]:
        asked.append(count)
        return groups

    monkeypatch.setattr(trainer, "roll_out", roll_out)
    monkeypatch.setattr(trainer.dynamic_sampling, "fill", lambda step, sample: [*sample(step + 1), *sample(2)])
    monkeypatch.setattr(trainer, "step_index", 4)
    assert trainer.draw() == [*groups, *groups]
    assert asked == [5, 2]
    monkeypatch.setattr(trainer, "dynamic_sampling", None)
    assert trainer.draw() == groups
    assert asked == [5, 2, trainer.config.num_prompts]


def test_length_shapes_the_reward_and_truncation_hides_the_sample(
    trainer: GRPOTrainer, groups: list[ScoredGroup]
) -> None:
    samples = [
        dataclasses.replace(sample, response_ids=(5,) * length, finish_reason=reason)
        for sample, length, reason in zip(groups[0].samples, (8, 6, 2), ("length", "stop", "stop"), strict=True)
    ]
    group = dataclasses.replace(groups[0], samples=tuple(samples), rewards=(1.0, 1.0, 0.5))
    found = trainer.compute_advantages([group])
    # Of max_new_tokens 8 the last 4 take up to 0.5: 8 tokens lose 0.5, 6 lose 0.25, 2 nothing.
    assert [item.shaping for item in found] == [-0.5, -0.25, 0.0]
    assert [item.reward for item in found] == [1.0, 1.0, 0.5]
    # 0.5, 0.75 and 0.5 with the mean 7 / 12
    assert [item.advantage for item in found] == pytest.approx([-1 / 12, 1 / 6, -1 / 12], abs=1e-6)
    assert [item.is_trained for item in found] == [False, True, True]
    assert trainer.report().metrics["reward/overlong_penalty"] == pytest.approx(-0.25, abs=1e-6)


def test_a_conversation_of_an_episode_that_was_cut_off_is_hidden_alone(
    trainer: GRPOTrainer, groups: list[ScoredGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "run", dataclasses.replace(trainer.run, workflow=SingleTurn()))
    first, *others = (dataclasses.replace(sample, finish_reason="stop") for sample in groups[0].samples)
    branches = [
        dataclasses.replace(first, sample_index=1_000_000, finish_reason="length"),
        dataclasses.replace(first, sample_index=2_000_000),
    ]
    samples = (dataclasses.replace(first, branches=tuple(branches)), *others)
    found = trainer.compute_advantages([dataclasses.replace(groups[0], samples=samples)])
    trainer.report()
    assert [item.sample.sample_index for item in found if item.is_trained] == [0, 2_000_000, 1, 2]


def test_advantages_are_whitened_over_tokens_that_are_not_too_old(
    trainer: GRPOTrainer, groups: list[ScoredGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that their mean over the trained tokens is 0."""
    young = YoungUpdates(trainer.run, trainer.statistics)
    young._max_age = 1
    monkeypatch.setattr(trainer, "updates", young)
    monkeypatch.setattr(trainer, "objective", PolicyObjective(AlgorithmConfig(advantage="reinforce_plus_plus")))
    trainer.step_index = 2
    long, *others = (sample for group in groups for sample in group.samples if len(sample.response_ids) > 1)
    aged = dataclasses.replace(long, versions=(0, *(2 for _ in long.versions[1:])), finish_reason="stop")
    fresh = [dataclasses.replace(one, versions=(2,) * len(one.versions), finish_reason="stop") for one in others[:2]]
    group = ScoredGroup(samples=(aged, *fresh), rewards=(1.0, 0.0, 0.0), step=2)
    items = trainer.compute_advantages([group])
    assert [item.trained_tokens.count(False) for item in items] == [1, 0, 0]
    assert sum(item.advantage * item.trained_tokens.count(True) for item in items) == pytest.approx(0.0, abs=1e-6)
    assert items[0].advantage > 0
    assert trainer.pack(items).samples == items


def test_nothing_to_train_on_skips_the_update(trainer: GRPOTrainer, groups: list[ScoredGroup]) -> None:
    """Every sample cut off and masked, and no group at all."""
    cut = [
        dataclasses.replace(
            group, samples=tuple(dataclasses.replace(sample, finish_reason="length") for sample in group.samples)
        )
        for group in groups
    ]
    for given in (cut, []):
        trainer.learn_from(given)
        metrics = trainer.report().metrics
        assert metrics["skipped_updates"] == 1
        assert "loss" not in metrics


def test_a_step_without_any_reward_tells_no_mean(trainer: GRPOTrainer, groups: list[ScoredGroup]) -> None:
    samples = groups[0].samples
    describe_rollout(samples, [NO_REWARD] * len(samples), trainer.statistics)
    assert "reward/mean" not in trainer.report().metrics
    describe_rollout(samples, [NO_REWARD, 1.0, 0.0], trainer.statistics)
    assert trainer.report().metrics["reward/mean"] == 0.5


class Interrupted(GRPOTrainer):
    """Ctrl-C comes in the second micro-batch of the first update, if at all."""

    num_left = 0

    def loss(self, scores: TokenScores, batch: PackedBatch) -> Tensor:
        self.num_left -= 1
        if self.num_left == 0:
            raise KeyboardInterrupt
        return super().loss(scores, batch)


def test_what_an_interrupted_step_has_computed_is_no_part_of_the_next_one(
    toy_options: dict[str, Any], tmp_path: Path
) -> None:
    metrics = []
    for name in ("undisturbed", "interrupted"):
        options = {**toy_options, "num_prompts": 2, "max_steps": 1, "micro_batch_size": 2, "eval": EvalConfig(every=0)}
        log = RolloutLogConfig(to="tensorboard")
        trainer = Interrupted(GRPOConfig(**options, log=log, output_dir=str(tmp_path / name)))
        if name == "interrupted":
            trainer.num_left = 2
            with pytest.raises(KeyboardInterrupt):
                trainer.fit()
        else:
            trainer.prompts.draw(2)  # those of the step that is interrupted
        metrics.append(trainer.fit())
        assert [type(observer) for observer in trainer.observers] == [Loggers]  # not once for each fit()
        trainer.close()
    compared = [{name: found[name] for name in ("grad_norm", "tokens/prompt", "reward/mean")} for found in metrics]
    assert compared[0] == compared[1]
    assert metrics[0]["grad_norm"] > 0
