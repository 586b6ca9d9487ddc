"""FSDP under the contract of all strategies; its options and four ranks train alike."""

import pytest

from lightrl.testing import StrategyContract

pytestmark = pytest.mark.slow


class TestFSDP(StrategyContract):
    strategy = "fsdp"


class TestKeptWeightsAndCheckpointing(StrategyContract):
    strategy = "fsdp"
    flags = ("--fsdp.reshard_after_forward", "False", "--gradient_checkpointing", "True")
    world_sizes = (2,)
    only_parity = True


class TestCpuOffload(StrategyContract):
    strategy = "fsdp"
    flags = ("--fsdp.cpu_offload", "True")
    world_sizes = (2,)
    only_parity = True


class TestFourRanks(StrategyContract):
    strategy = "fsdp"
    world_sizes = (4,)
    only_parity = True


class TestReplicas(StrategyContract):
    strategy = "fsdp"
    flags = ("--fsdp.replicate_size", "2")
    world_sizes = (4,)
    only_parity = True
