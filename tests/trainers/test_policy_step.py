"""What GRPO and PPO share."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_samples import made_sample

from lightrl.comm import Comm
from lightrl.config import AlgorithmConfig, CheckpointConfig, GRPOConfig, PPOConfig
from lightrl.data.packing import dummy_batch
from lightrl.metrics import Statistics
from lightrl.records import FinishReason, Prompt, Sample, Status
from lightrl.rewards import NO_REWARD
from lightrl.rewards.reward_set import RewardSet
from lightrl.rollout.collector import is_truncated
from lightrl.strategy.results import TrainBatchResult
from lightrl.trainers.fit import RunConsole, Shown
from lightrl.trainers.grpo import GRPOTrainer
from lightrl.trainers.objective import PolicyLoss
from lightrl.trainers.policy_step import (
    PolicyUpdates,
    describe_batches,
    describe_rollout,
    describe_update,
    shown_of,
    step_metrics,
)
from lightrl.trainers.ppo import PPOTrainer


def test_the_batch_arithmetic_is_written_out() -> None:
    config = GRPOConfig(num_prompts=6, group_size=4, num_minibatches=2, num_epochs=3, micro_batch_size=2)
    text = describe_batches(config, world_size=4)
    assert "6 prompts x 4 samples = 24 samples a step" in text
    assert "3 epoch(s) x 2 mini-batch(es) = 6 optimizer step(s) of 12 samples" in text
    assert "each of 4 rank(s) about 3 samples in 2 micro-batches of <= 2 samples" in text


def test_the_means_of_several_rewards_are_shown() -> None:
    assert shown_of(RewardSet.from_config(GRPOConfig())) == Shown()
    both = shown_of(RewardSet.from_config(GRPOConfig(reward=("exact_match", "contains=0.1"))))
    names = ("reward/mean", "reward/exact_match", "reward/contains", "episode/failed_share")
    assert both.step == (*names, "tokens/per_second", "entropy")
    assert both.evaluation[2:] == ("eval/reward/exact_match", "eval/reward/contains")


class Scores:
    """Scores all samples together, as a reward model does."""

    is_collective = True

    def prepare(self, strategy: Any) -> None:
        """Loads nothing."""

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        return [0.75 for _ in samples]


@pytest.mark.parametrize(("kind", "config"), [(GRPOTrainer, GRPOConfig), (PPOTrainer, PPOConfig)])
def test_no_accuracy_is_shown_of_scores_without_a_scale(
    kind: Any, config: Any, toy_options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = CheckpointConfig(every=0)
    trainer = kind(config(**toy_options, output_dir=str(tmp_path / "run"), checkpoint=checkpoint), reward=Scores())
    shown = trainer.shown
    trainer.close()
    assert (shown.evaluation, shown.table) == (("eval/reward",), ("eval/reward", "reward/mean", "entropy"))
    console = RunConsole(shown, enabled=True, first_step=0, max_steps=1)
    metrics = {"eval/accuracy": 0.0, "eval/reward": 0.75}
    console.evaluated(1, metrics)
    console.final_table([{"step": 1, **metrics}])
    said = capsys.readouterr().out
    assert "0.750" in said
    assert "accuracy" not in said
    assert "#" not in said  # a bar would be out of 1


def test_a_micro_batch_must_hold_the_longest_prompt_with_its_response(
    toy_options: dict[str, Any], tmp_path: Path
) -> None:
    """12+34= has 6 tokens, and 6 may follow."""

    def trainer(tokens: int) -> GRPOTrainer:
        options = {**toy_options, "num_prompts": 3, "max_new_tokens": 6, "max_tokens_per_microbatch": tokens}
        folder = str(tmp_path / str(tokens))
        return GRPOTrainer(GRPOConfig(**options, output_dir=folder, checkpoint=CheckpointConfig(every=0)))

    with pytest.raises(ValueError, match="11 cannot hold the longest prompt with --max_new_tokens 6: .* at least 12"):
        trainer(11)
    trainer(12).close()
    toy_options["eval_data"] = str(tmp_path / "longer.jsonl")  # no micro-batch holds a prompt that is only evaluated
    Path(toy_options["eval_data"]).write_text(json.dumps({"prompt": "12+34+56=", "answer": "102"}))
    trainer(13).close()


def test_prompts_that_are_too_long_may_be_left_out(toy_options: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "1+" * 300}) + "\n" + json.dumps({"prompt": "1+2="}))
    options = {**toy_options, "train_data": str(tmp_path / "data.jsonl"), "num_prompts": 1}
    config = GRPOConfig(**options, output_dir=str(tmp_path / "run"), checkpoint=CheckpointConfig(every=0))
    config.data.too_long = "skip"
    trainer = GRPOTrainer(config)
    trainer.close()
    assert [(prompt.index, prompt.text) for prompt in trainer.prompts.train] == [(0, "1+2=")]


def sample(position: int, num_tokens: int, *, num_prompt: int = 2, is_cut: bool = False, own: int = 0) -> Sample:
    """A response of num_tokens; the policy chose the first `own` of them, or all."""
    return made_sample(
        prompt=Prompt(index=position, text="", token_ids=(1,) * num_prompt, answer=None),
        position=position,
        response_ids=(5,) * num_tokens,
        sampler_logprobs=(-1.0,) * num_tokens,
        finish_reason="length" if is_cut else "stop",
        own=tuple(index < own for index in range(num_tokens)) if own else (),
    )


def reduced(samples: list[Sample], rewards: list[float]) -> dict[str, float]:
    statistics = Statistics()
    describe_rollout(samples, rewards, statistics)
    return statistics.reduce(Comm())


def test_the_numbers_of_a_rollout_by_hand() -> None:
    """Three groups: one of equal rewards, one of unequal ones, and one with a reward and a failed sample."""
    samples = [sample(0, 3), sample(0, 5), sample(1, 1), sample(1, 7, is_cut=True), sample(2, 4), sample(2, 2)]
    assert reduced(samples, [0.5, 0.5, 0.0, 1.0, 0.25, NO_REWARD]) == {
        "reward/mean": 0.45,  # 2.25 / 5
        "reward/equal_groups": pytest.approx(2 / 3),  # a single reward is equal to itself
        "tokens/prompt": 12,  # 6 x 2
        "tokens/response": 22,
        "tokens/response_mean": pytest.approx(22 / 6),
        "tokens/response_max": 7,
        "tokens/truncated": pytest.approx(1 / 6),
    }


def test_an_episode_that_failed_has_no_length() -> None:
    failed = dataclasses.replace(sample(0, 0), turns=(), finish_reason="abort", status=Status.FAILED)
    found = reduced([sample(0, 4, is_cut=True), sample(0, 2), failed, failed], [1.0, 0.0, NO_REWARD, NO_REWARD])
    assert (found["tokens/response_mean"], found["tokens/truncated"]) == (3, 0.5)


def test_a_step_without_a_sample_or_a_reward_reports_no_means() -> None:
    """A 0 would look like empty responses, or like groups of unequal rewards."""
    counts = {"tokens/prompt", "tokens/response"}
    assert set(reduced([], [])) == counts
    failed = dataclasses.replace(sample(0, 0), turns=(), finish_reason="abort", status=Status.FAILED)
    assert set(reduced([failed, failed], [NO_REWARD, NO_REWARD])) == counts
    assert "reward/equal_groups" not in reduced([sample(0, 3), sample(0, 5)], [NO_REWARD, NO_REWARD])


def test_an_episode_whose_context_is_full_counts_as_cut_off() -> None:
    """Its last turn may have been cut off for lack of room; one that used up its turns or ended was not."""
    reasons: tuple[FinishReason, ...] = ("stop", "length", "abort", "turns", "context")
    found = [reason for reason in reasons if is_truncated(dataclasses.replace(sample(0, 3), finish_reason=reason))]
    assert found == ["length", "context"]


def test_without_two_samples_of_a_prompt_no_group_is_compared() -> None:
    assert "reward/equal_groups" not in reduced([sample(0, 3), sample(1, 5)], [0.5, 1.0])
    assert reduced([sample(0, 3), sample(0, 5)], [0.5, NO_REWARD])["reward/equal_groups"] == 1


def test_tokens_of_all_conversations_of_an_episode_are_counted() -> None:
    episode = dataclasses.replace(sample(0, 3), branches=(sample(0, 5, num_prompt=4), sample(0, 1)))
    found = reduced([episode, sample(0, 2)], [1.0, 0.0])
    assert (found["tokens/prompt"], found["tokens/response"]) == (2 + 4 + 2 + 2, 3 + 5 + 1 + 2)


def test_tokens_of_an_environment_are_counted_apart() -> None:
    samples = [sample(0, 6, own=4, num_prompt=3), sample(0, 5, num_prompt=3)]
    found = reduced(samples, [1.0, 1.0])
    assert found["tokens/response"] == 11
    assert found["tokens/environment"] == 2
    assert found["tokens/response_mean"] == 4.5  # of the policy: 4 and 5
    assert found["tokens/response_max"] == 5


def test_ranks_with_unequal_shares_give_the_numbers_of_one_rank() -> None:
    samples = [sample(0, 3), sample(0, 5), sample(1, 1), sample(1, 7, is_cut=True), sample(2, 4), sample(2, 2)]
    rewards = [0.5, 0.5, 0.0, 1.0, 0.25, 0.5]
    statistics = Statistics()
    for part in (slice(0, 2), slice(2, 6), slice(6, 6)):
        describe_rollout(samples[part], rewards[part], statistics)
    assert statistics.reduce(Comm()) == reduced(samples, rewards)


def test_the_mismatch_is_a_mean_over_the_trained_tokens_of_all_micro_batches() -> None:
    updates: Any = SimpleNamespace(stale=frozenset(), _statistics=Statistics())
    for differences in ([0.5, 9.0], [-0.1, 0.0, 0.2, 9.0]):
        batch = dataclasses.replace(
            dummy_batch(temperature=1.0),
            loss_mask=torch.tensor([value < 9 for value in differences]),
            sampler_logprobs=torch.full((len(differences),), -1.0),
        )
        PolicyUpdates.measure_mismatch(updates, torch.tensor(differences) - 1, batch)
    # k3 of trainer over engine: exp(d) - 1 - d, 0.1487213, 0.0048374, 0 and 0.0214028
    wanted = {"mismatch/max_abs": 0.5, "mismatch/mean_abs": 0.2, "mismatch/k3": 0.1749614 / 4}
    assert updates._statistics.reduce(Comm()) == pytest.approx(wanted, abs=1e-6)


def test_a_rank_without_samples_adds_nothing() -> None:
    found = reduced([], [])
    assert {name: value for name, value in found.items() if value} == {}
    assert "reward/mean" not in found


@pytest.mark.parametrize("prefix", ["", "critic/"])
def test_the_numbers_of_updates_by_hand(prefix: str) -> None:
    """Two updates and one that was skipped, whose numbers do not count."""
    statistics = Statistics()
    for loss, norm, lr, skipped in ((0.5, 1.0, 0.1, False), (float("nan"), 9.0, 0.9, True), (0.25, 2.0, 0.05, False)):
        result = TrainBatchResult(
            loss=loss, grad_norm=norm, lr=lr, skipped=skipped, total_weight=1.0, num_micro_batches=1
        )
        describe_update(result, statistics, prefix)
    loss_of_policy = {} if prefix else {"loss": 0.375}  # a critic's objective reports its own
    assert statistics.reduce(Comm()) == {
        f"{prefix}skipped_updates": pytest.approx(1 / 3),
        f"{prefix}grad_norm": 1.5,
        f"{prefix}lr": 0.1,
        **loss_of_policy,
    }


def test_a_step_moves_the_coefficients_of_the_next_one() -> None:
    objective = PolicyLoss(AlgorithmConfig(kl_coef=0.2, kl_target=0.1, kl_horizon=1000))
    statistics = Statistics()
    statistics.mean("kl", 0.22, 2)
    statistics.mean("entropy", 1.0, 1)
    metrics = step_metrics(objective, statistics, Comm(), num_samples=100)
    assert metrics == {"kl": 0.11, "entropy": 1.0, "kl_coef": 0.2, "entropy_coef": 0.0}  # those of this step
    # e = 0.11 / 0.1 - 1 = 0.1; 0.2 (1 + 0.1 x 100 / 1000) = 0.202
    assert objective.coefficients.kl == pytest.approx(0.202, abs=1e-9)
    step_metrics(objective, statistics, Comm(), num_samples=100)  # the policy was not updated
    assert objective.coefficients.kl == pytest.approx(0.202, abs=1e-9)
