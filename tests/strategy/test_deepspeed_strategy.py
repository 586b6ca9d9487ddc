"""DeepSpeed at every stage under the contract of all strategies, and what only it has."""

import importlib.util
import os
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from lightrl.config import DeepSpeedConfig, GRPOConfig, StrategyOptions
from lightrl.strategy import create_strategy, strategy_class
from lightrl.strategy.deepspeed import load_deepspeed
from lightrl.testing import StrategyContract, StrategyParity, run_spmd
from lightrl.testing.strategy_parity import FEW_VARIANTS

PROGRAM = Path(__file__).parents[1] / "programs" / "deepspeed_program.py"
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason='needs DeepSpeed: pip install "lightrl[deepspeed]"'
)
SHARD_EVERYTHING = ("--deepspeed.param_persistence_threshold", "0")  # the tiny model has small parameters only
IN_HOST_MEMORY = ("--deepspeed.offload_optimizer", "True")


@needs_deepspeed
@pytest.mark.engine
@pytest.mark.slow
class TestZero0(StrategyContract):
    strategy = "deepspeed"
    flags = ("--deepspeed.zero_stage", "0")
    world_sizes = (3,)


@needs_deepspeed
@pytest.mark.engine
@pytest.mark.slow
class TestZero1(StrategyContract):
    strategy = "deepspeed"
    flags = ("--deepspeed.zero_stage", "1")


@needs_deepspeed
@pytest.mark.engine
@pytest.mark.slow
class TestZero2(StrategyContract):
    strategy = "deepspeed"
    flags = ("--deepspeed.zero_stage", "2")
    world_sizes = (3,)
    reduces_once = False


@needs_deepspeed
@pytest.mark.engine
@pytest.mark.slow
class TestZero3(StrategyContract):
    strategy = "deepspeed"
    flags = ("--deepspeed.zero_stage", "3", *SHARD_EVERYTHING)
    world_sizes = (3,)
    reduces_once = False


@needs_deepspeed
@pytest.mark.engine
@pytest.mark.slow
class TestZero2InHostMemory(StrategyContract):
    strategy = "deepspeed"
    flags = ("--deepspeed.zero_stage", "2", *IN_HOST_MEMORY)
    world_sizes = (2,)
    reduces_once = False


@needs_deepspeed
@pytest.mark.engine
@pytest.mark.slow
class TestZero3InHostMemory(StrategyContract):
    strategy = "deepspeed"
    flags = ("--deepspeed.zero_stage", "3", "--deepspeed.offload_param", "True", *IN_HOST_MEMORY, *SHARD_EVERYTHING)
    world_sizes = (3,)
    reduces_once = False


@needs_deepspeed
@pytest.mark.engine
@pytest.mark.slow
class TestZero3Checkpointed(StrategyParity):
    strategy = "deepspeed"
    flags = ("--deepspeed.zero_stage", "3", "--gradient_checkpointing", "True", *SHARD_EVERYTHING)
    world_sizes = (2,)
    variants = FEW_VARIANTS


@needs_deepspeed
@pytest.mark.engine
@pytest.mark.slow
def test_sharding_bfloat16_warmup_and_frozen_models(tmp_path: Path) -> None:
    assert run_spmd(PROGRAM, str(tmp_path), world_size=2, timeout_s=200).count("all checked") == 2


def test_without_deepspeed_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install "lightrl\[deepspeed\]"'):
        create_strategy(GRPOConfig(strategy="deepspeed"))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"zero_stage": 2, "offload_param": True}, "offload_param needs --deepspeed.zero_stage 3, not 2"),
        ({"zero_stage": 0, "offload_optimizer": True}, "offload_optimizer needs --deepspeed.zero_stage 1, 2 or 3"),
        ({"zero_stage": 4}, "choose one of 0, 1, 2, 3"),
        ({"bucket_mb": 0}, "bucket_mb is 0: it must be at least 1"),
        (
            {"zero_stage": 1, "param_persistence_threshold": -1},
            "param_persistence_threshold is -1: it must be 0 or above",
        ),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(settings: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        GRPOConfig(strategy="deepspeed", deepspeed=DeepSpeedConfig(**settings))
    with pytest.raises(ValueError, match=text):  # a Namespace or dict passes by the checks of GRPOConfig
        strategy_class("deepspeed")(0, 1.0, 1, 1, StrategyOptions.from_args({"deepspeed": settings}))


def test_deepspeed_takes_the_gpu_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes GPU LOCAL_RANK the current one; where a launcher sets only RANK, that would be the first for all."""
    package = MagicMock()
    monkeypatch.setitem(sys.modules, "deepspeed", package)
    monkeypatch.setattr(os, "environ", {"RANK": "3"})
    assert load_deepspeed(torch.device("cuda", 3)) is package
    assert os.environ == {"RANK": "3", "LOCAL_RANK": "3", "DS_ACCELERATOR": "cuda"}
    package.init_distributed.assert_called_once_with(dist_backend="nccl", auto_mpi_discovery=False)
    os.environ["LOCAL_RANK"] = "1"
    load_deepspeed(torch.device("cuda", 1))
    assert os.environ["LOCAL_RANK"] == "1"
