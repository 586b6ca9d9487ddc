from __future__ import annotations

from typing import Any

import pytest

from lightrl.trainers.fit import Trainer
from lightrl.trainers.grpo import GRPOTrainer
from lightrl.trainers.variants import variant


class Loud(Trainer):
    """A mixin."""


def test_the_mixins_come_before_the_class() -> None:
    made = variant(GRPOTrainer, Loud, name="Loud", option="--loud")
    assert made.__name__ == "LoudGRPOTrainer"
    assert made.__mro__[1:3] == (Loud, GRPOTrainer)


def test_a_function_that_makes_a_trainer_is_refused_with_the_option() -> None:
    def make(config: Any) -> Trainer:
        return GRPOTrainer(config)

    with pytest.raises(TypeError, match=r"--loud needs a subclass of lightrl.Trainer, not a function"):
        variant(make, Loud, name="Loud", option="--loud")
