"""FSDP under the contract of all strategies; its options and four ranks train alike."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.testing import assert_close

from lightrl.config import StrategyOptions
from lightrl.models.policy import Policy, response_batch
from lightrl.strategy.fsdp import FSDPStrategy
from lightrl.testing import StrategyContract, StrategyParity
from lightrl.testing.strategy_parity import FEW_VARIANTS
from tests.programs.tiny_hybrids import tiny_model

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


@pytest.fixture
def alone() -> Iterator[FSDPStrategy]:
    strategy = FSDPStrategy(0, 0.0, 1, 1)
    strategy.setup_distributed()
    yield strategy
    strategy.close()


class OneBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(1, 1, bias=False)])
        nn.init.zeros_(self.blocks[0].weight)

    def forward(self, batch: Tensor) -> Tensor:
        result: Tensor = self.blocks[0](batch)
        return result


def test_a_buffer_that_modules_share_keeps_its_values_under_each_name(alone: FSDPStrategy) -> None:
    model, shared = OneBlock(), torch.arange(3.0)
    for name in ("first", "second"):
        model.register_buffer(name, shared, persistent=False)
    model.blocks[0].register_buffer("third", shared)
    buffers = dict(alone.prepare_model(model).named_buffers(remove_duplicate=False))
    assert {name: buffer.tolist() for name, buffer in buffers.items()} == {
        name: [0.0, 1.0, 2.0] for name in ("first", "second", "blocks.0.third")
    }


class NestedBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"only": nn.Linear(2, 2)})])


def test_blocks_in_lists_of_lists_are_units_and_the_lists_are_none(alone: FSDPStrategy) -> None:
    model = alone.prepare_model(NestedBlocks())
    units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    assert units == ["", "stages.0.0"]  # what a dict holds is part of the root


def test_matrices_that_are_buffers_multiply_weights_in_bfloat16() -> None:
    """Those of MiniMax's linear attention stay in float32, which a product with bfloat16 does not take."""
    batch = response_batch([((5, 6, 7), tuple(range(8, 20)))])
    with torch.no_grad():
        exact = Policy(tiny_model("minimax"))(batch).logprobs
    strategy = FSDPStrategy(0, 0.0, 1, 1, StrategyOptions(dtype="bfloat16"))
    strategy.setup_distributed()
    model = strategy.prepare_model(Policy(tiny_model("minimax")))
    logprobs = model(batch).logprobs
    logprobs.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    strategy.close()
    assert_close(logprobs.detach(), exact, atol=0.05, rtol=0)
