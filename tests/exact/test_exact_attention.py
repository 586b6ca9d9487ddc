"""The attention of exact runs computes what attention is, for sequences, packs and rows of a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from lightrl.exact import attention
from lightrl.exact.attention import attend_causally, packed_attention, row_attention
from lightrl.models.packed_attention import LAYOUT_KEYWORD, packed_layout

MODULE = nn.Identity()


def parts(length: int, *, num_heads: int = 4, num_kv_heads: int = 2, count: int = 1) -> tuple[Any, ...]:
    torch.manual_seed(0)
    sizes = (num_heads, num_kv_heads, num_kv_heads)
    return tuple(torch.randn(count, heads, length, 16) for heads in sizes)


def expected(query: Any, key: Any, value: Any, window: int | None = None) -> Any:
    sees = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).tril()
    mask = sees if window is None else sees.triu(1 - window)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("length", "window"), [(1, None), (7, None), (40, None), (40, 5), (600, None)])
def test_sequences(length: int, window: int | None, num_kv_heads: int) -> None:
    given = parts(length, num_kv_heads=num_kv_heads, count=2)
    assert_close(attend_causally(*given, 0.3, window), expected(*given, window), atol=1e-5, rtol=0)


def test_sequences_of_a_pack_see_themselves_alone() -> None:
    given = parts(20)
    layout = packed_layout((0, 5, 10, 20), torch.device("cpu"))
    found, _ = packed_attention(MODULE, *given, None, scaling=0.3, **{LAYOUT_KEYWORD: layout})
    pieces = zip(*(part.split([5, 5, 10], dim=2) for part in given), strict=True)
    assert_close(found, torch.cat([expected(*piece) for piece in pieces], dim=1), atol=1e-6, rtol=0)


def test_a_row_of_the_cache_sees_what_its_mask_allows() -> None:
    query, key, value = parts(attention.LEAST_KEYS)
    mask = torch.zeros(1, 1, 1, attention.LEAST_KEYS)
    mask[..., 9:] = torch.finfo(torch.float32).min
    found, _ = row_attention(MODULE, query[:, :, 8:9], key, value, mask, scaling=0.3)
    assert_close(found, expected(query, key, value)[:, 8:9], atol=1e-6, rtol=0)


@pytest.mark.parametrize("change", [{"softcap": 30.0}, {"s_aux": torch.zeros(4)}, {"dropout": 0.1}])
def test_what_changes_the_scores_is_refused(change: dict[str, Any]) -> None:
    given = parts(4)
    with pytest.raises(ValueError, match="--exact True does not go with Identity"):
        row_attention(MODULE, *given, None, **change)
    with pytest.raises(ValueError, match="--exact True does not go with Identity"):
        packed_attention(MODULE, *given, None, **{LAYOUT_KEYWORD: packed_layout((0, 4), torch.device("cpu"))}, **change)
