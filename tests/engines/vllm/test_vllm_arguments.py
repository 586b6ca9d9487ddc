"""The arguments of vllm.LLM(), without vLLM."""

from typing import Any

import pytest
import torch
import transformers

from lightrl.config import StrategyOptions
from lightrl.engines.vllm.arguments import llm_arguments, user_arguments
from lightrl.engines.vllm.build import check_model_type, check_recurrent_layers, rotate_in_torch

KNOWN = {"dtype", "gpu_memory_utilization", "kv_cache_memory_bytes", "load_format", "logprobs_mode", "max_num_seqs"}


def test_unknown_and_reserved_arguments_are_refused_by_name() -> None:
    options = StrategyOptions(engine_args=("max_num_seqs=3", "kv_cache_memory_bytes=1048576"))
    assert user_arguments(options, KNOWN) == {"max_num_seqs": 3, "kv_cache_memory_bytes": 1 << 20}
    for given, text in (
        ("max_num_sequences=3", "vLLM has no such argument. Did you mean max_num_seqs"),
        ("gpu_memory_utilization=0.5", "use --engine_mem_fraction"),
        ("dtype=half", "use --dtype"),
        ("load_format=auto", "the engine decides it"),
        ("logprobs_mode=raw_logprobs", "the engine decides it"),
    ):
        with pytest.raises(ValueError, match=text):
            user_arguments(StrategyOptions(engine_args=(given,)), KNOWN)


def test_arguments_of_a_cpu_and_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightrl.engines.vllm.arguments.known_arguments", lambda: KNOWN)
    options = StrategyOptions(engine_mem_fraction=0.3, dtype="bfloat16", engine_args=("max_num_seqs=7",))
    shared = {"model": "m", "tp_size": 2, "is_distributed": True, "takes_media": False}
    cpu = llm_arguments(options, device=torch.device("cpu"), **shared)
    gpu = llm_arguments(options, device=torch.device("cuda", 0), **shared)
    for arguments in (cpu, gpu):
        assert arguments["logprobs_mode"] == "processed_logprobs"
        assert arguments["load_format"] == "dummy"
        assert arguments["distributed_executor_backend"] == "external_launcher"
        assert arguments["tensor_parallel_size"] == 2
        assert arguments["max_num_seqs"] == 7  # the user's, over ours
        assert arguments["dtype"] == "bfloat16"
        assert arguments["max_model_len"] == -1  # as much of the context as fits
    assert cpu["kv_cache_memory_bytes"] == 256 << 20
    assert "enable_sleep_mode" not in cpu
    assert (gpu["gpu_memory_utilization"], gpu["enable_sleep_mode"]) == (0.3, True)
    assert "kv_cache_memory_bytes" not in gpu
    alone = llm_arguments(
        options, device=torch.device("cpu"), model="m", tp_size=1, is_distributed=False, takes_media=True
    )
    assert "distributed_executor_backend" not in alone
    assert alone["limit_mm_per_prompt"]["image"] > 1
    assert alone["skip_tokenizer_init"] is False
    endless = llm_arguments(options, device=torch.device("cpu"), **shared, states_context=False)
    assert "max_model_len" not in endless  # vLLM cannot fit what the config does not state


@pytest.mark.parametrize("kind", [transformers.Qwen3NextConfig, transformers.Qwen3_5TextConfig])
def test_linear_attention_in_float32_on_a_cpu_is_refused_before_the_engine_is_made(kind: Any) -> None:
    check_recurrent_layers(kind(), "bfloat16")
    with pytest.raises(ValueError, match="in bfloat16 only, and --dtype is float32. Use --dtype bfloat16"):
        check_recurrent_layers(kind(), "float32")
    check_recurrent_layers(kind(num_hidden_layers=1, layer_types=["full_attention"]), "float32")
    check_recurrent_layers(transformers.Qwen3Config(), "float32")


def test_a_type_that_vllm_computes_in_another_way_is_refused_before_the_engine_is_made() -> None:
    check_model_type("ernie4_5")
    with pytest.raises(ValueError, match="models of type 'ernie4_5_moe' as the trainer does.* --engine native"):
        check_model_type("ernie4_5_moe")


def test_only_latent_attention_computes_positions_in_torch_unless_engine_args_decide() -> None:
    decided: dict[str, Any] = {"compilation_config": {"custom_ops": ["all"]}}
    arguments: dict[str, Any] = {}
    rotate_in_torch(transformers.Qwen3Config(), arguments)
    assert arguments == {}
    rotate_in_torch(transformers.DeepseekV3Config(), arguments)
    assert arguments == {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
    rotate_in_torch(transformers.DeepseekV3Config(), decided)
    assert decided == {"compilation_config": {"custom_ops": ["all"]}}
