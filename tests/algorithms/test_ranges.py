"""A value that an algorithm cannot use is refused by its name, before it can make every loss NaN."""

import math
from typing import Literal

import pytest

from lightrl.algorithms.ranges import Interval, NotNegative, Positive, Share, check_values
from lightrl.algorithms.registry import Kind, load

WRONG: list[tuple[Kind, str, str, object, str]] = [
    ("returns", "gae", "gamma", 2, "it must be between 0 and 1."),
    ("returns", "gae", "gamma", math.nan, "it must be a finite number, between 0 and 1."),
    ("returns", "gae", "gamma", "high", "it must be a number."),
    ("returns", "gae", "lam", -0.1, "it must be between 0 and 1."),
    ("returns", "returns_to_go", "gamma", 1.5, "it must be between 0 and 1."),
    ("returns", "turn_returns", "gamma", math.inf, "it must be a finite number, between 0 and 1."),
    ("advantage", "grpo", "eps", -1, "it must be at least 0."),
    ("advantage", "grpo", "normalize_std", "maybe", "it must be true or false."),
    ("advantage", "gpg", "norm", 0, "it must be above 0."),
    ("advantage", "cpgd", "weight", "half", "it must be one of equal, std, signal."),
    ("advantage", "cpgd", "max_weight", math.nan, "it must be a finite number, above 0."),
    ("advantage", "pass_at_k", "k", 2.5, "it must be a whole number."),
    ("advantage", "pass_at_k", "correct_above", True, "it must be a number."),
    ("loss", "ppo_clip", "clip_high", math.inf, "it must be a finite number."),
    ("loss", "cpgd", "drift_coef", -1, "it must be at least 0."),
    ("loss", "dppo_tv", "limit_low", -0.1, "it must be at least 0."),
    ("loss", "dppo_kl", "ratio_cap", 0, "it must be above 0."),
    ("loss", "kl_cov", "kl_coef", -1, "it must be at least 0."),
    ("loss", "sapo", "tau_pos", math.nan, "it must be a finite number."),
    ("aggregation", "sequence_mean_token_sum_norm", "length", math.inf, "it must be a finite number."),
    ("correction", "tis", "cap", math.nan, "it must be a finite number."),
    ("correction", "mis", "level", "word", "it must be one of token, sequence, geometric."),
]


@pytest.mark.parametrize(("kind", "name", "parameter", "value", "wanted"), WRONG)
def test_a_parameter_out_of_its_range_is_refused(
    kind: Kind, name: str, parameter: str, value: object, wanted: str
) -> None:
    with pytest.raises(ValueError, match=parameter) as error:
        load(kind, name, {parameter: value})  # type: ignore[dict-item]
    assert str(error.value) == f"The {kind} {name!r}: {parameter} is {value!r}, and {wanted}"


def test_what_is_inside_passes() -> None:
    for value in (0, 1, 0.5):
        load("returns", "gae", {"gamma": value, "lam": value})
    assert [0 in Interval(0), 0 in Interval(0, has_low=False), 2 in Interval(0, 1)] == [True, False, False]

    def own(*, share: Share = 1.0, weight: Positive = 1.0, bound: NotNegative = 0, free: object = None) -> None: ...

    check_values(own, {"share": 0.5, "weight": 9, "bound": 0, "free": "x"}, "own")


def test_annotations_that_cannot_be_read_are_no_error() -> None:
    def own(*, size: "Missing", kind: Literal["a"] = "a") -> None: ...  # type: ignore[name-defined]  # noqa: F821

    check_values(own, {"size": 3}, "own")
    with pytest.raises(ValueError, match="own: size is nan, and it must be a finite number"):
        check_values(own, {"size": math.nan}, "own")
