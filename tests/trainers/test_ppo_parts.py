"""The parts of a PPO step, on one trainer in this process."""

from collections.abc import Iterator
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
    first, second = trained[1].experience[:2]
    columns = {"advantages": {first.key: [1.0, 2.0, 6.0], second.key: []}}
    batch: Any = SimpleNamespace(samples=[second, first], columns=columns)
    logged = [(item.key, item.advantage) for item in _with_mean_advantages(batch)]
    assert logged == [((0, 0), 3.0), ((0, 1), 0.0)]


def test_each_model_has_its_rate_and_waits_in_host_memory(trained: tuple[PPOTrainer, StepReport]) -> None:
    _, report = trained
    assert (report.metrics["lr"], report.metrics["critic/lr"]) == (0.02, 0.01)
    assert "memory/waiting_optimizer_gb" in report.metrics
