"""FSDP under the contract of all strategies; its options and four ranks train alike."""

import pytest

from lightrl.testing import StrategyContract, StrategyParity
from lightrl.testing.strategy_parity import FEW_VARIANTS

pytestmark = pytest.mark.slow


class TestFSDP(StrategyContract):
    strategy = "fsdp"


class TestKeptWeightsAndCheckpointing(StrategyParity):
    strategy = "fsdp"
    flags = ("--fsdp.reshard_after_forward", "False", "--gradient_checkpointing", "True")
    world_sizes = (2,)
    variants = FEW_VARIANTS


class TestCpuOffload(StrategyParity):
    strategy = "fsdp"
    flags = ("--fsdp.cpu_offload", "True")
    world_sizes = (2,)
    variants = FEW_VARIANTS


class TestGradientsReducedInEachMicroBatch(StrategyParity):
    strategy = "fsdp"
    flags = ("--fsdp.reduce_each_micro_batch", "True")
    reduces_once = False
    world_sizes = (2,)
    variants = FEW_VARIANTS


class TestFourRanks(StrategyParity):
    strategy = "fsdp"
    world_sizes = (4,)
    variants = FEW_VARIANTS


class TestReplicas(StrategyParity):
    strategy = "fsdp"
    flags = ("--fsdp.replicate_size", "2")
    world_sizes = (4,)
    variants = FEW_VARIANTS


@pytest.mark.long
class TestTensorParallel(StrategyContract):
    strategy = "fsdp"
    flags = ("--tp_size", "2")
    world_sizes = (2,)


@pytest.mark.long
class TestSequenceParallel(StrategyContract):
    strategy = "fsdp"
    flags = ("--sp_size", "2")
    world_sizes = (2,)


@pytest.mark.long
class TestShardsOfTensorParallel(StrategyParity):
    strategy = "fsdp"
    flags = ("--tp_size", "2")
    world_sizes = (4,)
    variants = FEW_VARIANTS


@pytest.mark.long
class TestGroupsOfSequenceParallel(StrategyParity):
    strategy = "fsdp"
    flags = ("--sp_size", "2", "--gradient_checkpointing", "True")
    world_sizes = (4,)
    variants = FEW_VARIANTS


@pytest.mark.long
class TestTensorAndSequenceParallel(StrategyParity):
    strategy = "fsdp"
    flags = ("--sp_size", "2", "--tp_size", "2")
    world_sizes = (4,)
    variants = FEW_VARIANTS
