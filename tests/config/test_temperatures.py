"""Temperatures at which vLLM would draw another distribution than the trainer computes."""

from __future__ import annotations

from typing import Any

import pytest

from lightrl.config import EvalConfig, GRPOConfig


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"temperature": 0.009}, r"--temperature 0\.009: vLLM draws greedily \(0\) or at temperatures from 0\.01 to 2"),
        ({"temperature": 2.1}, r"--temperature 2\.1: "),
        ({"eval": EvalConfig(temperature=0.001)}, r"--eval\.temperature 0\.001: "),
    ],
)
def test_what_vllm_would_change_is_refused_before_it_starts(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        GRPOConfig(engine="vllm", **options)
    GRPOConfig(**options)


def test_what_vllm_draws_at_is_taken() -> None:
    for temperature in (0.01, 2.0):
        config = GRPOConfig(engine="vllm", temperature=temperature, eval=EvalConfig(temperature=0))
        assert (config.temperature, config.eval.temperature) == (temperature, 0)
