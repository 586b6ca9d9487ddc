import pytest

from lightrl.config import GRPOConfig, SFTConfig
from lightrl.config.health_section import HealthConfig, RolloutHealthConfig


def test_only_runs_that_sample_have_limits_of_samples() -> None:
    assert type(SFTConfig().health) is HealthConfig
    assert type(GRPOConfig().health) is RolloutHealthConfig
    assert GRPOConfig().health.max_bad_steps == 0


def test_a_share_above_1_is_refused() -> None:
    with pytest.raises(ValueError, match=r"health\.max_truncated"):
        GRPOConfig(health=RolloutHealthConfig(max_truncated=1.5))
