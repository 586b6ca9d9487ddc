"""What keeps vLLM from changing the process that it lives in, without vLLM."""

import gc
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightrl.comm import Comm
from lightrl.engines.vllm import host
from lightrl.engines.vllm.host import (
    discard_pages,
    glob_escaped,
    process_state_kept,
    reloads_whole,
    set_defaults,
    shut_down,
    split_latent_attention,
)

CPU = torch.device("cpu")


def forbidden(_: int) -> None:
    raise AssertionError("set_num_threads was left forbidden")


def change_everything() -> None:
    with process_state_kept(Comm(), CPU):
        assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == "0"
        os.environ.update(LOCAL_WORLD_SIZE="1", LD_PRELOAD="lib.so", VLLM_LATER="1")
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        torch.set_num_threads = forbidden
        gc.freeze()
        raise OSError("out of memory")


def test_state_comes_back_even_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    states = random.getstate(), str(np.random.get_state()), torch.get_rng_state()
    with pytest.raises(OSError, match="out of memory"):
        change_everything()
    assert os.environ["LOCAL_WORLD_SIZE"] == "3"
    assert "LD_PRELOAD" not in os.environ
    assert "RANK" not in os.environ
    assert os.environ.pop("VLLM_LATER") == "1"  # its own, which it reads while it runs
    assert random.getstate() == states[0]
    assert str(np.random.get_state()) == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert gc.get_freeze_count() == 0
    torch.set_num_threads(torch.get_num_threads())


def test_pages_are_given_back_and_read_as_zeros() -> None:
    tensor = torch.ones(64 << 20, dtype=torch.uint8)
    storage = tensor.untyped_storage()
    before = resident_bytes()
    freed = discard_pages({storage.data_ptr(): storage})
    assert (64 << 20) - 2 * 4096 <= freed <= 64 << 20
    assert before - resident_bytes() > 60 << 20
    assert int(tensor[1 << 20]) == 0
    tensor.fill_(2)
    small = torch.ones(8).untyped_storage()
    assert discard_pages({small.data_ptr(): small}) == 0  # less than a page


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_name_is_matched_as_it_is() -> None:
    assert glob_escaped("job-tp:0-[0]*") == "job-tp:0-[[]0][*]"


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    monkeypatch.delenv("VLLM_NO_USAGE_STATS", raising=False)
    monkeypatch.delenv("VLLM_FLOAT32_MATMUL_PRECISION", raising=False)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    set_defaults(CPU)
    assert os.environ["VLLM_FLOAT32_MATMUL_PRECISION"] == "high"  # which vLLM would reset for the trainer, too
    assert os.environ["VLLM_LOGGING_LEVEL"] == "INFO"
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1"


class LatentAttention(nn.Module):
    kv_lora_rank = 4

    def __init__(self) -> None:
        super().__init__()
        self.kv_b_proj = nn.Linear(2, 2, bias=False)
        self.W_UV = nn.Parameter(torch.zeros(2, 2))

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        self.W_UV.data.copy_(self.kv_b_proj.weight.to(dtype))


class Experts(nn.Module):
    w13_weight = torch.zeros(1)


def loaded(layer: nn.Module, quantization: str | None = None) -> Any:
    config = SimpleNamespace(quantization=quantization)
    return SimpleNamespace(
        apply_model=lambda work: [work(nn.Sequential(nn.Linear(2, 2), layer))],
        llm_engine=SimpleNamespace(model_config=config),
    )


def test_a_model_whose_kernels_read_what_a_load_in_place_does_not_reach_is_reloaded() -> None:
    assert reloads_whole(loaded(Experts()))
    assert reloads_whole(loaded(LatentAttention()))
    assert reloads_whole(loaded(nn.Identity(), quantization="fp8"))
    assert not reloads_whole(loaded(nn.Identity()))


def test_the_parts_of_latent_attention_follow_a_load_in_place() -> None:
    model = nn.ModuleDict({"attn": LatentAttention(), "mlp": nn.Linear(2, 2)})
    assert split_latent_attention(model) == {"attn.W_UV"}
    assert torch.equal(model["attn"].W_UV, model["attn"].kv_b_proj.weight)


def test_the_end_of_an_engine_leaves_the_process_groups_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    def end(part: str) -> SimpleNamespace:
        return SimpleNamespace(shutdown=lambda: ended.append(part))

    monkeypatch.setattr(host, "keep_allocators", lambda: None)
    executor = end("executor and groups")  # what vLLM's executor does from 0.33 on
    executor.driver_worker = end("worker")
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=end("scheduler")))
    shut_down(SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core, model_executor=executor)))
    assert ended == ["scheduler", "worker"]
