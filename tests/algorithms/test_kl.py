import math

import pytest
import torch
from torch.testing import assert_close

from lightrl.algorithms.kl import KLKind, kl_estimate


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


def test_unknown_kind_names_the_choices() -> None:
    with pytest.raises(ValueError, match="Unknown KL estimate 'k4'. Choose one of k1, k2, k3."):
        kl_estimate(policy=torch.zeros(1), reference=torch.zeros(1), kind="k4")  # type: ignore[arg-type]


def test_arguments_must_be_named() -> None:
    with pytest.raises(TypeError, match="positional"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k1")  # type: ignore[misc]
