"""Groups whose samples know what each reward gave."""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightrl.algorithms.advantages import ScoredSamples, gdpo
from lightrl.algorithms.registry import advantage
from lightrl.config import AlgorithmConfig, GRPOConfig, WorkflowConfig
from lightrl.records import Sample, ScoredGroup
from lightrl.trainers.grpo import GRPOTrainer
from lightrl.trainers.objective import components_of
from lightrl.trainers.scheduled import scheduled


def first_digit(sample: Sample) -> float:
    return float(sample.response_ids[0])


def of_even_ones(sample: Sample) -> float | None:
    """Does not apply to every second sample, and fails for one."""
    if sample.key == (1, 2):
        raise ValueError("no")
    return float(len(sample.response_ids)) if sample.sample_index % 2 == 0 else None


def half_length(sample: Sample) -> float:
    return len(sample.response_ids) / 2


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


def by_number(sample: Sample) -> float:
    return float(sample.sample_index % 2) if sample.key[0] == 0 else 0.5


def one_less_that(sample: Sample) -> float:
    return 1 - by_number(sample)


@pytest.mark.parametrize(("name", "share"), [("gdpo", 2 / 3), ("grpo", 1.0)])
def test_groups_are_equal_where_no_reward_differs_that_the_advantage_compares(
    name: str, share: float, toy_options: dict[str, Any], tmp_path: Path
) -> None:
    """The sum is 1 for all samples; the rewards of the first prompt's samples differ one by one."""
    options = {**toy_options, "num_prompts": 3, "output_dir": str(tmp_path / "run")}
    config = GRPOConfig(**options, algorithm=AlgorithmConfig(advantage=name))
    trainer = GRPOTrainer(config, reward=[by_number, one_less_that])
    trainer.make_groups(list(enumerate(trainer.prompts.train[:3])))
    assert trainer.statistics.reduce(trainer.strategy.comm)["reward/equal_groups"] == pytest.approx(share)
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


def test_samples_without_single_rewards_are_refused(trainer: GRPOTrainer) -> None:
    groups = trainer.make_groups(list(enumerate(trainer.prompts.train[:1])))
    bare = [dataclasses.replace(sample, components={}) for sample in groups[0].samples]
    with pytest.raises(ValueError, match="samples without the values of their single rewards"):
        trainer.compute_advantages([dataclasses.replace(groups[0], samples=tuple(bare))])
    assert trainer.components is not None
    scored = [dataclasses.replace(sample, is_scored=True) for sample in groups[0].samples]
    with pytest.raises(ValueError, match="The workflow asks for the run's rewards itself and gives its episode one"):
        trainer.components.completed([dataclasses.replace(groups[0], samples=tuple(scored))])


def keep_all(group: ScoredGroup) -> bool:
    return True


@pytest.mark.parametrize("name", ["gdpo", f"{__name__}:over_greedy"])
def test_a_schedule_keeps_what_each_reward_gave(name: str, toy_options: dict[str, Any], tmp_path: Path) -> None:
    losses = {}
    for kind, filtered in (("plain", ""), ("scheduled", f"{__name__}:keep_all")):
        config = GRPOConfig(
            **{**toy_options, "num_prompts": 3, "max_steps": 3, "output_dir": str(tmp_path / kind)},
            algorithm=AlgorithmConfig(advantage=name),
            rollout=WorkflowConfig(filter=filtered),
        )
        make = scheduled(GRPOTrainer) if filtered else GRPOTrainer
        trainer = make(config, reward=[first_digit, half_length])
        trainer.fit()
        rows = map(json.loads, (tmp_path / kind / "metrics.jsonl").read_text().splitlines())
        losses[kind] = [row["grad_norm"] for row in rows if "grad_norm" in row]
        trainer.close()
    assert len(losses["plain"]) == 3
    assert losses["scheduled"] == losses["plain"]
