"""Megatron on GPUs and NCCL equals plain training. It was never run on several GPUs.

Not covered, since there is nothing to run (docs/megatron.md says why): Transformer Engine's layers, fp8, and an overlap
of reductions with backwards.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from lightrl.testing import StrategyContract, StrategyParity, run_spmd
from lightrl.testing.strategy_parity import FEW_VARIANTS

pytest.importorskip("megatron.core", reason="needs lightrl[megatron]")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none here"),
]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
needs_four = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA devices")
FOLDER = Path(__file__).parents[1] / "megatron_cpu"


class TestOneGpu(StrategyParity):
    strategy = "megatron"
    world_sizes = (1,)


@needs_two
class TestTensors(StrategyContract):
    """Matrices and tokens over NCCL."""

    strategy = "megatron"
    flags = ("--tp_size", "2", "--megatron.sequence_parallel", "True")
    world_sizes = (2,)
    variants = FEW_VARIANTS


@needs_two
class TestStages(StrategyContract):
    """Messages of a pipeline over NCCL."""

    strategy = "megatron"
    flags = ("--megatron.pp_size", "2")
    world_sizes = (2,)
    variants = FEW_VARIANTS
    runs_by_calls = False


@needs_two
class TestPartsOfSequences(StrategyParity):
    """Gathered keys and values over NCCL, with the distributed optimizer."""

    strategy = "megatron"
    flags = ("--megatron.cp_size", "2", "--megatron.distributed_optimizer", "True")
    world_sizes = (2,)
    variants = FEW_VARIANTS


@needs_four
class TestTensorsInStages(StrategyParity):
    strategy = "megatron"
    flags = ("--tp_size", "2", "--megatron.pp_size", "2")
    world_sizes = (4,)
    variants = FEW_VARIANTS


@needs_two
@pytest.mark.parametrize("layout", ["--megatron.pp_size 2", "--tp_size 2 --megatron.sequence_parallel True"])
def test_bfloat16(layout: str) -> None:
    """What bfloat16_ranks.py checks on gloo, with the kernels of a GPU."""
    flags = ["--strategy", "megatron", "--dtype", "bfloat16", *layout.split()]
    run_spmd(FOLDER / "bfloat16_ranks.py", *flags, world_size=2, timeout_s=300, cwd=FOLDER)


@needs_two
@pytest.mark.parametrize("layout", ["--megatron.pp_size 2", "--tp_size 2 --megatron.sequence_parallel True"])
def test_dictionaries_of_rows_and_steps_of_a_schedule(layout: str, tmp_path: Path) -> None:
    found = {}
    for name, world, flags in (("alone", 1, "--strategy single"), ("split", 2, f"--strategy megatron {layout}")):
        path = tmp_path / f"{name}.json"
        run_spmd(FOLDER / "rows_ranks.py", str(path), *flags.split(), world_size=world, timeout_s=300, cwd=FOLDER)
        found[name] = json.loads(path.read_text())
    for part in ("train", "eval", "scores", "steps"):
        assert_close(torch.tensor(found["split"][part]), torch.tensor(found["alone"][part]), atol=1e-4, rtol=1e-4)
