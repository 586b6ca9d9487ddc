"""What sglang.Engine is given, without SGLang."""

import os
from dataclasses import replace

import pytest
import torch

from lightrl.config import StrategyOptions
from lightrl.engines.base import EngineGroup
from lightrl.engines.sglang.arguments import engine_seed, environment_for_start, server_arguments
from lightrl.engines.sglang.engine import build_sglang_engine

KNOWN = [
    "attention_backend",
    "context_length",
    "dtype",
    "enable_weights_cpu_backup",
    "load_format",
    "lora_paths",
    "max_loaded_loras",
    "max_lora_rank",
    "max_running_requests",
]


def arguments(*engine_args, is_cpu=True, context_length=512, **options):
    return server_arguments(
        replace(StrategyOptions(), engine_args=engine_args, **options),
        model_path="some/model",
        context_length=context_length,
        is_cpu=is_cpu,
        gpu=3,
        tp_size=2,
        random_seed=7,
        nccl_port=4242,
        known=KNOWN,
    )


def test_on_a_cpu():
    found = arguments(engine_mem_fraction=0.3)
    assert found["device"] == "cpu"
    assert found["base_gpu_id"] == 0  # it is taken for the number of a memory node
    assert found["attention_backend"] == "torch_native"
    assert found["enable_memory_saver"] is False
    assert found["max_total_tokens"] == 32_768
    assert (found["mem_fraction_static"], found["nccl_port"], found["random_seed"]) == (0.3, 4242, 7)
    assert found["load_format"] == "dummy"


def test_on_gpus():
    found = arguments(is_cpu=False, dtype="bfloat16")
    assert (found["device"], found["base_gpu_id"], found["tp_size"]) == ("cuda", 3, 2)
    assert found["enable_memory_saver"] is True
    assert found["dtype"] == "bfloat16"
    assert "attention_backend" not in found
    assert "max_total_tokens" not in found


def test_a_context_gets_the_places_that_sglang_keeps_for_itself():
    assert arguments()["context_length"] == 520
    assert arguments("context_length=100")["context_length"] == 108
    assert "context_length" not in arguments(context_length=None)


def test_given_arguments_win_over_defaults():
    found = arguments("attention_backend=triton", "max_running_requests=8", "enable_weights_cpu_backup=true")
    assert found["attention_backend"] == "triton"
    assert found["max_running_requests"] == 8
    assert found["enable_weights_cpu_backup"] is True


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("max_runing_requests=8", "no argument 'max_runing_requests'. Did you mean max_running_requests"),
        ("dtype=float16", "dtype is set by lightrl and cannot be given. Use --dtype."),
        ("max_lora_rank=64", "max_lora_rank is set by lightrl and cannot be given. Use --lora.rank."),
        ("lora_paths=a", "lora_paths is set by lightrl and cannot be given. Use --lora.others."),
        ("max_loaded_loras=2", "max_loaded_loras is set by lightrl and cannot be given."),
        ("load_format=auto", "load_format is set by lightrl and cannot be given."),
    ],
)
def test_unknown_arguments_and_ours_are_refused(given, text):
    with pytest.raises(ValueError, match=text):
        arguments(given)


def test_the_environment_of_the_start():
    ours = {
        "PATH": "p",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:64",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "SGLANG_VLM_CACHE_SIZE_MB": "100",
    }
    assert environment_for_start(ours, is_cpu=False, tp_size=2) == {
        "PATH": "p",
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64",
        "SGLANG_VLM_CACHE_SIZE_MB": "0",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }


def test_the_environment_of_the_start_on_a_cpu(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {5, 2})
    found = environment_for_start({}, is_cpu=True, tp_size=3)
    assert found["OMP_NUM_THREADS"] == "1"
    assert found["SGLANG_CPU_OMP_THREADS_BIND"] == "2|5|2"
    given = {"OMP_NUM_THREADS": "4", "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    assert given.items() <= environment_for_start(given, is_cpu=True, tp_size=2).items()
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in environment_for_start({}, is_cpu=True, tp_size=1)


def test_each_group_of_ranks_draws_by_itself():
    seeds = [engine_seed(5, rank, 2) for rank in range(4)]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
    assert engine_seed(6, 0, 2) != seeds[0]


def test_the_engine_needs_the_actor() -> None:
    with pytest.raises(
        ValueError, match=r"The sglang engine needs the actor.* the strategy's unwrap_model\(\) returned"
    ):
        build_sglang_engine(
            source=None, tokenizer=None, options=StrategyOptions(), device=torch.device("cpu"), group=EngineGroup()
        )
