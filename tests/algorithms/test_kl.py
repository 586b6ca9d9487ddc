import math

import pytest
import torch
from torch.testing import assert_close

from lightrl.algorithms.kl import (
    Estimator,
    KLGradient,
    KLKind,
    add_kl,
    distillation_advantages,
    distillation_terms,
    k1_of,
    k2_of,
    k3_of,
    kl_estimate,
    kl_terms,
    next_kl_coef,
    reverse_kl,
)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # d = policy - reference = ln 2, -ln 2, 0 with ln 2 = 0.6931472
        ("k1", [0.6931472, -0.6931472, 0.0]),
        ("k2", [0.2402265, 0.2402265, 0.0]),  # 0.6931472^2 / 2 = 0.4804530 / 2
        ("k3", [0.1931472, 0.3068528, 0.0]),  # 1/2 - 1 + 0.6931472; 2 - 1 - 0.6931472
    ],
)
def test_estimates_by_hand(kind: KLKind, expected: list[float]) -> None:
    policy = torch.tensor([0.5, 0.25, 0.5]).log()
    reference = torch.tensor([0.25, 0.5, 0.5]).log()
    estimate = kl_estimate(policy=policy, reference=reference, kind=kind)
    assert_close(estimate, torch.tensor(expected), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("kind", "slope"),
    # d/dpolicy at d = ln 2: k1: 1; k2: d = 0.6931472; k3: 1 - exp(-d) = 0.5
    [("k1", 1.0), ("k2", 0.6931472), ("k3", 0.5)],
)
def test_gradient_flows_to_the_policy_alone(kind: KLKind, slope: float) -> None:
    policy = torch.tensor([math.log(0.5)], requires_grad=True)
    reference = torch.tensor([math.log(0.25)], requires_grad=True)
    kl_estimate(policy=policy, reference=reference, kind=kind).sum().backward()
    assert_close(policy.grad, torch.tensor([slope]), atol=1e-6, rtol=0)
    assert reference.grad is None


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_unbiased_estimates_average_to_the_kl(kind: KLKind) -> None:
    # Policy (3/4, 1/4), reference (1/2, 1/2): KL = 0.75 ln 1.5 + 0.25 ln 0.5 = 0.3040988 - 0.1732868 = 0.1308120
    policy, reference = torch.tensor([0.75, 0.25]), torch.tensor([0.5, 0.5])
    estimate = kl_estimate(policy=policy.log(), reference=reference.log(), kind=kind)
    assert_close((policy * estimate).sum(), torch.tensor(0.1308120), atol=1e-6, rtol=0)


def test_k3_is_accurate_for_small_differences() -> None:
    # d = 1e-4: k3 = d^2 / 2 - d^3 / 6 = 4.99983e-9
    estimate = kl_estimate(policy=torch.tensor([1e-4]), reference=torch.zeros(1), kind="k3")
    assert_close(estimate, torch.tensor([4.99983e-9]), atol=2e-11, rtol=0)


def test_k3_is_held_beyond_a_gap_of_thirty() -> None:
    # The reference finds the tokens e^29, e^31 and e^90 times likelier; exp(90) is infinite in float32. Up to e^30 the
    # value is exp(29) - 30 and the slope 1 - exp(29) = -3.9313343e12; beyond, exp(30) - 31 = 1.0686475e13 and 0.
    # A policy that finds a token e^90 times likelier: exp(-90) - 1 + 90 = 89, slope 1.
    policy = torch.tensor([-29.0, -31.0, -90.0, 90.0], requires_grad=True)
    found = kl_estimate(policy=policy, reference=torch.zeros(4), kind="k3")
    assert_close(found, torch.tensor([3.9313343e12, 1.0686475e13, 1.0686475e13, 89.0]), atol=0, rtol=1e-6)
    found.sum().backward()
    assert_close(policy.grad, torch.tensor([-3.9313343e12, 0.0, 0.0, 1.0]), atol=0, rtol=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reference_that_is_not_finite_shows(kind: KLKind, value: float) -> None:
    assert kl_estimate(policy=torch.zeros(1), reference=torch.tensor([value]), kind=kind).isnan().all()


def test_unknown_kind_names_the_choices() -> None:
    with pytest.raises(ValueError, match="Unknown KL estimate 'k4'. Choose one of k1, k2, k3."):
        kl_estimate(policy=torch.zeros(1), reference=torch.zeros(1), kind="k4")  # type: ignore[arg-type]


def test_arguments_must_be_named() -> None:
    with pytest.raises(TypeError, match="positional"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k1")  # type: ignore[misc]


# Policy 1/2, reference 1/4: d = ln 2 = 0.6931472. The last token is masked.
POLICY = torch.tensor([math.log(0.5), math.nan])
REFERENCE = torch.tensor([math.log(0.25), 1.0])
MASK = torch.tensor([True, False])


def value_and_slope(**options: object) -> tuple[float, float]:
    policy = POLICY.clone().requires_grad_()
    terms = kl_terms(policy=policy, reference=REFERENCE, mask=MASK, **options)  # type: ignore[arg-type]
    terms.sum().backward()
    assert policy.grad is not None
    assert terms[1] == 0
    assert policy.grad[1] == 0
    return terms[0].item(), policy.grad[0].item()


@pytest.mark.parametrize(
    ("kind", "value", "slope"),
    [("k1", 0.6931472, 1.0), ("k2", 0.2402265, 0.6931472), ("k3", 0.1931472, 0.5)],
)
def test_terms_with_the_gradient_of_the_estimate(kind: KLKind, value: float, slope: float) -> None:
    assert value_and_slope(kind=kind) == pytest.approx((value, slope), abs=1e-6)


@pytest.mark.parametrize(("kind", "value"), [("k1", 0.6931472), ("k2", 0.2402265), ("k3", 0.1931472)])
def test_terms_with_the_gradient_of_the_kl(kind: KLKind, value: float) -> None:
    """Always d, whatever the value."""
    assert value_and_slope(kind=kind, gradient="kl") == pytest.approx((value, 0.6931472), abs=1e-6)


@pytest.mark.parametrize(("gradient", "slope"), [("own", 2.0), ("kl", 0.6931472)])
def test_terms_of_a_function_count_only_trained_tokens(gradient: KLGradient, slope: float) -> None:
    """1 + 2 |d| = 2.3862944; it is 1 where d is 0, as for a token that is not trained, which counts 0."""
    found = value_and_slope(kind=lambda policy, reference: 1 + 2 * (policy - reference).abs(), gradient=gradient)
    assert found == pytest.approx((2.3862944, slope), abs=1e-6)


@pytest.mark.parametrize(("kind", "function"), [("k1", k1_of), ("k2", k2_of), ("k3", k3_of)])
def test_each_name_is_a_function(kind: KLKind, function: Estimator) -> None:
    policy, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -0.5])
    assert_close(
        function(policy, reference), kl_estimate(policy=policy, reference=reference, kind=kind), atol=0, rtol=0
    )


def test_off_policy_terms_are_weighed_by_the_ratio() -> None:
    # The token was sampled at 1/3: policy / old = 1.5, value 1.5 x 0.1931472, slope 1.5 x 0.6931472
    old = torch.tensor([math.log(1 / 3), math.nan])
    found = value_and_slope(kind="k3", gradient="kl", old=old)
    assert found == pytest.approx((0.2897208, 1.0397208), abs=1e-6)


def test_the_weighed_k3_has_the_gradient_of_its_own_value() -> None:
    """ratio x k3 with both differentiated, r (exp(-d) - 1 + d), has the slope r d: finite differences of it."""
    old, step = math.log(1 / 3), 1e-4

    def value(policy: float) -> float:
        d = policy - math.log(0.25)
        return math.exp(policy - old) * (math.expm1(-d) + d)

    numeric = (value(math.log(0.5) + step) - value(math.log(0.5) - step)) / (2 * step)
    found = value_and_slope(kind="k3", gradient="kl", old=torch.tensor([old, math.nan]))
    assert found[1] == pytest.approx(numeric, abs=1e-6)


@pytest.mark.parametrize(("kind", "gradient"), [("k2", "own"), ("k1", "kl"), ("k3", "kl")])
def test_the_expected_gradient_is_that_of_the_kl(kind: KLKind, gradient: KLGradient) -> None:
    """Over all tokens of a small vocabulary, each weighed by its probability, and the KL differentiated exactly."""
    logits = torch.tensor([0.3, -1.0, 0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    logprobs = logits.log_softmax(0)
    exact = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)[0]
    everything = torch.ones(3, dtype=torch.bool)
    terms = kl_terms(policy=logprobs, reference=reference, mask=everything, kind=kind, gradient=gradient)
    found = torch.autograd.grad((logprobs.detach().exp() * terms).sum(), logits)[0]
    assert_close(found, exact, atol=1e-9, rtol=0)


def test_own_gradients_agree_with_finite_differences() -> None:
    policy = torch.tensor([-0.5, -1.5, -2.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.0, -1.0, -2.0], dtype=torch.float64)
    mask = torch.tensor([True, True, False])
    for kind in ("k1", "k2", "k3"):
        assert torch.autograd.gradcheck(
            lambda leaf, kind=kind: kl_terms(policy=leaf, reference=reference, mask=mask, kind=kind).sum(), (policy,)
        )


def test_unknown_gradient_names_the_choices() -> None:
    with pytest.raises(ValueError, match="Unknown KL gradient 'k2'. Choose one of own, kl"):
        value_and_slope(gradient="k2")


@pytest.mark.parametrize(
    ("kl", "coef"),
    [
        (6.6, 0.201),  # 6.6 / 6 - 1 = 0.1: 0.2 (1 + 0.1 x 500 / 10000)
        (60.0, 0.202),  # held at 0.2
        (0.0, 0.198),  # held at -0.2
        (6.0, 0.2),
    ],
)
def test_kl_coefficient_follows_its_target(kl: float, coef: float) -> None:
    assert next_kl_coef(0.2, kl=kl, target=6.0, num_samples=500) == pytest.approx(coef, abs=1e-12)


def test_a_horizon_of_ten_steps_is_the_factor_of_the_paper() -> None:
    # arXiv:1909.08593, sec. 2.2: coef (1 + 0.1 e), here with e = 1.1 - 1 = 0.1.
    assert next_kl_coef(0.2, kl=1.1, target=1.0, num_samples=64, horizon=640) == pytest.approx(0.202, abs=1e-12)


def test_a_horizon_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="target is 6.0 and horizon 0: both must be more than 0"):
        next_kl_coef(0.2, kl=1.0, target=6.0, num_samples=1, horizon=0)


def test_kl_target_must_be_positive() -> None:
    with pytest.raises(ValueError, match="target is 0 and horizon 10000: both must be more than 0"):
        next_kl_coef(0.2, kl=1.0, target=0, num_samples=1)


STUDENT = torch.tensor([math.log(0.5), math.log(0.25), math.nan])
TEACHER = torch.tensor([math.log(0.25), math.log(0.5), 0.0])
BOTH = torch.tensor([True, True, False])


def test_tokens_that_the_teacher_finds_likelier_have_a_good_advantage() -> None:
    # 2 (log 0.25 - log 0.5) = -1.3862944, and the other way
    found = distillation_advantages(STUDENT, TEACHER, BOTH, coef=2.0)
    assert_close(found, torch.tensor([-1.3862944, 1.3862944, 0.0]), atol=1e-6, rtol=0)


def test_the_sampled_loss_has_the_value_k1_and_the_slope_of_the_kl() -> None:
    # log student - log teacher = 0.6931472 and -0.6931472; so are the slopes
    student = STUDENT.clone().requires_grad_()
    terms = distillation_terms(student, TEACHER, BOTH)
    terms.sum().backward()
    expected = torch.tensor([0.6931472, -0.6931472, 0.0])
    assert_close(terms.detach(), expected, atol=1e-6, rtol=0)
    assert_close(student.grad, expected, atol=1e-6, rtol=0)


def test_off_policy_tokens_are_weighed() -> None:
    # Sampled at 1/4 and 1/4: ratios 2 and 1
    old = torch.full((3,), math.log(0.25))
    terms = distillation_terms(STUDENT, TEACHER, BOTH, old_logprobs=old)
    assert_close(terms, torch.tensor([1.3862944, -0.6931472, 0.0]), atol=1e-6, rtol=0)


def test_reverse_kl_over_the_vocabulary() -> None:
    # 0.75 ln 1.5 + 0.25 ln 0.5 = 0.1308120; equal ones 0; a token that neither has counts nothing
    policy = torch.tensor([[0.75, 0.25, 0.0], [0.5, 0.5, 0.0]]).log()
    teacher = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]]).log()
    assert_close(reverse_kl(policy, teacher), torch.tensor([0.1308120, 0.0]), atol=1e-6, rtol=0)


def test_reverse_kl_gradient_agrees_with_finite_differences() -> None:
    logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(3, 5, dtype=torch.float64).log_softmax(-1)
    assert torch.autograd.gradcheck(lambda leaf: reverse_kl(leaf.log_softmax(-1), teacher).sum(), (logits,))


def test_the_teacher_and_the_advantages_get_no_gradient() -> None:
    student, teacher = (part.clone().requires_grad_() for part in (STUDENT, TEACHER))
    assert not distillation_advantages(student, teacher, BOTH).requires_grad
    everything = torch.tensor([[0.75, 0.25]]).log()
    assert not reverse_kl(everything, everything.clone().requires_grad_()).requires_grad


def test_the_kl_is_added_to_the_loss_by_its_coefficient() -> None:
    # 1 + 0.5 x 0.4; 2 + 0.5 x -0.2
    assert_close(add_kl(torch.tensor([1.0, 2.0]), torch.tensor([0.4, -0.2]), coef=0.5), torch.tensor([1.2, 1.9]))
