"""Megatron on one GPU and NCCL equals plain training; it is not run yet on several, nor with Transformer Engine."""

from __future__ import annotations

import pytest
import torch

from lightrl.testing import StrategyParity

pytest.importorskip("megatron.core", reason="needs lightrl[megatron]")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none here"),
]


class TestOneGpu(StrategyParity):
    strategy = "megatron"
    world_sizes = (1,)


@pytest.mark.skip(reason="--megatron.impl te is refused: Transformer Engine's layers are not built yet")
def test_layers_of_transformer_engine() -> None:
    """Overlap and fp8 need them too."""
