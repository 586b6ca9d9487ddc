"""The steps that --profile names."""

import pytest

from lightrl.config import GRPOConfig, SFTConfig
from lightrl.config.profile_option import profiled_steps


def test_steps_count_from_1() -> None:
    assert profiled_steps("3") == range(3, 4)
    assert profiled_steps("3-5") == range(3, 6)
    assert not profiled_steps("timeline")


@pytest.mark.parametrize("text", ["0", "5-3", "3-", "all", "-1", "1.5"])
def test_anything_else_is_a_mistake(text: str) -> None:
    with pytest.raises(ValueError, match="--profile is .* give a step such as 3"):
        GRPOConfig(profile=text)


def test_steps_after_the_last_one_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="--profile 4-5 begins after the last step, --max_steps 3. Give steps from 1"):
        GRPOConfig(profile="4-5", max_steps=3)
    for text, last in (("3-5", 3), ("timeline", 3), ("4", 0)):
        assert SFTConfig(profile=text, max_steps=last).profile == text
