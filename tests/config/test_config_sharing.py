"""--share_prompts refuses by name what needs whole sequences."""

from __future__ import annotations

from typing import Any

import pytest

from lightrl.config import GRPOConfig, PPOConfig
from lightrl.config.strategy import RoutingConfig


def test_it_is_off_unless_asked_for() -> None:
    assert not GRPOConfig().share_prompts
    assert PPOConfig(share_prompts=True).share_prompts


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"exact": True}, "--exact"),
        ({"sp_size": 2}, "--sp_size"),
        ({"routing": RoutingConfig(replay=True)}, "--routing.replay"),
        ({"routing": RoutingConfig(balance_coef=0.1)}, "--routing.balance_coef"),
    ],
)
def test_what_needs_whole_sequences_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"--share_prompts does not go with {named}: "):
        GRPOConfig(share_prompts=True, **options)
