"""Coefficients that follow a target, against numbers worked out by hand."""

import math

import pytest

from lightrl.config import AlgorithmConfig
from lightrl.trainers.coefficients import Coefficients
from lightrl.trainers.objective import FixedCoefficients


def test_without_targets_they_stay() -> None:
    found = Coefficients(AlgorithmConfig(kl_coef=0.2, entropy_coef=0.01))
    found.follow(kl=9.0, entropy=0.0, num_samples=100)
    assert (found.kl, found.entropy) == (0.2, 0.01)


def test_the_kl_coefficient_follows_its_target() -> None:
    found = Coefficients(AlgorithmConfig(kl_coef=0.2, kl_target=0.1, kl_horizon=1000))
    found.follow(kl=0.11, entropy=1.0, num_samples=100)
    # e = 0.11 / 0.1 - 1 = 0.1; 0.2 (1 + 0.1 x 100 / 1000) = 0.202
    assert found.kl == pytest.approx(0.202, abs=1e-9)
    found.follow(kl=5.0, entropy=1.0, num_samples=100)
    # e is held at 0.2: 0.202 x 1.02
    assert found.kl == pytest.approx(0.20604, abs=1e-9)


def test_a_measurement_that_is_not_finite_moves_no_coefficient() -> None:
    options = AlgorithmConfig(kl_coef=0.2, kl_target=0.1, entropy_coef=0.01, entropy_target=0.5)
    for kl, entropy in ((math.nan, 0.4), (math.inf, 0.4), (0.2, math.nan)):
        found = Coefficients(options)
        found.follow(kl=kl, entropy=entropy, num_samples=100)
        assert (found.kl, found.entropy) == (0.2, 0.01)


def test_the_entropy_coefficient_acts_at_or_below_its_target_only() -> None:
    found = Coefficients(AlgorithmConfig(entropy_coef=0.01, entropy_target=0.5, entropy_step=0.004))
    found.follow(kl=0.0, entropy=0.4, num_samples=1)
    assert found.entropy == pytest.approx(0.014, abs=1e-9)
    found.follow(kl=0.0, entropy=0.6, num_samples=1)
    assert found.entropy == 0.0  # kept: 0.010
    found.follow(kl=0.0, entropy=0.5, num_samples=1)
    assert found.entropy == pytest.approx(0.010, abs=1e-9)


def test_the_state_goes_on() -> None:
    config = AlgorithmConfig(kl_coef=0.2, kl_target=0.1, entropy_coef=0.01, entropy_target=0.5)
    first, again = Coefficients(config), Coefficients(config)
    first.follow(kl=0.3, entropy=0.6, num_samples=50)
    again.load_state_dict(first.state_dict())
    for found in (first, again):
        found.follow(kl=0.01, entropy=0.2, num_samples=50)
    assert first.state_dict() == again.state_dict()
    assert again.entropy > 0


def test_a_run_that_goes_on_with_another_coefficient_takes_its_own() -> None:
    """As by --resume PATH into a new folder."""
    saved = Coefficients(AlgorithmConfig(kl_coef=0.2, entropy_coef=0.01)).state_dict()
    found = Coefficients(AlgorithmConfig(kl_coef=0.05, entropy_coef=0.3))
    found.load_state_dict(saved)
    assert (found.kl, found.entropy) == (0.05, 0.3)


def test_a_penalty_that_begins_in_a_resumed_run_has_the_coefficient_of_its_options() -> None:
    saved = FixedCoefficients(kl=0.0, entropy=0.0).state_dict()
    found = Coefficients(AlgorithmConfig(kl_coef=0.2, kl_target=0.1))
    found.load_state_dict(saved)
    assert found.kl == 0.2  # 0 could never grow
