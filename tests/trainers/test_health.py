"""What is called bad about a step, against literals; runs with a fault planted of each kind."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightrl.comm import Comm
from lightrl.config import DynamicSamplingConfig, EvalConfig, GRPOConfig, WorkflowConfig
from lightrl.config.health_section import GroupHealthConfig
from lightrl.trainers.grpo import GRPOTrainer
from lightrl.trainers.health import BadSteps, UnhealthyRunError, batches_of, findings
from lightrl.trainers.recorded_run import replay

GOOD = {
    "loss": 0.1, "grad_norm": 1.0, "kl": 0.0, "entropy": 1.5, "reward/mean": 0.5, "reward/equal_groups": 0.5,
    "mismatch/mean_abs": 1e-6, "episode/failed_share": 0.1, "tokens/truncated": 0.2,
    "tokens/response_mean": 3.5, "skipped_updates": 0.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("metric", "value", "text"),
    [
        ("entropy", 0.0005, "collapsed to 0.0005 (--health.min_entropy 0.001). Raise --algorithm.entropy_coef"),
        ("reward/equal_groups", 1.0, "100.0% of the prompts got the same reward"),
        ("mismatch/mean_abs", 0.25, "by 0.25 on average (--health.max_mismatch 0.1). Compare the dtypes"),
        ("tokens/truncated", 1.0, "100.0% of the responses were cut off (--health.max_truncated 0.99). Raise"),
        (
            "tokens/response_mean",
            1.0,
            "have 1 tokens on average, and an empty one has its end token (--health.min_response_tokens 1). If they",
        ),
        (
            "episode/failed_share",
            0.58,
            "58.0% of the episodes failed, and reward/mean is that of the others (--health",
        ),
        ("skipped_updates", 0.5, "50.0% of the updates were skipped on all ranks"),
        ("skipped_updates", 1.0, "If there was nothing to train, look at what leaves samples out"),
        ("reward/mean", math.nan, "reward/mean is not finite"),
        ("mismatch/mean_abs", math.nan, "mismatch/mean_abs is not finite"),
        ("loss", math.inf, "loss is not finite"),
    ],
)
def test_each_kind_is_found_with_its_number_and_remedy(metric: str, value: float, text: str) -> None:
    limits = GroupHealthConfig()
    assert findings(GOOD, limits) == {}
    found = findings(GOOD | {metric: value}, limits)
    assert list(found) == [metric]
    assert text in found[metric]


@pytest.mark.parametrize(
    ("metric", "text"),
    [
        ("reward/failures", "no sample has a reward: 16 rewards failed"),
        ("episode/filtered", "no sample is left to learn from: the workflow rejected 16 of them"),
        ("rollout/filtered", "no group is left to learn from: --rollout.filter rejected 16 of them"),
    ],
)
def test_no_reward_at_all_is_found(metric: str, text: str) -> None:
    metrics = {name: value for name, value in GOOD.items() if name != "reward/mean"} | {metric: 16.0}
    assert findings(metrics, GroupHealthConfig())[metric].startswith(text)
    assert findings(GOOD | {metric: 16.0}, GroupHealthConfig()) == {}


def test_a_warning_comes_again_only_when_it_has_long_passed(caplog: pytest.LogCaptureFixture) -> None:
    config = SimpleNamespace(health=GroupHealthConfig())
    trainer = SimpleNamespace(config=config, strategy=SimpleNamespace(comm=Comm()), step_index=7)
    health = BadSteps(trainer)
    for step in range(7, 40):  # bad in 7, 8 and 10, and again from 21 on
        trainer.step_index = step
        health.see(findings(GOOD | {"entropy": 0.0 if step in (7, 8, 10) or step >= 21 else 1.0}, config.health))
    assert [record.message.partition(" of")[0] for record in caplog.records] == [
        "Step 7: The entropy",
        "Step 21: The entropy",
    ]


@pytest.mark.parametrize("also", ["reward/failures", "rollout/filtered"])
def test_steps_that_failures_or_a_filter_empty_as_well_do_not_end_the_run(also: str) -> None:
    """A judge may be out of reach for longer than ten steps, within --max_reward_failures."""
    config = SimpleNamespace(health=GroupHealthConfig())
    trainer = SimpleNamespace(config=config, strategy=SimpleNamespace(comm=Comm()), step_index=0)
    health = BadSteps(trainer)
    for step in range(1, 20):
        trainer.step_index = step
        health.see(findings({"episode/filtered": 1.0, also: 31.0}, config.health))
    for step in range(20, 29):  # nine steps of which the workflow alone left nothing: only the tenth ends the run
        trainer.step_index = step
        health.see(findings({"episode/filtered": 32.0}, config.health))
    trainer.step_index = 29
    with pytest.raises(UnhealthyRunError):
        health.see(findings({"episode/filtered": 32.0}, config.health))


def test_a_trainer_that_tells_of_no_groups_stops_without_a_batch_to_repeat(tmp_path: Path) -> None:
    strategy, folder = SimpleNamespace(comm=Comm()), SimpleNamespace(root=tmp_path)
    config = SimpleNamespace(health=GroupHealthConfig(max_bad_steps=1))
    health = BadSteps(SimpleNamespace(config=config, strategy=strategy, step_index=7, folder=folder))
    with pytest.raises(UnhealthyRunError, match="1 bad step in a row") as error:
        health.see(findings(GOOD | {"entropy": 0.0}, config.health))
    assert "lightrl replay" not in str(error.value)
    health.after_rollouts([])
    with pytest.raises(UnhealthyRunError, match=r"`lightrl replay .* --step 7` repeats it"):
        health.see(findings(GOOD | {"entropy": 0.0}, config.health))


# ---- Runs with planted faults


@pytest.fixture
def train(toy_options: dict[str, Any], tmp_path: Path) -> Callable[..., GRPOTrainer]:
    def run(name: str, **options: Any) -> GRPOTrainer:
        given: dict[str, Any] = {"max_steps": 4, "eval": EvalConfig(every=0), "lr": 1e-2, **options}
        return GRPOTrainer(
            GRPOConfig(
                **toy_options,
                num_prompts=4,
                num_minibatches=2,
                output_dir=str(tmp_path / name),
                **given,
            )
        )

    return run


def with_collapsed_entropy(trainer: GRPOTrainer) -> None:
    weight = trainer.policy.hf.get_output_embeddings().weight
    with torch.no_grad():
        weight[5] *= 0
        weight.mul_(1e3)


def with_infinite_loss(trainer: GRPOTrainer) -> None:
    loss = trainer.objective.loss
    trainer.objective.loss = lambda *given: loss(*given) + math.inf  # type: ignore[method-assign]


def with_other_logprobs(trainer: GRPOTrainer) -> None:
    sample = trainer.sample

    def shifted(prompts: Any) -> Any:
        samples = sample(prompts)
        for item in samples:
            object.__setattr__(item, "sampler_logprobs", tuple(value - 0.5 for value in item.sampler_logprobs))
        return samples

    trainer.sample = shifted  # type: ignore[method-assign]


def with_logprobs_of_nan(trainer: GRPOTrainer) -> None:
    with_other_logprobs(trainer)
    shifted = trainer.sample

    def nan(prompts: Any) -> Any:
        samples = shifted(prompts)
        object.__setattr__(samples[0], "sampler_logprobs", (math.nan,) * len(samples[0].response_ids))
        return samples

    trainer.sample = nan  # type: ignore[method-assign]


def with_equal_rewards(trainer: GRPOTrainer) -> None:
    trainer.collector.score = lambda samples, *given, **named: [1.0] * len(samples)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("plant", "text"),
    [
        (with_collapsed_entropy, "The entropy of the policy has collapsed"),
        (with_infinite_loss, "100.0% of the updates were skipped on all ranks"),
        (with_other_logprobs, "the trainer's by 0.5 on average"),
        (with_logprobs_of_nan, "Mismatch/mean_abs is not finite"),
        (with_equal_rewards, "100.0% of the prompts got the same reward"),
    ],
)
def test_a_planted_fault_stops_the_run(
    plant: Callable[[GRPOTrainer], None], text: str, train: Callable[..., GRPOTrainer], tmp_path: Path
) -> None:
    trainer = train("run", health=GroupHealthConfig(max_bad_steps=2))
    plant(trainer)
    with pytest.raises(UnhealthyRunError, match="2 bad steps in a row") as error:
        trainer.fit()
    trainer.close()
    assert text in str(error.value)
    assert f"`lightrl replay {tmp_path / 'run'} --step 2` repeats it" in str(error.value)
    assert (batches_of(tmp_path / "run") / "step-000002" / "rank-0-of-1.jsonl").exists()
    assert [row["step"] for row in trainer.folder.metrics()] == [1, 2]


def rejecting(num_steps: int) -> WorkflowConfig:
    return WorkflowConfig(workflow="tests.programs.episodes:Picky", workflow_args=(f"num_steps={num_steps}",))


def test_a_run_whose_workflow_rejects_every_sample_ends(train: Callable[..., GRPOTrainer]) -> None:
    trainer = train("run", max_steps=12, rollout=rejecting(12))
    with pytest.raises(UnhealthyRunError, match="no sample in 10 steps in a row.*max_bad_steps"):
        trainer.fit()
    trainer.close()
    assert trainer.step_index == 10


@pytest.mark.parametrize(("num_steps", "limits"), [(9, {}), (11, {"max_bad_steps": 12})])
def test_a_run_whose_workflow_rejects_the_first_samples_goes_on(
    num_steps: int, limits: dict[str, int], train: Callable[..., GRPOTrainer]
) -> None:
    trainer = train("run", max_steps=12, rollout=rejecting(num_steps), health=GroupHealthConfig(**limits))
    trainer.fit()
    trainer.close()
    has_reward = ["reward/mean" in row for row in trainer.folder.metrics()]
    assert has_reward == [False] * num_steps + [True] * (12 - num_steps)


@pytest.mark.parametrize("draws_more", [False, True], ids=["", "dynamic sampling"])
def test_the_step_after_which_a_run_stopped_is_repeated_to_the_bit(
    train: Callable[..., GRPOTrainer], tmp_path: Path, capsys: pytest.CaptureFixture[str], draws_more: bool
) -> None:
    trainer = train(
        "run",
        health=GroupHealthConfig(max_bad_steps=3, max_mismatch=0.0, min_entropy=100.0),
        # Half of the groups that it draws is learned from.
        dynamic_sampling=DynamicSamplingConfig(enabled=True, oversample=2.0) if draws_more else DynamicSamplingConfig(),
    )
    with pytest.raises(UnhealthyRunError):
        trainer.fit()
    trainer.close()
    assert replay([str(tmp_path / "run"), "--step", "3"]) == 0
    assert "step 3 was repeated to the bit: " in capsys.readouterr().out
