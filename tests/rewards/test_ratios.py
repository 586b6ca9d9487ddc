from __future__ import annotations

import pytest
from linear_time import require_linear
from reward_samples import answered

from lightrl.rewards.math_answer import MathAnswer
from lightrl.rewards.ratios import is_ratio


@pytest.mark.parametrize(
    ("answer", "text", "is_right"),
    [
        ("3:4:5", r"\boxed{3:4:5}", True),
        ("3 : 4 : 5", r"\boxed{a:b:c = 6\,:\,8:10}", True),
        ("3:4:5", "Of 2:3:5 and others it is 1.5:2:2.5.", True),
        ("3:4:5", r"\boxed{3:5:4}", False),
        ("3:4:5", r"\boxed{3:4}", False),
        ("3:4", r"\boxed{3:4:1}", False),
        ("3:4:5", r"\boxed{3:4:5\text{ or }5:4:3}", False),
        ("3:4:5", "0.15", False),
        ("0:4:5", "0:4:6", False),
        ("3:4", "3:4", None),
        ("x:y:z", "3:4:5", None),
        ("5", "3:4:5", None),
    ],
)
def test_ratios_of_three_parts_are_compared_part_by_part(answer: str, text: str, is_right: bool | None) -> None:
    assert is_ratio(answer, text) is is_right


def test_the_reward_compares_ratios() -> None:
    pytest.importorskip("math_verify")
    reward = MathAnswer()
    assert reward(answered(r"\boxed{6:8:10}", "3:4:5")) == 1.0
    assert reward(answered(r"\boxed{3:5:4}", "3:4:5")) == 0.0  # 3/5/4 = 3/4/5
    assert reward(answered(r"\boxed{3:4:1}", "3:4")) == 0.0


def test_long_texts_take_no_time() -> None:
    for piece in ("3:", "3 : ", "3", "3:4:5 ", " ", r"\text{3", "3."):
        require_linear(lambda text: is_ratio("3:4:5", text), lambda n, p=piece: p * n, 20_000)
