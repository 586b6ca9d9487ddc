"""A guest's changes to this process are put back; what needs SGLang itself is in real_sglang/."""

import gc
import logging
import multiprocessing
import os
import random

import torch

from lightrl.engines.sglang.process import kept_state


def test_what_the_guest_changes_is_put_back(monkeypatch):
    monkeypatch.setenv("LIGHTRL_TEST_OLD", "1")
    root = logging.getLogger()
    handlers, level, threshold = list(root.handlers), root.level, gc.get_threshold()
    method = multiprocessing.get_start_method(allow_none=True)
    draws, torch_draws = random.getstate(), torch.get_rng_state()
    environment = {name: value for name, value in os.environ.items() if name != "LIGHTRL_TEST_OLD"}
    with kept_state({**environment, "LIGHTRL_TEST_NEW": "2"}):
        assert "LIGHTRL_TEST_OLD" not in os.environ
        assert os.environ["LIGHTRL_TEST_NEW"] == "2"
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
        logging.basicConfig(level=logging.ERROR, force=True)
        multiprocessing.set_start_method("spawn", force=True)
        gc.set_threshold(1)
        random.random()
        torch.rand(1)
    assert os.environ["LIGHTRL_TEST_OLD"] == "1"
    assert "LIGHTRL_TEST_NEW" not in os.environ
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ
    assert (root.handlers, root.level, gc.get_threshold()) == (handlers, level, threshold)
    assert multiprocessing.get_start_method(allow_none=True) == method
    assert random.getstate() == draws
    assert torch.equal(torch.get_rng_state(), torch_draws)
