"""Logits from a rank's rows of the output layer; ranks that split them run in test_megatron_strategy.py."""

from __future__ import annotations

import torch
from torch.testing import assert_close

from lightrl.strategy.megatron.split_logits import SplitHead, logits_of


def test_rows_that_pad_the_vocabulary_are_no_logits() -> None:
    torch.manual_seed(0)
    states, weight = torch.randn(3, 4), torch.randn(6, 4)
    logits = logits_of(states, weight, 5, 1)
    assert logits.shape == (3, 5)
    assert_close(logits.map(lambda rows: rows), states @ weight[:5].T)


def test_a_split_output_has_the_whole_vocabulary() -> None:
    logits = logits_of(torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4), 5, 2)
    assert logits.shape == (3, 5)
    assert isinstance(logits.head, SplitHead)
    assert logits.change is not None  # so that no function takes the weight for all of it
