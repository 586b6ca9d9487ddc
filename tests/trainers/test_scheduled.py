"""Scheduled trainers: equal to plain ones where nothing is left under way, resumed exactly, masks of old tokens."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made_samples import made_sample

from lightrl.comm import Comm
from lightrl.config import DynamicSamplingConfig, EvalConfig, GRPOConfig, PPOConfig, RolloutLogConfig, WorkflowConfig
from lightrl.config.strategy import CheckpointConfig
from lightrl.data.packing import dummy_batch
from lightrl.metrics import Statistics
from lightrl.records import Experience, Prompt, Sample, ScoredGroup, Status
from lightrl.rollout.client import EngineClient
from lightrl.rollout.episode import Episode
from lightrl.rollout.workflow import Workflow
from lightrl.trainers.fit import Trainer
from lightrl.trainers.grpo import GRPOTrainer
from lightrl.trainers.ppo import PPOTrainer
from lightrl.trainers.scheduled import YoungUpdates, load_filter, scheduled, scheduler_of, unequal_rewards

ASYNC = {"over_issue": 0.5, "max_staleness": 2, "agree_every": 2, "max_token_staleness": 1}
KEEPS = {"over_issue": 1.0, "max_staleness": 3, "agree_every": 1, "keep_cache": True}
LONG = {"max_new_tokens": 32, "group_size": 2, "max_steps": 6}  # some samples of a group end long before others
FREE = ("time/", "memory/", "tokens/per_second", "sync/gb_per_s")


def keep_all(group: ScoredGroup) -> bool:
    return True


class Broken(Workflow):
    """Fails in every episode."""

    async def arun_episode(self, engine: EngineClient, data: Prompt) -> Episode:
        raise OSError("the server is gone")


def odd_digits(sample: Sample) -> float:
    return sum(character in "13579" for character in sample.text) / 8


def rows_of(trainer_class: type[Trainer], toy: Path, folder: Path, **options: Any) -> list[dict[str, Any]]:
    """Trains a few steps in this process; returns the metrics that depend on the numbers alone."""
    kind = GRPOConfig if trainer_class is GRPOTrainer else PPOConfig
    config = kind(
        model=str(toy / "model"),
        train_data=str(toy / "train.jsonl"),
        output_dir=str(folder),
        **{"num_prompts": 4, "group_size": 4, "max_new_tokens": 12, "max_steps": 4, "lr": 1e-3, "strategy": "single"}
        | options,
        eval=EvalConfig(every=0),
        log=RolloutLogConfig(tensorboard=False),
        checkpoint=CheckpointConfig(every=2),
    )
    made = scheduled(trainer_class) if config.rollout.is_scheduled else trainer_class
    trainer = made(config, reward=odd_digits)  # type: ignore[call-arg]
    trainer.fit()
    trainer.close()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(FREE)} for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("trainer_class", [GRPOTrainer, PPOTrainer])
def test_a_schedule_that_leaves_nothing_equals_a_plain_run_to_the_bit(
    trainer_class: type[Trainer], toy: Path, tmp_path: Path
) -> None:
    plain = rows_of(trainer_class, toy, tmp_path / "plain", max_steps=2)
    keeps = WorkflowConfig(filter=f"{__name__}:keep_all")
    ours = rows_of(trainer_class, toy, tmp_path / "ours", max_steps=2, rollout=keeps)
    common = [{name: row[name] for name in other} for row, other in zip(ours, plain, strict=True)]
    assert common == plain


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"over_issue": 0.5, "max_staleness": 1}])
def test_a_run_ends_if_all_episodes_fail_even_with_a_filter(options: dict[str, Any], toy: Path, tmp_path: Path) -> None:
    rollout = WorkflowConfig(workflow=f"{__name__}:Broken", filter="unequal_rewards", **options)
    with pytest.raises(RuntimeError, match="Every episode of the step has failed or was rejected"):
        rows_of(GRPOTrainer, toy, tmp_path / "run", max_steps=2, rollout=rollout)


@pytest.mark.slow
def test_a_resumed_run_equals_the_undisturbed_one(toy: Path, tmp_path: Path) -> None:
    folder, options = tmp_path / "run", WorkflowConfig(**ASYNC)  # type: ignore[arg-type]
    undisturbed = rows_of(GRPOTrainer, toy, folder, rollout=options)
    assert sum(row["rollout/carried"] + row["rollout/waiting"] for row in undisturbed) > 0
    assert max(row["rollout/staleness_max"] for row in undisturbed) in (1, 2)
    shutil.rmtree(folder / "checkpoints" / "step-000004")
    assert rows_of(GRPOTrainer, toy, folder, rollout=options) == undisturbed
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert all(row["ticket"] >= 0 for row in samples)


@pytest.mark.slow
def test_a_run_that_keeps_its_cache_resumes_as_the_undisturbed_one(toy: Path, tmp_path: Path) -> None:
    folder, options = tmp_path / "run", WorkflowConfig(**KEEPS)  # type: ignore[arg-type]
    undisturbed = rows_of(GRPOTrainer, toy, folder, rollout=options, **LONG)
    assert max(carried_mismatch(undisturbed)) > 1e-3  # the trainer computes the whole sample under the new weights
    assert max(row.get("mismatch/max_abs", 0.0) for row in undisturbed) < 3e-5
    kept = [json.loads(line)["memory/kept_gb"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert kept[3] > 0  # at step 4, from which it goes on
    shutil.rmtree(folder / "checkpoints" / "step-000006")
    assert (folder / "checkpoints" / "step-000004").is_dir()
    assert rows_of(GRPOTrainer, toy, folder, rollout=options, **LONG) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("trainer_class", [GRPOTrainer, PPOTrainer])
def test_a_kept_cache_of_the_same_weights_gives_the_trainers_logprobs(
    trainer_class: type[Trainer], toy: Path, tmp_path: Path
) -> None:
    options = WorkflowConfig(**KEEPS)  # type: ignore[arg-type]
    rows = rows_of(trainer_class, toy, tmp_path / "kept", rollout=options, lr=1e-12, **LONG)
    assert max(carried_mismatch(rows)) < 1e-5


def carried_mismatch(rows: list[dict[str, Any]]) -> list[float]:
    found = [row["mismatch/carried_max_abs"] for row in rows if "mismatch/carried_max_abs" in row]
    assert len(found) > 1
    return found


# ---- Parts ---------------------------------------------------------------------------------------------------------


def experience(versions: tuple[int, ...], own: tuple[bool, ...] = ()) -> Experience:
    sample = made_sample(
        response_ids=(5,) * len(versions), sampler_logprobs=(-1.0,) * len(versions), versions=versions, own=own
    )
    return Experience(sample=sample, reward=1.0, advantage=0.5)


def young_updates(max_age: int) -> tuple[YoungUpdates, dict[str, float]]:
    updates = YoungUpdates.__new__(YoungUpdates)
    updates._max_age = max_age
    counted: dict[str, float] = {}
    updates._statistics = type("", (), {"add": lambda _, name, value: counted.update({name: value})})()  # type: ignore[assignment]
    return updates, counted


def test_old_tokens_are_masked_and_a_sample_of_old_ones_expires() -> None:
    updates, counted = young_updates(max_age=1)
    made = [(4, 5), (2, 3, 4, 5), (2, 5)]
    samples = [experience(versions).sample for versions in made]
    samples[2] = replace(samples[2], own=(True, False))  # the young token came from a tool
    group = ScoredGroup(samples=tuple(samples), rewards=(1.0, 0.0, 0.5), step=2)
    young, mixed, heard = updates.experience([group], 5)
    assert [item.reward for item in (young, mixed, heard)] == [1.0, 0.0, 0.5]
    assert updates._counted(young) is young
    assert young.trained_tokens == (True, True)
    assert updates._counted(mixed) is mixed
    assert mixed.trained_tokens == (False, False, True, True)
    assert counted == {"rollout/tokens_too_old": 2}
    expired = updates._counted(heard)
    assert (expired.is_trained, expired.sample.status) == (False, Status.EXPIRED)
    assert counted == {"rollout/tokens_too_old": 1, "rollout/expired": 1}


def test_without_a_limit_no_token_is_too_old() -> None:
    updates, counted = young_updates(max_age=0)
    [item] = updates.experience([ScoredGroup(samples=(experience((0, 9)).sample,), rewards=(1.0,), step=9)], 9)
    assert updates._counted(item).trained_tokens == (True, True)
    assert not counted


def test_the_mismatch_of_carried_samples_is_a_mean_over_their_new_tokens_in_all_micro_batches() -> None:
    updates = YoungUpdates.__new__(YoungUpdates)
    updates._statistics, updates._keeps_cache, updates._step = Statistics(), True, 5
    updates.stale = frozenset({(0, 0)})  # of the two samples, the one that older weights began
    packs = [
        # (sample, version, trained, logprob of the trainer minus that of the engine)
        [(0, 4, True, 9.0), (0, 5, True, 0.5), (1, 5, True, 0.1), (0, 5, False, 9.0)],
        [(0, 5, True, 0.2), (0, 5, True, -0.1), (0, 5, True, 0.0), (1, 5, True, -0.3)],
    ]
    for pack in packs:
        owners, versions, mask, differences = (torch.tensor(column) for column in zip(*pack, strict=True))
        batch = replace(
            dummy_batch(temperature=1.0),
            keys=((0, 0), (0, 1)),
            sequence_index=owners,
            versions=versions,
            loss_mask=mask,
            sampler_logprobs=torch.full((len(pack),), -1.0),
        )
        updates.measure_mismatch(differences - 1, batch)
    found = updates._statistics.reduce(Comm())
    # 0.5, 0.2, 0.1 and 0; the samples that these weights made alone have 0.1 and 0.3
    assert found["mismatch/carried_mean_abs"] == pytest.approx(0.2, abs=1e-6)
    assert found["mismatch/carried_max_abs"] == pytest.approx(0.5, abs=1e-6)
    assert found["mismatch/mean_abs"] == pytest.approx(0.2, abs=1e-6)


def test_the_options_choose_the_scheduler() -> None:
    waits = scheduler_of(GRPOConfig(rollout=WorkflowConfig(filter="unequal_rewards")))
    assert type(waits).__name__ == "SyncScheduler"
    made = scheduler_of(GRPOConfig(rollout=WorkflowConfig(over_issue=0.5, max_staleness=1, tail_batch=2)))
    assert type(made).__name__ == "AsyncScheduler"
    assert (made.rules.batch_size, made.rules.max_unused, made.rules.tail_batch) == (16, 24, 2)
    drops = scheduler_of(GRPOConfig(rollout=WorkflowConfig(over_issue=0.5, max_staleness=1, late="drop")))
    assert type(drops).__name__ == "DroppingScheduler"


def test_filters_are_found_by_name() -> None:
    assert load_filter(GRPOConfig(rollout=WorkflowConfig(filter="unequal_rewards"))) is unequal_rewards
    assert load_filter(GRPOConfig()) is None
    samples = (experience((1,)).sample,) * 2
    assert unequal_rewards(ScoredGroup(samples=samples, rewards=(0.0, 1.0), step=0))
    assert not unequal_rewards(ScoredGroup(samples=samples, rewards=(1.0, 1.0), step=0))
    with pytest.raises(ValueError, match="this is no function"):
        load_filter(GRPOConfig(rollout=WorkflowConfig(filter="lightrl.rollout.scheduler:__name__")))


def keep_at(group: ScoredGroup, least: float) -> bool:
    return max(group.rewards) >= least


def keep_without_return(group: ScoredGroup) -> None:
    assert group.rewards


async def keep_async(group: ScoredGroup) -> bool:
    raise AssertionError(group)


@pytest.mark.filterwarnings("ignore:coroutine 'keep_async' was never awaited")
def test_a_filter_takes_a_group_and_answers_with_a_bool() -> None:
    with pytest.raises(
        ValueError, match=r"keep_at\(group.*\) -> .* cannot be called with \(group\): .*'least', at line"
    ):
        load_filter(GRPOConfig(rollout=WorkflowConfig(filter=f"{__name__}:keep_at")))
    group = ScoredGroup(samples=(experience((1,)).sample,), rewards=(1.0,), step=0)
    for name, given in (("keep_without_return", "None"), ("keep_async", "<coroutine")):
        keep = load_filter(GRPOConfig(rollout=WorkflowConfig(filter=f"{__name__}:{name}")))
        assert keep is not None
        with pytest.raises(ValueError, match=f"{name} returned {given}.*, at line .*test_scheduled.py. It must return"):
            keep(group)


def test_dynamic_sampling_is_a_filter_in_a_schedule() -> None:
    config = GRPOConfig(
        rollout=WorkflowConfig(filter="unequal_rewards"), dynamic_sampling=DynamicSamplingConfig(enabled=True)
    )
    with pytest.raises(ValueError, match="use --rollout.filter unequal_rewards"):
        scheduled(GRPOTrainer)(config)
    with pytest.raises(TypeError, match="needs a subclass"):
        scheduled(lambda config: GRPOTrainer(config))


@pytest.mark.parametrize("options", [WorkflowConfig(max_staleness=1), WorkflowConfig(record="folder")])
def test_a_trainer_made_without_the_program_hears_no_option_in_silence(options: WorkflowConfig) -> None:
    with pytest.raises(ValueError, match=r"Call run_trainer\(GRPOTrainer, config\)"):
        GRPOTrainer(GRPOConfig(rollout=options))
    with pytest.raises(ValueError, match="in --rollout_ranks"):
        GRPOTrainer(GRPOConfig(rollout_ranks=1))
