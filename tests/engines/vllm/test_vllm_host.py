"""What keeps vLLM from changing the process that it lives in, without vLLM."""

import gc
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from lightrl.comm import Comm
from lightrl.engines.vllm.host import (
    discard_pages,
    glob_escaped,
    process_state_kept,
    set_defaults,
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
