from __future__ import annotations

import pytest

from lightrl.algorithms.controllers import active_entropy_coef, next_entropy_coef, next_kl_coef


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


def test_a_horizon_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="target is 6.0 and horizon 0: both must be more than 0"):
        next_kl_coef(0.2, kl=1.0, target=6.0, num_samples=1, horizon=0)


def test_kl_target_must_be_positive() -> None:
    with pytest.raises(ValueError, match="target is 0 and horizon 10000: both must be more than 0"):
        next_kl_coef(0.2, kl=1.0, target=0, num_samples=1)


@pytest.mark.parametrize(
    ("coef", "entropy", "expected"),
    [(0.01, 0.1, 0.015), (0.01, 0.3, 0.005), (0.01, 0.2, 0.01), (0.001, 0.3, 0.0), (0.999, 0.1, 1.0)],
)
def test_entropy_coefficient_steps_towards_its_target(coef: float, entropy: float, expected: float) -> None:
    assert next_entropy_coef(coef, entropy=entropy, target=0.2) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("entropy", "expected"), [(0.1, 0.5), (0.2, 0.5), (0.21, 0.0)])
def test_entropy_coefficient_acts_up_to_its_target(entropy: float, expected: float) -> None:
    assert active_entropy_coef(0.5, entropy=entropy, target=0.2) == expected
