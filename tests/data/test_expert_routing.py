"""Experts keep to their tokens, whatever samples share a pack."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from made_samples import made_sample

from lightrl.data.expert_routing import join_routing
from lightrl.data.packing import dummy_batch, pack
from lightrl.records import Experience, Prompt, Sample


def sample(position: int, num_prompt: int, num_response: int, routing: Any = None) -> Sample:
    return made_sample(
        prompt=Prompt(index=position, text="", token_ids=tuple(range(1, num_prompt + 1))),
        position=position,
        response_ids=(7,) * num_response,
        sampler_logprobs=(-1.0,) * num_response,
        routing=routing,
    )


def experts(first: int, num_tokens: int) -> Any:
    """Token t of [tokens, 1 layer, 2 experts] has the experts first + t and 0."""
    return np.array([[[first + token, 0]] for token in range(num_tokens)], np.int16)


def test_the_rows_follow_the_samples_into_the_pack() -> None:
    # The longer sample comes first here and last in a pack. The last token of each has no row.
    long, short = sample(0, 3, 2, experts(10, 4)), sample(1, 1, 2, experts(20, 2))
    items = [Experience(sample=item, reward=0.0, advantage=1.0) for item in (long, short)]
    batch = pack(items, temperature=1.0)
    assert batch.routing is not None
    assert batch.routing.dtype == torch.int16
    assert batch.routing[:, 0, 0].tolist() == [20, 21, -1, 10, 11, 12, 13, -1]
    assert pack(items[:1], temperature=1.0).routing[:, 0, 0].tolist() == [10, 11, 12, 13, -1]  # type: ignore[index]


def test_without_experts_a_pack_has_none() -> None:
    plain = [Experience(sample=sample(0, 2, 2), reward=0.0, advantage=1.0)]
    assert pack(plain, temperature=1.0).routing is None
    assert dummy_batch(temperature=1.0).routing is None


def test_a_sample_without_experts_lets_the_router_choose() -> None:
    joined = join_routing([sample(0, 1, 1), sample(1, 1, 1, experts(5, 1))])
    assert joined[:, 0].tolist() == [[-1, -1], [-1, -1], [5, 0], [-1, -1]]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="has 2 tokens and experts of 3"):
        join_routing([sample(0, 1, 1, experts(0, 3))])
    with pytest.raises(ValueError, match="must come from one model"):
        join_routing([sample(0, 1, 1, experts(0, 1)), sample(1, 1, 1, np.zeros((1, 2, 2), np.int16))])
