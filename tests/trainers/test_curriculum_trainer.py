"""Runs with a curriculum: results reach it on every rank alike, filtered groups too, and a resume goes on equally."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lightrl.config import DataConfig, DynamicSamplingConfig, EvalConfig, GRPOConfig, RolloutLogConfig, WorkflowConfig
from lightrl.config.strategy import CheckpointConfig
from lightrl.data.curriculum import Progress
from lightrl.records import Sample, ScoredGroup
from lightrl.trainers.curriculum import CurriculumTrainer, load_curriculum, with_curriculum
from lightrl.trainers.grpo import GRPOTrainer

SEEN: list[dict[int, int]] = []  # groups by prompt, each time that the curriculum was asked


def fewest_first(progress: Progress) -> list[float]:
    counts = {index: item.num_groups for index, item in progress.results.items()}
    SEEN.append(counts)
    fewest = min(counts.get(prompt.index, 0) for prompt in progress.prompts)
    return [float(counts.get(prompt.index, 0) == fewest) for prompt in progress.prompts]


def odd_digits(sample: Sample) -> float:
    return sum(character in "13579" for character in sample.text) / 8


def keep_most(group: ScoredGroup) -> bool:
    return group.samples[0].prompt.index != 3


def rows_of(toy: Path, folder: Path, rollout: WorkflowConfig) -> list[dict[str, Any]]:
    config = GRPOConfig(
        model=str(toy / "model"),
        train_data=str(toy / "train.jsonl"),
        output_dir=str(folder),
        **{"num_prompts": 2, "group_size": 4, "max_new_tokens": 8, "max_steps": 4, "lr": 1e-3, "strategy": "single"},
        data=DataConfig(curriculum=f"{__name__}:fewest_first"),
        rollout=rollout,
        eval=EvalConfig(every=0),
        log=RolloutLogConfig(tensorboard=False),
        checkpoint=CheckpointConfig(every=2),
    )
    trainer = with_curriculum(GRPOTrainer)(config, reward=odd_digits)  # type: ignore[call-arg]
    trainer.fit()
    trainer.close()
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "rollout",
    [WorkflowConfig(filter=f"{__name__}:keep_most"), WorkflowConfig(over_issue=0.5, max_staleness=1, agree_every=2)],
)
def test_the_results_of_every_group_choose_the_next_prompts(rollout: WorkflowConfig, toy: Path, tmp_path: Path) -> None:
    SEEN.clear()
    undisturbed = rows_of(toy, tmp_path / "run", rollout)
    assert SEEN[0] == {}
    assert sum(SEEN[-1].values()) >= 6  # two groups of each of three steps
    if rollout.filter:
        assert 3 in SEEN[-1]  # what the filter rejects counts
        assert max(SEEN[-1].values()) - min(SEEN[-1].get(index, 0) for index in range(5)) <= 1
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000004")
    assert rows_of(toy, tmp_path / "run", rollout) == undisturbed


def solved_but_for_the_last(sample: Sample) -> float:
    return 1.0 if sample.prompt.index < 4 else odd_digits(sample)


def test_groups_that_dynamic_sampling_drops_choose_the_next_prompts_too(toy: Path, tmp_path: Path) -> None:
    """Of five prompts four are solved. Each group counts once, in the step that draws it."""
    SEEN.clear()
    config = GRPOConfig(
        model=str(toy / "model"),
        train_data=str(toy / "train.jsonl"),
        output_dir=str(tmp_path / "run"),
        **{"num_prompts": 1, "group_size": 4, "max_new_tokens": 8, "max_steps": 4, "strategy": "single"},
        data=DataConfig(curriculum=f"{__name__}:fewest_first"),
        dynamic_sampling=DynamicSamplingConfig(enabled=True, max_rounds=2, oversample=3),
        eval=EvalConfig(every=0),
        log=RolloutLogConfig(tensorboard=False),
        checkpoint=CheckpointConfig(every=0),
    )
    trainer = type("Learner", (CurriculumTrainer, GRPOTrainer), {})(config, reward=solved_but_for_the_last)
    trainer.fit()
    drawn = trainer.curriculum.num_drawn
    results = {index: (item.num_groups, item.mean) for index, item in trainer.curriculum._results.items()}
    trainer.close()
    assert sum(count for count, _ in results.values()) == drawn > 8
    assert [results[index][1] for index in range(4)] == [1.0] * 4
    assert 0 < results[4][1] < 1
    assert SEEN[1].keys() > {0}  # a step that learns from nothing tells of its groups as well


def test_dynamic_sampling_beside_a_curriculum_is_refused_where_a_filter_does_it(toy: Path, tmp_path: Path) -> None:
    config = GRPOConfig(
        model=str(toy / "model"),
        train_data=str(toy / "train.jsonl"),
        output_dir=str(tmp_path),
        data=DataConfig(curriculum="half_solved"),
        dynamic_sampling=DynamicSamplingConfig(enabled=True),
    )
    with pytest.raises(ValueError, match=r"nor with --data.curriculum without --rollout_ranks: use --rollout.filter"):
        with_curriculum(GRPOTrainer)(config)


def test_what_is_no_curriculum_is_told() -> None:
    with pytest.raises(ValueError, match="this is no function"):
        load_curriculum("lightrl.data.curriculum:__name__")
    with pytest.raises(ValueError, match=r"nearest_name\(.*\) -> .* cannot be called with \(progress\): .*'known'"):
        load_curriculum("lightrl.imports:nearest_name")
    recorded = WorkflowConfig(record="folder")
    with pytest.raises(ValueError, match=r"takes no part in --rollout.record and --rollout.from"):
        GRPOConfig(data=DataConfig(curriculum="half_solved"), rollout=recorded)
    with pytest.raises(ValueError, match=r"Call run_trainer\(GRPOTrainer, config\)"):
        GRPOTrainer(GRPOConfig(data=DataConfig(curriculum="half_solved")))
    with pytest.raises(TypeError, match="needs a subclass"):
        with_curriculum(lambda config: GRPOTrainer(config))
