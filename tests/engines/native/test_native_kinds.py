"""Which engine the options of --native.* ask for."""

from __future__ import annotations

import shutil

import pytest
import torch

from lightrl.config import NativeEngineConfig
from lightrl.engines.native.eager import EagerEngine
from lightrl.engines.native.engine import NativeEngine
from lightrl.engines.native.kernels import KernelForward
from lightrl.engines.native.kinds import kind_of
from lightrl.engines.native.lookup import LookupEngine

SETTINGS = {"eos_token_ids": [7], "device": torch.device("cpu")}


def test_each_option_has_its_kind(tiny_model):
    source = tiny_model("qwen3")
    assert kind_of(NativeEngineConfig(), source) is NativeEngine
    assert kind_of(NativeEngineConfig(cuda_graphs=False), source) is EagerEngine
    guessing = kind_of(NativeEngineConfig(lookup=3), source)(tiny_model("qwen3"), **SETTINGS)
    assert isinstance(guessing, LookupEngine)


def test_a_kind_that_another_option_needs_comes_first(tiny_model):
    class Other(NativeEngine):
        pass

    assert kind_of(NativeEngineConfig(cuda_graphs=False), tiny_model("qwen3"), Other) is Other


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_kernels_go_with_any_kind(tiny_model):
    make = kind_of(NativeEngineConfig(cpu_kernels=True, cuda_graphs=False), tiny_model("qwen3"))
    engine = make(tiny_model("qwen3"), **SETTINGS)
    assert isinstance(engine, EagerEngine)
    assert isinstance(engine._runner._fused, KernelForward)
