"""The parts of a PPO step, on one trainer in this process."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lightrl.config import CriticConfig, EvalConfig, PPOConfig
from lightrl.trainers.fit import StepReport
from lightrl.trainers.ppo import PPOTrainer, _with_mean_advantages


@pytest.fixture(scope="module")
def trained(
    toy_options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[PPOTrainer, StepReport]]:
    """A trainer after one step of two epochs, and what it reports of the step."""
    config = PPOConfig(
        **toy_options,
        num_prompts=2,
        max_new_tokens=6,
        num_epochs=2,
        lr=0.02,
        critic_lr=0.01,
        critic=CriticConfig(offload_waiting_optimizer=True),
        eval=EvalConfig(every=0),
        output_dir=str(tmp_path_factory.mktemp("ppo_parts") / "run"),
    )
    trainer = PPOTrainer(config)
    yield trainer, trainer.step()
    trainer.close()


def test_a_second_epoch_is_compared_with_the_policy_before_the_first(trained: tuple[PPOTrainer, StepReport]) -> None:
    _, report = trained
    assert report.metrics["clip_fraction"] > 0  # 0 if it were compared with itself


def test_each_sample_is_logged_with_the_mean_of_its_advantages(trained: tuple[PPOTrainer, StepReport]) -> None:
    """The tokens of an environment, which have no advantage, do not count."""
    parts = [((1.0, 2.0, 6.0), ()), ((1.0, 0.0, 0.0, 6.0), (True, False, False, True)), ((), ())]
    samples = [
        replace(item, sample=replace(item.sample, response_ids=(5,) * len(values), own=own))
        for item, (values, own) in zip(trained[1].experience, parts, strict=False)
    ]
    columns = {"advantages": {item.key: list(values) for item, (values, _) in zip(samples, parts, strict=True)}}
    batch: Any = SimpleNamespace(samples=samples[::-1], columns=columns)
    logged = [(item.key, item.advantage) for item in _with_mean_advantages(batch)]
    assert logged == [((0, 0), 3.0), ((0, 1), 3.5), ((0, 2), 0.0)]


def test_each_model_has_its_rate_and_waits_in_host_memory(trained: tuple[PPOTrainer, StepReport]) -> None:
    _, report = trained
    assert (report.metrics["lr"], report.metrics["critic/lr"]) == (0.02, 0.01)
    assert "memory/waiting_optimizer_gb" in report.metrics
