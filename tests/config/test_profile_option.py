"""The steps that --profile names."""

import pytest

from lightrl.config import GRPOConfig
from lightrl.config.profile_option import profiled_steps


def test_steps_count_from_1() -> None:
    assert profiled_steps("3") == range(3, 4)
    assert profiled_steps("3-5") == range(3, 6)
    assert not profiled_steps("timeline")


@pytest.mark.parametrize("text", ["0", "5-3", "3-", "all", "-1", "1.5"])
def test_anything_else_is_a_mistake(text: str) -> None:
    with pytest.raises(ValueError, match="--profile is .* give a step such as 3"):
        GRPOConfig(profile=text)
