"""What lightrl makes of the experts that vLLM returns; vLLM itself returns them on a GPU alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lightrl.engines.base import Completion, EngineGroup, create_recording_engine
from lightrl.engines.vllm.recording import RecordingVLLMEngine

COMPLETION = Completion(
    request_id=0,
    sample_index=0,
    prompt_token_ids=(1, 2),
    output_token_ids=(3, 4),
    logprobs=(-1.0, -1.0),
    versions=(0, 0),
    finish_reason="stop",
)


def engine(layers: list[int]) -> Any:
    made = object.__new__(RecordingVLLMEngine)
    made._layers = layers
    return made


@pytest.mark.parametrize("num_rows", [3, 4])
def test_dense_layers_and_a_row_of_the_last_token_are_left_out(num_rows: int) -> None:
    # [tokens, layers, k]: the expert is 10 x token + layer. Layer 0 is dense.
    experts = (10 * np.arange(num_rows)[:, None] + np.arange(3)).astype(np.uint8)[..., None]
    found = engine([1, 2])._routing(experts, COMPLETION)
    assert found.dtype == np.int16
    assert found[..., 0].tolist() == [[1, 2], [11, 12], [21, 22]]


def test_records_that_do_not_fit_the_sample_are_refused() -> None:
    with pytest.raises(RuntimeError, match="experts of none tokens for a sample of 4"):
        engine([0])._routing(None, COMPLETION)
    with pytest.raises(RuntimeError, match="experts of 2 tokens for a sample of 4"):
        engine([0])._routing(np.zeros((2, 1, 1), np.uint8), COMPLETION)
    longer = replace(COMPLETION, output_token_ids=(3,))
    with pytest.raises(RuntimeError, match="experts of 4 tokens for a sample of 3"):
        engine([0])._routing(np.zeros((4, 1, 1), np.uint8), longer)


def test_a_cpu_is_refused_before_anything_is_built() -> None:
    parts: dict[str, Any] = {"source": None, "tokenizer": None, "options": None}
    with pytest.raises(ValueError, match="on a GPU alone"):
        create_recording_engine("vllm", device=torch.device("cpu"), group=EngineGroup(), **parts)
    with pytest.raises(ValueError, match="needs --engine_tp_size 1, not 2"):
        create_recording_engine("vllm", device=torch.device("cuda"), group=EngineGroup(size=2), **parts)
