"""Ranks with a GPU each, over NCCL, train as plain PyTorch does; without two devices, all of it is skipped."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from lightrl.testing import StrategyContract, StrategyParity, run_spmd
from lightrl.testing.strategy_parity import FEW_VARIANTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices; torch sees fewer here"),
]
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason='needs DeepSpeed: pip install "lightrl[deepspeed]"'
)
needs_four = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA devices")


class TestDdp(StrategyContract):
    strategy = "ddp"
    world_sizes = (2,)


class TestFsdp(StrategyContract):
    strategy = "fsdp"
    world_sizes = (2,)


class TestShardsInPinnedMemory(StrategyParity):
    """Gradients are copied to the host while the backward runs, and their norm is reduced over gloo."""

    strategy = "fsdp"
    flags = ("--fsdp.cpu_offload", "True")
    world_sizes = (2,)
    variants = FEW_VARIANTS


class TestSplitMatrices(StrategyContract):
    strategy = "fsdp"
    flags = ("--tp_size", "2")
    world_sizes = (2,)


class TestSplitTokens(StrategyContract):
    strategy = "fsdp"
    flags = ("--sp_size", "2")
    world_sizes = (2,)


@needs_four
class TestReplicas(StrategyParity):
    strategy = "fsdp"
    flags = ("--fsdp.replicate_size", "2")
    world_sizes = (4,)
    variants = FEW_VARIANTS


@needs_four
class TestSplitMatricesAndTokens(StrategyParity):
    strategy = "fsdp"
    flags = ("--tp_size", "2", "--sp_size", "2")
    world_sizes = (4,)
    variants = FEW_VARIANTS


@needs_deepspeed
class TestZero2(StrategyContract):
    strategy = "deepspeed"
    flags = ("--deepspeed.zero_stage", "2")
    world_sizes = (2,)
    reduces_once = False


@needs_deepspeed
class TestZero3(StrategyContract):
    """All parameters are partitioned, which DeepSpeed does not do to small ones."""

    strategy = "deepspeed"
    flags = ("--deepspeed.zero_stage", "3", "--deepspeed.param_persistence_threshold", "0")
    world_sizes = (2,)
    reduces_once = False


@needs_deepspeed
class TestZeroWithStatesInPinnedMemory(StrategyParity):
    strategy = "deepspeed"
    flags = ("--deepspeed.zero_stage", "2", "--deepspeed.offload_optimizer", "True")
    world_sizes = (2,)
    reduces_once = False
    variants = FEW_VARIANTS


@needs_four
def test_a_process_can_join_a_second_world_with_meshes(tmp_path: Path) -> None:
    """torch 2.13 crashes there if the groups of a mesh are made by splitting that of all ranks."""
    program = tmp_path / "worlds.py"
    program.write_text(
        """
import torch

from lightrl.config import GRPOConfig, parse_config
from lightrl.strategy import create_strategy

for turn in range(2):
    strategy = create_strategy(parse_config(GRPOConfig, ["--strategy", "fsdp", "--tp_size", "2"]))
    strategy.setup_distributed()
    ones = torch.ones(1, device=strategy.device)
    torch.distributed.all_reduce(ones, group=strategy.meshes.tensors.get_group())
    torch.distributed.all_reduce(ones.cpu(), group=strategy.meshes.tensors.get_group())
    assert ones.item() == 2
    strategy.close()
print("joined twice", flush=True)
"""
    )
    assert "joined twice" in run_spmd(program, world_size=4, timeout_s=200)
