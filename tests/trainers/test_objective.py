"""The loss itself, on records written by hand."""

import dataclasses
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_samples import made_sample
from torch.testing import assert_close

from lightrl.algorithms.losses import PolicyTokens, TokenLoss
from lightrl.comm import Comm
from lightrl.config import AlgorithmConfig, DistillationConfig
from lightrl.data.packing import dummy_batch
from lightrl.metrics import Statistics
from lightrl.records import Experience, PackedBatch, Prompt, Sample, TokenScores
from lightrl.rewards import NO_REWARD
from lightrl.trainers.coefficients import Coefficients
from lightrl.trainers.loss_terms import Distillation, EntropyBonus, EntropyFraction, KLToReference, OffPolicyCorrection
from lightrl.trainers.objective import FixedCoefficients, PolicyLoss, PolicyObjective


def scored(samples: list[Sample], rewards: list[float]) -> list[Experience]:
    pairs = zip(samples, rewards, strict=True)
    return [Experience(sample=sample, reward=reward, advantage=0.0) for sample, reward in pairs]


def loss_of(batch: PackedBatch, logprobs: torch.Tensor, **algorithm: object) -> tuple[torch.Tensor, Statistics]:
    statistics = Statistics()
    objective = PolicyObjective(AlgorithmConfig(**algorithm))  # type: ignore[arg-type]
    scores = TokenScores(logprobs=logprobs, entropy=torch.zeros_like(logprobs))
    return objective.loss(scores, batch, statistics), statistics


def batch_of(advantages: list[float], mask: list[bool], **values: torch.Tensor) -> PackedBatch:
    count = len(advantages)
    return dataclasses.replace(
        dummy_batch(temperature=1.0),
        loss_mask=torch.tensor(mask),
        advantages=torch.tensor(advantages),
        sampler_logprobs=torch.zeros(count),
        sequence_index=torch.zeros(count, dtype=torch.int64),
        **{"old_logprobs": None, "ref_logprobs": None, **values},  # type: ignore[arg-type]
    )


def test_one_update_is_the_plain_policy_gradient() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    loss, _ = loss_of(batch_of([2.0, -1.0, 9.0], [True, True, False]), logprobs)
    loss.backward()
    # ratio 1: -(2 - 1) / 2; its gradient by the logprobs: -advantage / 2
    assert_close(loss.detach(), torch.tensor(-0.5), atol=1e-6, rtol=0)
    assert_close(logprobs.grad, torch.tensor([-1.0, 0.5, 0.0]), atol=1e-6, rtol=0)


def test_the_metrics_of_a_loss_are_means_over_trained_tokens() -> None:
    # Ratios 1.5 (A 1: clipped at 1.2), 1.1 and 0.5; then 2.0 (A -1: not clipped) alone. What is masked is not read.
    # (1.5 + 1.1 + 0.5 + 2) / 4 = 1.275; entropies (0.2 + 0.4 + 0.6 + 0.8) / 4 = 0.5.
    nan, statistics = float("nan"), Statistics()
    objective = PolicyObjective(AlgorithmConfig())
    for ratios, entropy in (([1.5, 1.1, 0.5, nan], [0.2, 0.4, 0.6, nan]), ([2.0], [0.8])):
        old = torch.full((len(ratios),), 0.25).log()
        batch = batch_of(
            [1.0 if len(ratios) > 1 else -1.0] * len(ratios), [ratio == ratio for ratio in ratios], old_logprobs=old
        )
        scores = TokenScores(logprobs=old + torch.tensor(ratios).log(), entropy=torch.tensor(entropy))
        objective.loss(scores, batch, statistics)
    found = statistics.reduce(SimpleNamespace(all_gather_object=lambda item: [item]))
    wanted = {"clip_fraction": 0.25, "ratio/mean": 1.275, "ratio/max": 2.0, "entropy": 0.5, "kl": 0.0}
    assert found == pytest.approx(wanted, abs=1e-6)


def ratio_with_a_gradient(tokens: PolicyTokens) -> TokenLoss:
    ratio = torch.where(tokens.mask, tokens.log_ratio.exp(), 0.0)
    return TokenLoss(terms=-tokens.masked_advantages * ratio, ratio=ratio, is_clipped=torch.zeros_like(tokens.mask))


def test_a_ratio_that_carries_a_gradient_is_measured_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    logprobs, own = torch.tensor([-1.0, -2.0], requires_grad=True), f"{__name__}:ratio_with_a_gradient"
    torch.set_warn_always(True)  # else torch warns only once in a process
    try:
        loss_of(batch_of([2.0, -1.0], [True, True]), logprobs, loss=own)
    finally:
        torch.set_warn_always(False)
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize("kind", ["advantage", "loss"])
def test_a_teacher_by_hand(kind: str) -> None:
    # Policy 1/2, teacher 1/4: d = log 2 = 0.6931472. A 2 weighs 0.5: 1, from which the teacher takes 3 d = 2.0794415,
    # or adds that to the loss. Both ways -(1 - 2.0794415) = 1.0794415, which is the slope as well. Masked: not read.
    logprobs = torch.tensor([0.5, float("nan")]).log().requires_grad_()
    batch = batch_of([2.0, 1.0], [True, False], teacher_logprobs=torch.tensor([0.25, float("nan")]).log())
    teacher = DistillationConfig(kind=kind, coef=3.0, reward_weight=0.5)  # type: ignore[arg-type]
    objective, statistics = PolicyObjective(AlgorithmConfig(), distillation=teacher), Statistics()
    loss = objective.loss(TokenScores(logprobs=logprobs, entropy=torch.zeros(2)), batch, statistics)
    (slope,) = torch.autograd.grad(loss, logprobs)
    assert float(loss.detach()) == pytest.approx(1.0794415, abs=1e-6)
    assert_close(slope, torch.tensor([1.0794415, 0.0]), atol=1e-6, rtol=0)
    found = statistics.reduce(SimpleNamespace(all_gather_object=lambda item: [item]))
    assert found["distillation/reverse_kl"] == pytest.approx(0.6931472, abs=1e-6)


def test_a_response_is_as_long_as_what_the_policy_wrote() -> None:
    """OPO's baseline is the mean of the rewards by length: (1 x 1 + 0 x 3) / 4 = 0.25."""
    samples = [
        made_sample(sample_index=index, response_ids=(5,) * 5, own=own)
        for index, own in enumerate([(True,) + (False,) * 4, (True,) * 3 + (False,) * 2])
    ]
    made = PolicyObjective(AlgorithmConfig(advantage="opo")).advantages(scored(samples, [1.0, 0.0]), Comm())
    assert [item.advantage for item in made] == pytest.approx([0.75, -0.25], abs=1e-6)


def test_a_response_that_is_not_trained_counts_in_the_mean_of_rewards_but_in_no_mean_of_tokens() -> None:
    rewards = [1.0, 3.0, 2.0, 2.0]  # two groups of two; the first response is cut off

    def found(name: str) -> list[float]:
        made = PolicyObjective(AlgorithmConfig(advantage=name))
        first, *others = scored(samples_of([1, 3, 2, 2]), rewards)
        items = made.advantages([dataclasses.replace(first, is_trained=False), *others], Comm())
        return [item.advantage for item in items]

    assert found("dr_grpo") == [-1.0, 1.0, 0.0, 0.0]
    assert found("opo") == [-2.0, 0.0, 0.0, 0.0]  # the baseline of the first group is the other reward alone
    # Whitened over 3, 2 and 2 tokens: mean (9 + 4 + 4) / 7 = 17 / 7, deviation sqrt((27 + 8 + 8) / 7 - (17 / 7)^2).
    mean, std = 17 / 7, (43 / 7 - (17 / 7) ** 2) ** 0.5
    wanted = [(reward - mean) / std for reward in rewards]
    assert found("reinforce_plus_plus") == pytest.approx(wanted, abs=1e-6)


def test_the_conversations_of_an_episode_count_with_all_their_tokens() -> None:
    """The first of two samples has 2 tokens, and 6 in a branch: mean (8 + 0) / 10 = 0.8, deviation sqrt(0.16) = 0.4."""
    first, branch, second = samples_of([2, 6, 2])
    made = PolicyObjective(AlgorithmConfig(advantage="reinforce_plus_plus"))
    items = scored([dataclasses.replace(first, branches=(branch,)), second], [1.0, 0.0])
    assert [item.advantage for item in made.advantages(items, Comm())] == pytest.approx([0.5, -2.0], abs=1e-6)


def test_a_plain_loss_has_no_optional_terms() -> None:
    assert PolicyObjective(AlgorithmConfig())._terms == []
    every = AlgorithmConfig(entropy_fraction=0.5, correction="tis", kl_coef=0.1, entropy_coef=0.1)
    terms = PolicyObjective(every, distillation=DistillationConfig(), has_selector=True)._terms
    assert [type(term) for term in terms] == [
        EntropyFraction,
        OffPolicyCorrection,
        KLToReference,
        EntropyBonus,
        Distillation,
    ]


def test_the_kl_penalty_adds_its_mean() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    batch = batch_of([0.0, 0.0], [True, True], ref_logprobs=torch.tensor([-1.5, -2.0]))
    loss, statistics = loss_of(batch, logprobs, kl_coef=0.1, kl_estimator="k2")
    # 0.5 x 0.5^2 = 0.125 and 0; the mean 0.0625, times 0.1
    assert_close(loss.detach(), torch.tensor(0.00625), atol=1e-6, rtol=0)
    assert statistics.reduce(SimpleNamespace(all_gather_object=lambda item: [item]))["kl"] == 0.0625


def test_the_kl_penalty_may_be_an_estimate_of_the_user() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    batch = batch_of([0.0, 0.0], [True, True], ref_logprobs=torch.tensor([-1.5, -2.5]))
    own: dict[str, Any] = {"kl_estimator": "own_kl:absolute", "kl_estimator_args": ("scale=2",)}
    loss, statistics = loss_of(batch, logprobs, kl_coef=0.1, **own)
    loss.backward()
    # 2 x 0.5 of both tokens; the mean 1, times 0.1; the gradient 2 x 0.1 / 2 of each
    assert_close(loss.detach(), torch.tensor(0.1), atol=1e-6, rtol=0)
    assert_close(logprobs.grad, torch.tensor([0.1, 0.1]), atol=1e-6, rtol=0)
    assert statistics.reduce(SimpleNamespace(all_gather_object=lambda item: [item]))["kl"] == 1.0


def test_the_entropy_bonus_takes_off_its_mean() -> None:
    logprobs, entropy = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([0.5, 1.5, 9.0], requires_grad=True)
    objective = PolicyObjective(AlgorithmConfig(entropy_coef=0.1))
    batch = batch_of([0.0, 0.0, 0.0], [True, True, False])
    loss = objective.loss(TokenScores(logprobs=logprobs, entropy=entropy), batch, Statistics())
    loss.backward()
    # -0.1 (0.5 + 1.5) / 2; the third is not trained
    assert_close(loss.detach(), torch.tensor(-0.1), atol=1e-6, rtol=0)
    assert_close(entropy.grad, torch.tensor([-0.05, -0.05, 0.0]), atol=1e-6, rtol=0)


def test_a_kl_in_the_reward_is_only_measured() -> None:
    batch = batch_of([0.0], [True], ref_logprobs=torch.tensor([-1.5]))
    scores = TokenScores(logprobs=torch.tensor([-1.0]), entropy=torch.zeros(1))
    statistics = Statistics()
    found = PolicyLoss(AlgorithmConfig(kl_coef=0.1, kl_estimator="k2"), kl_in_loss=False)
    assert float(found.loss(scores, batch, statistics)) == 0
    assert statistics.reduce(SimpleNamespace(all_gather_object=lambda item: [item]))["kl"] == 0.125


def test_coefficients_that_moved_are_the_ones_that_act() -> None:
    objective = PolicyObjective(AlgorithmConfig(kl_coef=0.1, kl_estimator="k2"))
    objective.coefficients.kl = 0.4
    batch = batch_of([0.0], [True], ref_logprobs=torch.tensor([-1.5]))
    scores = TokenScores(logprobs=torch.tensor([-1.0]), entropy=torch.zeros(1))
    assert float(objective.loss(scores, batch, Statistics())) == pytest.approx(0.4 * 0.125, abs=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_a_batch_that_trains_nothing_gives_a_gradient_of_zero(kind: str) -> None:
    """Also where its one token is so unlikely that exp(reference - policy) overflows."""
    logprobs = torch.tensor([-200.0], requires_grad=True)
    loss, _ = loss_of(dummy_batch(temperature=1.0), logprobs, kl_coef=0.1, kl_estimator=kind)
    loss.backward()
    assert loss == 0
    assert_close(logprobs.grad, torch.zeros(1), atol=0, rtol=0)


def samples_of(lengths: list[int]) -> list[Sample]:
    """Two samples of each prompt."""
    return [
        made_sample(
            position=place // 2, sample_index=place % 2, response_ids=(5,) * length, sampler_logprobs=(-1.0,) * length
        )
        for place, length in enumerate(lengths)
    ]


def advantages_of(rewards: list[float], baselines: list[float] | None = None, **algorithm: object) -> list[float]:
    objective = PolicyObjective(AlgorithmConfig(**algorithm))  # type: ignore[arg-type]
    found = objective.advantages(scored(samples_of([1, 3, 2, 2]), rewards), Comm(), baselines)
    assert [item.reward for item in found] == rewards
    return [item.advantage for item in found]


def test_advantages_by_name() -> None:
    rewards = [1.0, 3.0, 2.0, 2.0]
    # deviation of 1 and 3 with Bessel: sqrt(2)
    assert advantages_of(rewards) == pytest.approx([-1 / (2**0.5 + 1e-4), 1 / (2**0.5 + 1e-4), 0, 0], abs=1e-6)
    assert advantages_of(rewards, advantage_args=("normalize_std=false",)) == [-1.0, 1.0, 0.0, 0.0]
    assert advantages_of(rewards, advantage="rloo") == [-2.0, 2.0, 0.0, 0.0]
    # weighed by length 1 and 3 the baseline of the first group is (1 + 9) / 4 = 2.5
    assert advantages_of(rewards, advantage="opo") == [-1.5, 0.5, 0.0, 0.0]
    assert advantages_of(rewards, [1.0, 1.0, 5.0, 5.0], advantage="remax") == [0.0, 2.0, -3.0, -3.0]
    # half of the samples are in a group with a signal, so those count twice
    assert advantages_of(rewards, advantage="gpg") == [-2.0, 2.0, 0.0, 0.0]
    # over 8 tokens the mean is (1 + 9 + 4 + 4) / 8 = 2.25 and the variance (1 + 27 + 8 + 8) / 8 - 2.25^2 = 0.4375
    whitened = advantages_of(rewards, advantage="reinforce_plus_plus")
    assert whitened == pytest.approx([(reward - 2.25) / 0.4375**0.5 for reward in rewards], abs=1e-6)
    for name in ("grpo", "gpg", "reinforce_plus_plus"):  # the last two look at all ranks
        assert PolicyObjective(AlgorithmConfig(advantage=name)).advantages([], Comm()) == []  # a rank that has none


def test_tokens_that_are_too_old_to_train_on_weigh_nothing() -> None:
    """Of tokens 1, 3, 2 and 2, those trained are 1, 2, 0 and 2; the mean of a group still has every reward."""
    rewards, versions = [1.0, 3.0, 2.0, 2.0], [(5,), (4, 5, 6), (4, 4), (5, 5)]
    samples = [replace(item, versions=made) for item, made in zip(samples_of([1, 3, 2, 2]), versions, strict=True)]
    items = [replace(item, min_version=5) for item in scored(samples, rewards)]

    def by(name: str) -> list[float]:
        return [item.advantage for item in PolicyObjective(AlgorithmConfig(advantage=name)).advantages(items, Comm())]

    # over 5 tokens the mean is (1 + 2 x 3 + 2 x 2) / 5 = 2.2 and the variance (1 + 18 + 8) / 5 - 2.2^2 = 0.56
    assert by("reinforce_plus_plus") == pytest.approx([(reward - 2.2) / 0.56**0.5 for reward in rewards], abs=1e-6)
    # weighed by 1 and 2 the baseline of the first group is (1 + 6) / 3
    assert by("opo") == pytest.approx([-4 / 3, 2 / 3, 0.0, 0.0], abs=1e-6)
    assert by("dr_grpo") == [-1.0, 1.0, 0.0, 0.0]


def test_the_aggregation_decides_the_mean_and_its_denominator() -> None:
    batch = dataclasses.replace(
        batch_of([1.0, 1.0, 4.0], [True] * 3), sequence_index=torch.tensor([0, 0, 1]), keys=((0, 0), (0, 1))
    )
    scores = TokenScores(logprobs=torch.zeros(3), entropy=torch.zeros(3))
    wanted = {  # of terms -1, -1, -4 in sequences of two tokens and one: the loss and the denominator
        ("token_mean", ()): (-2.0, 3.0),
        ("sequence_mean", ()): (-2.5, 2.0),
        ("sequence_mean_token_sum", ()): (-3.0, 2.0),
        ("sequence_mean_token_sum_norm", ("length=4",)): (-0.75, 2.0),
    }
    for (name, args), (loss, weight) in wanted.items():
        objective = PolicyObjective(AlgorithmConfig(aggregation=name, aggregation_args=args))
        assert float(objective.loss(scores, batch, Statistics())) == pytest.approx(loss, abs=1e-6)
        assert float(objective.weight(batch)) == weight


def test_a_correction_weighs_by_the_trainer_over_the_engine() -> None:
    # ratios to the engine: e^0.5 = 1.6487 and e^1.5 = 4.4817, which tis holds at 2
    values = {"sampler_logprobs": torch.tensor([-1.5, -2.5]), "old_logprobs": torch.tensor([-1.0, -1.0])}
    batch = dataclasses.replace(batch_of([1.0, 1.0], [True, True]), **values)  # type: ignore[arg-type]
    logprobs = torch.tensor([-1.0, -1.0])
    loss, statistics = loss_of(batch, logprobs, correction="tis")
    assert float(loss) == pytest.approx(-(math.exp(0.5) + 2) / 2, abs=1e-6)
    found = statistics.reduce(SimpleNamespace(all_gather_object=lambda item: [item]))
    assert found["correction/ratio_max"] == pytest.approx(math.exp(1.5), abs=1e-5)
    assert found["correction/ratio"] == pytest.approx((math.exp(0.5) + math.exp(1.5)) / 2, abs=1e-5)
    assert found["correction/outside"] == 0.5
    rejected, _ = loss_of(batch, logprobs, correction="icepop", correction_args=("high=2",))
    assert float(rejected) == pytest.approx(-math.exp(0.5) / 2, abs=1e-6)


@pytest.mark.parametrize(
    ("algorithm", "text"),
    [
        ({"loss": "ppo_clap"}, "Unknown loss 'ppo_clap'. Did you mean ppo_clip"),
        (
            {"loss_args": ("clip=1",)},
            "The loss 'ppo_clip' has no parameter clip. It has clip_high, clip_low",
        ),
        ({"loss_args": ("clip_low",)}, "--algorithm.loss_args 'clip_low': it must be name=value"),
        ({"aggregation": "sequence_mean_token_sum_norm"}, "needs a value for length"),
        ({"correction": "tis", "old_logprobs": "engine"}, "Use one of the two"),
        ({"correction_args": ("cap=2",)}, "--algorithm.correction is none"),
        ({"kl_coef": 0.1, "kl_estimator": "k4"}, "Unknown kl_estimator 'k4'"),
        ({"kl_coef": 0.1, "kl_estimator": "own_kl:none"}, "has no 'none'"),
        (
            {"kl_coef": 0.1, "kl_estimator_args": ("scale=2",)},
            "The kl_estimator 'k3' has no parameter scale. It has none",
        ),
        (
            {"kl_coef": 0.1, "kl_estimator": "own_kl:summed"},
            r"returned a tensor of shape \[\], .* one number per token",
        ),
        ({"kl_coef": 0.1, "kl_estimator": "own_kl:detached"}, "own_kl:detached has no gradient: let it compute with"),
        ({"loss": "kl_cov"}, "needs tokens that are chosen over a whole update"),
        ({"loss_args": ("clip_low=2",)}, "--algorithm.loss_args: clip_low is 2"),
        ({"loss_args": ("clip_low=much",)}, "--algorithm.loss_args: "),
        ({"loss": "sapo", "loss_args": ("tau_pos=0",)}, "--algorithm.loss_args: tau_pos is 0"),
        ({"clip_low": 2.0}, "--algorithm.clip_low: clip_low is 2"),
        ({"clip_low": 2.0, "loss_args": ("dual_clip=3",)}, "--algorithm.clip_low: clip_low is 2"),
        ({"clip_high": -1.0, "loss_args": ("clip_low=0.1",)}, "--algorithm.clip_high and --algorithm.loss_args: clip"),
        ({"clip_low": 0.1, "loss_args": ("clip_low=0.2",)}, "clip_low=0.2 set the same bound"),
        ({"loss": "policy_gradient", "clip_high": 0.1}, "'policy_gradient' has no parameter clip_high"),
        (
            {"correction": "mis", "correction_args": ("level=word",)},
            "--algorithm.correction_args: .*level is 'word'",
        ),
        (
            {"aggregation": "sequence_mean_token_sum_norm", "aggregation_args": ("length=0",)},
            "--algorithm.aggregation_args: length is 0",
        ),
        ({"advantage": "cpgd", "advantage_args": ("weight=all",)}, "--algorithm.advantage_args: .*weight is 'all'"),
        ({"advantage": "pass_at_k", "advantage_args": ("k=2.5",)}, "--algorithm.advantage_args: .*k is 2.5"),
        ({"advantage": "pass_at_k"}, "draws k=4 of --group_size 3"),
    ],
)
def test_what_cannot_be_optimised_is_told(algorithm: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        PolicyObjective(AlgorithmConfig(**algorithm), group_size=3)  # type: ignore[arg-type]


def test_a_loss_that_selects_by_advantages_needs_them_before_the_teacher() -> None:
    algorithm = AlgorithmConfig(loss="kl_cov")
    PolicyObjective(algorithm, distillation=DistillationConfig(kind="loss"), has_selector=True)
    with pytest.raises(ValueError, match="kl_cov selects tokens by the advantages .* Give --distillation.kind loss"):
        PolicyObjective(algorithm, distillation=DistillationConfig(kind="advantage"), has_selector=True)


def test_a_group_is_as_large_as_its_estimator_draws() -> None:
    two = AlgorithmConfig(advantage="pass_at_k", advantage_args=("k=2",))
    PolicyObjective(two, group_size=2)
    with pytest.raises(ValueError, match="draws k=2 of --group_size 1"):
        PolicyObjective(two, group_size=1)


@pytest.mark.parametrize("target", [{"kl_target": 0.1, "kl_coef": 0.2}, {"entropy_target": 0.5}])
def test_coefficients_with_a_target_follow_it(target: dict[str, float]) -> None:
    assert isinstance(PolicyLoss(AlgorithmConfig(**target)).coefficients, Coefficients)  # type: ignore[arg-type]
    assert isinstance(PolicyLoss(AlgorithmConfig(kl_coef=0.2)).coefficients, FixedCoefficients)


LOSSES = {
    "policy_gradient": (),
    "gspo": (),
    "gmpo": (),
    "vespo": (),
    "cispo": (),
    "sapo": (),
    "cpgd": (),
    "dppo_tv": (),
    "dppo_kl": (),
    "ppo_clip": ("clip_high=0.01",),
}


def gradient(**algorithm: object) -> tuple[float, ...]:
    """Of 40 tokens in 6 sequences of several lengths, near and far from the policies that they are compared with."""
    draw = torch.Generator().manual_seed(0)
    logprobs = (-3 + torch.randn(40, generator=draw)).requires_grad_()
    owners = torch.tensor([0] * 2 + [1] * 5 + [2] * 13 + [3] * 1 + [4] * 9 + [5] * 10)
    old, sampler, reference = (logprobs.detach() + 0.7 * torch.randn(40, generator=draw) for _ in range(3))
    batch = dataclasses.replace(
        batch_of(torch.randn(6, generator=draw)[owners].tolist(), [True] * 40),
        sequence_index=owners,
        keys=tuple((0, place) for place in range(6)),
        old_logprobs=old,
        sampler_logprobs=sampler,
        ref_logprobs=reference,
    )
    loss, _ = loss_of(batch, logprobs, kl_coef=0.1, **algorithm)
    loss.backward()
    assert logprobs.grad is not None
    return tuple(round(value, 6) for value in logprobs.grad.tolist())


def test_every_choice_changes_the_gradient() -> None:
    """No name and no parameter is without effect; k2's gradient is the KL's, so k1 with that gradient is the same."""
    choices: list[dict[str, object]] = [{}, *({"loss": name, "loss_args": args} for name, args in LOSSES.items())]
    choices += [{"aggregation": name} for name in ("sequence_mean", "sequence_mean_token_sum")]
    choices += [{"correction": name} for name in ("tis", "mis", "icepop", "reject")]
    choices += [{"kl_estimator": "k1"}, {"kl_estimator": "k2"}, {"kl_weighted": True}]
    choices += [{"off_policy_mask": 0.1}]
    found = {str(choice): gradient(**choice) for choice in choices}
    assert len(set(found.values())) == len(found), found
    assert gradient(loss="gspo_token") == gradient(loss="gspo")  # they differ where tokens have advantages of their own
    assert gradient(kl_gradient="kl", kl_estimator="k1") == gradient(kl_estimator="k2")


def test_samples_without_a_reward_are_left_out_of_their_group() -> None:
    prompt = Prompt(index=0, text="", token_ids=(1,))
    samples = [
        made_sample(prompt=prompt, position=place // 3, sample_index=place % 3, response_ids=(5,))
        for place in range(6)
    ]  # fmt: skip
    rewards = [1.0, NO_REWARD, 0.0, NO_REWARD, NO_REWARD, 1.0]
    found = PolicyObjective(AlgorithmConfig(advantage="dr_grpo")).advantages(scored(samples, rewards), Comm())
    # The mean of the first group is (1 + 0) / 2; in the second only one is left.
    assert [(item.sample.position, item.sample.sample_index, item.reward, item.advantage) for item in found] == [
        (0, 0, 1.0, 0.5), (0, 2, 0.0, -0.5), (1, 2, 1.0, 0.0)
    ]  # fmt: skip
    baselines = [0.25, 0.25, 0.25, 0.5, 0.5, NO_REWARD]
    objective = PolicyObjective(AlgorithmConfig(advantage="remax"))
    remax = objective.advantages(scored(samples, rewards), Comm(), baselines)
    assert [item.advantage for item in remax] == [0.75, -0.25]
    assert PolicyObjective(AlgorithmConfig()).advantages(scored(samples, [NO_REWARD] * 6), Comm()) == []
