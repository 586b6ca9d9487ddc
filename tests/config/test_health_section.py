import pytest

from lightrl.config import GRPOConfig, PPOConfig, SFTConfig
from lightrl.config.health_section import GroupHealthConfig, HealthConfig, RolloutHealthConfig


def test_only_runs_that_sample_have_limits_of_samples() -> None:
    assert type(SFTConfig().health) is HealthConfig
    assert type(GRPOConfig().health) is GroupHealthConfig
    assert type(PPOConfig().health) is RolloutHealthConfig  # a critic learns from groups of equal rewards, too
    assert GRPOConfig().health.max_bad_steps == 0


def test_a_share_above_1_is_refused() -> None:
    with pytest.raises(ValueError, match=r"health\.max_truncated"):
        GRPOConfig(health=GroupHealthConfig(max_truncated=1.5))
