import math

import torch
from torch.testing import assert_close

from lightrl.rollout.sample_messages import from_bytes, to_bytes


def test_every_bit_comes_back():
    value = {
        "ids": torch.tensor([3, 1 << 40]),
        "logprobs": torch.tensor([-0.1, -1 / 3], dtype=torch.float64),
        "parts": [{"own": torch.tensor([True, False]), "empty": torch.zeros(0)}, None, "text \u00e9", 0.1, True],
        "again": torch.tensor([[5, 6, 7], [8, 9, -1]]),
        "scalar": torch.tensor(2.5),
        "pair": ("a", "b"),
        "nan": math.nan,
    }
    back = from_bytes(to_bytes(value))
    assert_close(back["ids"], value["ids"], atol=0, rtol=0)
    assert_close(back["logprobs"], value["logprobs"], atol=0, rtol=0)
    assert back["parts"][0]["own"].tolist() == [True, False]
    assert back["parts"][0]["empty"].shape == (0,)
    assert back["parts"][1:] == [None, "text \u00e9", 0.1, True]
    assert back["again"].tolist() == [[5, 6, 7], [8, 9, -1]]
    assert_close(back["scalar"], value["scalar"], atol=0, rtol=0)
    assert back["pair"] == ["a", "b"]
    assert math.isnan(back["nan"])


def test_a_value_without_tensors_needs_none():
    assert from_bytes(to_bytes({"groups": []})) == {"groups": []}
