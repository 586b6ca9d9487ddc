"""The parts of a PPO step, on one trainer in this process."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightrl.config import CriticConfig, EvalConfig, PPOAlgorithmConfig, PPOConfig
from lightrl.data.packing import dummy_batch
from lightrl.metrics import Statistics
from lightrl.records import TokenScores
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


@pytest.mark.parametrize(
    ("kind", "wanted"), [("k1", [1.0, -0.5]), ("k2", [0.5, 0.125]), ("k3", [0.36787944, 0.14872127])]
)
def test_the_kl_in_the_reward_is_that_of_the_policy_to_the_reference(kind: Any, wanted: list[float]) -> None:
    """The policy finds the first token e times likelier than the reference does, the second less likely."""
    config = PPOConfig(algorithm=PPOAlgorithmConfig(kl_coef=0.1, kl_in_reward=kind))
    trainer: Any = SimpleNamespace(config=config)
    columns = {"old_logprobs": {(0, 1): [-1.0, -2.5]}, "ref_logprobs": {(0, 1): [-2.0, -2.0]}}
    found = PPOTrainer._kl_in_reward(trainer, columns)
    # e^-1 - 1 + 1, and e^0.5 - 1 - 0.5
    assert found == {(0, 1): pytest.approx(wanted, abs=1e-7)}


def test_the_entropy_of_a_frozen_policy_is_a_mean_over_the_trained_tokens_of_all_micro_batches() -> None:
    statistics = Statistics()
    updates = SimpleNamespace(measure_mismatch=lambda *args: None)
    trainer: Any = SimpleNamespace(statistics=statistics, updates=updates, _is_frozen=True)
    for entropy in ([1.0, 2.0, 9.0], [6.0, 9.0]):
        scores = TokenScores(logprobs=torch.zeros(len(entropy)), entropy=torch.tensor(entropy))
        mask = torch.tensor([value < 9 for value in entropy])
        PPOTrainer._measure(trainer, scores, replace(dummy_batch(temperature=1.0), loss_mask=mask))
    assert statistics.reduce(SimpleNamespace(all_gather_object=lambda item: [item])) == {"entropy": 3.0}
