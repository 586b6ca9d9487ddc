"""The options of evaluations."""

import pytest

from lightrl.config import EvalConfig, GRPOConfig


def test_options_that_contradict_are_told() -> None:
    with pytest.raises(ValueError, match="--eval.k 8 needs as many samples of a prompt, and --eval.n is 4"):
        GRPOConfig(eval=EvalConfig(n=4, k=(1, 8)))
    with pytest.raises(ValueError, match="--eval.temperature 0 gives 4 equal samples"):
        GRPOConfig(eval=EvalConfig(n=4, temperature=0.0))
    with pytest.raises(ValueError, match="--eval.k is"):
        GRPOConfig(eval=EvalConfig(n=4, k=(0,)))
