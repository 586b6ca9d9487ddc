"""Adapters of --lora.others: what is read of peft's files, and what is refused before a run starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, GPT2Config

from lightrl.models.saved_adapters import layers_of_saved, read_saved_adapters
from lightrl.testing.tiny_training import tiny_policy

peft = pytest.importorskip("peft")
others = pytest.importorskip("other_adapters")

FIRST = "base_model.model.model.layers.0.self_attn"
V_PROJ = "base_model.model.model.layers.1.self_attn.v_proj"
GPT2 = GPT2Config(vocab_size=53, n_embd=16, n_layer=2, n_head=2, n_positions=64)


def empty() -> Any:
    return tiny_policy(device="meta").hf


def refused(folder: str, model: Any = None) -> str:
    with pytest.raises(ValueError, match=r"--lora\.others rival=") as caught:
        read_saved_adapters({"rival": folder}, model or empty())
    return str(caught.value)


def change(folder: str, **settings: Any) -> None:
    file = Path(folder) / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


def replace_tensors(folder: str, changed: dict[str, Tensor], without: tuple[str, ...] = ()) -> None:
    file = Path(folder) / "adapter_model.safetensors"
    save_file({name: item for name, item in {**load_file(file), **changed}.items() if name not in without}, file)


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({"rank": 4, "lora_alpha": 3}, 3 / 4),
        ({"rank": 4, "lora_alpha": 3, "use_rslora": True}, 3 / 2),
        ({"rank": 2, "lora_alpha": 3, "rank_pattern": {"v_proj": 4}, "alpha_pattern": {"v_proj": 8}}, 8 / 4),
    ],
)
def test_the_scale_is_in_the_second_factor(tmp_path: Path, settings: dict[str, Any], scale: float) -> None:
    folder = others.save_adapter(tiny_policy().hf, tmp_path, **settings)
    other = read_saved_adapters({"rival": folder}, empty())["rival"]
    saved = load_file(tmp_path / "adapter_model.safetensors")
    down, up = other.factors["model.layers.1.self_attn.v_proj"]
    assert_close(down, saved[f"{V_PROJ}.lora_A.weight"])
    assert_close(up, scale * saved[f"{V_PROJ}.lora_B.weight"])
    assert len(other.factors) == 2 * 7
    assert other.rank == 4


def test_layers_that_keep_their_weight_transposed_have_factors_like_others(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(GPT2)
    folder = others.save_adapter(model, tmp_path, rank=2, targets=["c_attn"])
    with torch.device("meta"):
        bare = AutoModelForCausalLM.from_config(GPT2)
    down, up = read_saved_adapters({"rival": folder}, bare)["rival"].factors["transformer.h.0.attn.c_attn"]
    assert (tuple(down.shape), tuple(up.shape)) == ((2, 16), (48, 2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "uses DoRA or trains biases"),
        ({"bias": "all"}, "uses DoRA or trains biases"),
        ({"modules_to_save": ["embed_tokens"]}, "asks for modules_to_save, which is not applied here"),
        ({"trainable_token_indices": [3]}, "asks for trainable_token_indices"),
        ({"target_parameters": ["experts.down_proj"]}, "asks for target_parameters"),
        ({"layer_replication": [[0, 2], [0, 2]]}, "asks for layer_replication"),
        ({"alora_invocation_tokens": [5, 6]}, "asks for alora_invocation_tokens"),
        ({"init_lora_weights": "pissa"}, "began with init_lora_weights pissa, which changed the weights"),
        ({"target_modules": ["c_attn"]}, "does not fit the model: Target modules"),
        ({"target_modules": ["embed_tokens"]}, "names model.embed_tokens, and only linear layers"),
        ({"target_modules": ["q_proj"]}, f"unknown {FIRST}.v_proj.lora_A.weight"),
        (
            {"target_modules": ["q_proj", "v_proj", "o_proj"]},
            "missing base_model.model.model.layers.0.self_attn.o_proj",
        ),
        (
            {"r": 4},
            "misshapen base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight (2, 35) instead of (4, 35)",
        ),
    ],
)
def test_what_an_engine_would_not_apply_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    folder = others.save_adapter(tiny_policy().hf, tmp_path, rank=2, targets=others.ATTENTION)
    read_saved_adapters({"rival": folder}, empty())
    change(folder, **settings)
    assert message in refused(folder)


def test_the_output_head_is_refused(tmp_path: Path) -> None:
    folder = others.save_adapter(tiny_policy().hf, tmp_path, rank=2, targets=["lm_head"])
    assert "names lm_head, and only linear layers" in refused(folder)


def test_faults_of_the_file_are_named(tmp_path: Path) -> None:
    folder = others.save_adapter(tiny_policy().hf, tmp_path, rank=2, targets=others.ATTENTION)
    up = f"{V_PROJ}.lora_B.weight"
    replace_tensors(folder, {"base_model.model.model.norm.weight": torch.ones(35)}, without=(up,))
    assert f"missing {up}; unknown base_model.model.model.norm.weight." in refused(folder)
    others.save_adapter(tiny_policy().hf, tmp_path, rank=2, targets=others.ATTENTION)
    replace_tensors(folder, {up: torch.full((16, 2), float("nan"))})
    assert "model.layers.1.self_attn.v_proj has values that are no numbers" in refused(folder)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"short")
    assert "adapter_model.safetensors cannot be read" in refused(folder)


def test_a_folder_without_safe_weights_is_refused(tmp_path: Path) -> None:
    folder = others.save_adapter(tiny_policy().hf, tmp_path, rank=2)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(FileNotFoundError, match=r"--lora\.others rival=.* it has no adapter_model\.safetensors"):
        read_saved_adapters({"rival": folder}, empty())
    with pytest.raises(FileNotFoundError, match=r"it has no adapter_config\.json"):
        read_saved_adapters({"rival": str(tmp_path / "nowhere")}, empty())


def test_the_check_names_the_layers_and_reads_no_weights(tmp_path: Path) -> None:
    folder = others.save_adapter(tiny_policy().hf, tmp_path, rank=2, targets=["v_proj"])
    layers = [f"model.layers.{index}.self_attn.v_proj" for index in range(2)]
    assert layers_of_saved({"rival": folder}, empty()) == {"rival": layers}
    with torch.device("meta"):
        other = AutoModelForCausalLM.from_config(GPT2)
    with pytest.raises(ValueError, match="does not fit the model"):
        layers_of_saved({"rival": folder}, other)
