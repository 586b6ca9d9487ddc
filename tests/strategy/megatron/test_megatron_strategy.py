"""Megatron on two CPU ranks equals plain training; docs/megatron.md has the figures of all layouts.

megatron-core wants a GPU: tests/megatron_cpu replaces what it calls, in the processes of the ranks alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lightrl.testing import StrategyContract, StrategyParity

pytest.importorskip("megatron.core", reason="needs lightrl[megatron]")
pytestmark = pytest.mark.slow

CPU = "lightrl_megatron_cpu:CpuMegatronStrategy"
FOLDER = Path(__file__).resolve().parents[2] / "megatron_cpu"


class TestPipeline(StrategyContract):
    strategy = CPU
    cwd = FOLDER
    flags = ("--megatron.pp_size", "2")
    world_sizes = (2,)
    variants = ("a rank without samples", "sgd without clipping")
    runs_by_calls = False


class TestTensorsAndTokens(StrategyParity):
    strategy = CPU
    cwd = FOLDER
    flags = ("--tp_size", "2", "--megatron.sequence_parallel", "True")
    world_sizes = (2,)
    variants = ("sgd without clipping",)
