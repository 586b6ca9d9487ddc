"""What a pass needs, on fake tensors."""

from typing import Any

import pytest

from lightrl.config import GRPOConfig
from lightrl.plan.activations import PackShape, Settings, _measured, needs_of
from lightrl.plan.models import policy_of

PACK = PackShape(num_sequences=4, length=32, num_scored=24)


def test_a_pass_by_its_settings(small_config: Any) -> None:
    model = policy_of(small_config, GRPOConfig())

    def top(**settings: Any) -> float:
        return needs_of(model, PACK, Settings(**settings)).top

    trained = top()
    assert top(trains=False) < top(checkpointing=True) < trained
    assert top(computation="bfloat16") < trained
    # A block saves at least its input and the inputs of its seven matrices: 32 x (5 x 32 + 48) x 4 bytes x 4 sequences.
    assert trained > 3 * 4 * 32 * (5 * 32 + 48) * 4


def test_blocks_that_are_not_run_are_counted_as_if_they_were(small_config: Any) -> None:
    model = policy_of(small_config, GRPOConfig())
    found, whole = needs_of(model, PACK, Settings()), _measured(model, PACK, 3, Settings())
    assert (found.top, found.bottom) == pytest.approx((whole.top, whole.bottom), rel=0.01)
    assert 0 < found.bottom < found.top  # what other blocks saved is gone when gradients reach the first


def test_a_further_block_costs_the_same(small_config: Any) -> None:
    model = policy_of(small_config, GRPOConfig())
    small_config_of_four = type(small_config)(**{**small_config.to_dict(), "num_hidden_layers": 4, "layer_types": None})
    deeper = policy_of(small_config_of_four, GRPOConfig())
    three, four = (needs_of(item, PACK, Settings()).top for item in (model, deeper))
    double = PackShape(num_sequences=8, length=32, num_scored=24)
    assert four > three
    assert needs_of(model, double, Settings()).top > 1.9 * three
