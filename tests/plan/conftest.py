"""A config of a small model, small enough to compute its bytes by hand."""

from typing import Any

import pytest
from transformers import Qwen3Config


@pytest.fixture(scope="session")
def small_config() -> Any:
    """Three blocks of 32 wide, a vocabulary of 64, no tied weights: 2 x 64 x 32 + 32 weights outside the blocks."""
    return Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=False,
    )
