"""Groups that bring the reward of a greedy response to their prompt."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightrl.config import AlgorithmConfig, GRPOConfig
from lightrl.engines.colocated import EngineStatus
from lightrl.records import Sample, ScoredGroup
from lightrl.trainers.greedy_baseline import baselines_of
from lightrl.trainers.grpo import GRPOTrainer


def first_digit(sample: Sample) -> float:
    """Differs from response to response."""
    return float(sample.response_ids[0])


@pytest.fixture(scope="module")
def trainer(toy_options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[GRPOTrainer]:
    folder = str(tmp_path_factory.mktemp("greedy") / "run")
    config = GRPOConfig(**toy_options, num_prompts=3, output_dir=folder, algorithm=AlgorithmConfig(advantage="remax"))
    trainer = GRPOTrainer(config, reward=first_digit)
    yield trainer
    trainer.close()


def test_a_group_has_the_reward_of_the_greedy_response_and_its_samples_are_compared_with_it(
    trainer: GRPOTrainer,
) -> None:
    prompts = list(enumerate(trainer.prompts.train[:3]))
    groups = trainer.make_groups(prompts)
    greedy = [first_digit(sample) for sample in trainer.collector.sample_greedily(prompts)]
    assert [group.baseline for group in groups] == greedy
    assert len({sample.response_ids for sample in groups[0].samples}) > 1  # the samples themselves are no greedy ones
    found = trainer.compute_advantages(groups)
    size = trainer.config.group_size
    assert [item.advantage for item in found] == [item.reward - greedy[i // size] for i, item in enumerate(found)]
    assert trainer.report().metrics["greedy/reward/first_digit"] == pytest.approx(sum(greedy) / 3)


def test_every_sample_of_a_group_has_its_baseline(trainer: GRPOTrainer) -> None:
    groups = trainer.make_groups(list(enumerate(trainer.prompts.train[:2])))
    trainer.report()
    changed = [dataclasses.replace(group, baseline=float(i)) for i, group in enumerate(groups)]
    assert baselines_of(changed) == [0.0] * trainer.config.group_size + [1.0] * trainer.config.group_size


def test_a_subclass_samples_in_its_own_way_and_the_engine_sleeps_after_both(
    trainer: GRPOTrainer, tmp_path: Path
) -> None:
    seen: list[EngineStatus] = []

    class Reversing(GRPOTrainer):
        def sample(self, prompts: Any) -> list[Sample]:
            made = super().sample(prompts)
            seen.append(self.strategy.serving.require_engine().status)
            return made[::-1]

    config = dataclasses.replace(trainer.config, output_dir=str(tmp_path / "run"))
    own = Reversing(config, reward=first_digit)
    prompts = list(enumerate(trainer.prompts.train[:2]))
    made = [item.response_ids for group in own.make_groups(prompts) for item in group.samples]
    assert [*seen, own.strategy.serving.require_engine().status] == [EngineStatus.WAKEUP, EngineStatus.SLEEPED]
    assert made == [item.response_ids for item in trainer.sample(prompts)[::-1]]
    own.close()


def test_a_step_learns_from_the_groups_that_a_subclass_makes(trainer: GRPOTrainer, tmp_path: Path) -> None:
    learned: list[list[float]] = []

    class Halving(GRPOTrainer):
        def make_groups(self, prompts: Any) -> list[ScoredGroup]:
            groups = super().make_groups(prompts)
            return [dataclasses.replace(group, rewards=tuple(one / 2 for one in group.rewards)) for group in groups]

        def learn_from(self, groups: Any) -> Any:
            learned.extend(list(group.rewards) for group in groups)
            return super().learn_from(groups)

    config = dataclasses.replace(trainer.config, output_dir=str(tmp_path / "run"), algorithm=AlgorithmConfig())
    own = Halving(config, reward=first_digit)
    own.step()
    own.close()
    assert len(learned) == 3
    assert {reward % 1 for rewards in learned for reward in rewards} <= {0.0, 0.5}
    assert any(reward % 1 for rewards in learned for reward in rewards)
