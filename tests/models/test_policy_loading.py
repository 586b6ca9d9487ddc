import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_vlm import tiny_config
from torch.testing import assert_close

from lightrl.builtin.model import tiny_model
from lightrl.models.critic import load_critic
from lightrl.models.policy import (
    check_model_folder,
    load_config,
    load_policy,
    load_tokenizer,
    model_loader,
    stated_context,
)
from lightrl.models.reward_model import load_reward_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("model")
    model, tokenizer = tiny_model()
    model.generation_config.eos_token_id = [1, 5]
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def test_every_rank_gets_the_same_model_but_one_without_weights(folder: str) -> None:
    real, empty = load_policy(folder, materialize=True), load_policy(folder, materialize=False)
    assert [(n, p.shape) for n, p in real.named_parameters()] == [(n, p.shape) for n, p in empty.named_parameters()]
    assert all(p.is_meta for p in empty.parameters())
    assert empty.hf.lm_head.weight is empty.hf.model.embed_tokens.weight
    assert empty.hf.generation_config.eos_token_id == real.hf.generation_config.eos_token_id == [1, 5]
    source, _ = tiny_model()
    for name, parameter in source.named_parameters():
        assert_close(dict(real.hf.named_parameters())[name].detach(), parameter.detach(), atol=0, rtol=0)
        assert parameter.dtype == torch.float32


SIZES = {"hidden_size": 16, "intermediate_size": 16, "head_dim": 4, "num_attention_heads": 4, "vocab_size": 64}
FROZEN = {  # parameters that the class freezes: from_pretrained() keeps those of the second alone as they are
    "afmoe": transformers.AfmoeConfig(
        **SIZES, num_hidden_layers=2, num_dense_layers=1, num_experts=4, moe_intermediate_size=8
    ),
    "hrm_text": transformers.HrmTextConfig(**SIZES, num_hidden_layers=2),
}


@pytest.mark.parametrize("name", FROZEN)
def test_every_rank_trains_the_same_parameters(name: str, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_config(FROZEN[name])
    assert not all(parameter.requires_grad for parameter in model.parameters())
    model.save_pretrained(tmp_path)
    for load in (load_policy, partial(load_critic, init_std=0.0, seed=0)):
        real, empty = (load(str(tmp_path), materialize=materialize) for materialize in (True, False))
        flags = [[(name, p.requires_grad) for name, p in one.named_parameters()] for one in (real, empty)]
        assert flags[0] == flags[1]


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own_code"


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig

    def _init_weights(self, module):
        if hasattr(module, "weight"):
            module.weight.data.normal_(0, float(module.weight.abs().max()))
            module.weight.requires_grad_(False)
"""


def test_code_of_a_model_that_reads_values_loads_on_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    tiny_model()[0].save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "own_code"}
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(OWN_CODE)
    real, empty = (load_policy(str(tmp_path), materialize=here, trust_remote_code=True) for here in (True, False))
    for one in (real, empty):
        assert all(parameter.requires_grad for parameter in one.parameters())


def test_a_saved_model_keeps_whether_it_generates_with_a_cache(folder: str, tmp_path: Path) -> None:
    policy, tokenizer = load_policy(folder, materialize=True), load_tokenizer(folder)
    critic = load_critic(folder, materialize=True, init_std=0.0, seed=0)
    reward_model = load_reward_model(folder, tokenizer, materialize=True, seed=0)
    policy.hf.save_pretrained(tmp_path / "policy")
    critic.save_pretrained(tmp_path / "critic", critic.state_dict())
    reward_model.hf.save_pretrained(tmp_path / "reward")
    assert [json.loads((path / "config.json").read_text())["use_cache"] for path in tmp_path.iterdir()] == [True] * 3


def test_a_reference_is_no_actor(folder: str) -> None:
    assert load_policy(folder, materialize=True).is_actor
    reference = load_policy(folder, materialize=True, is_reference=True)
    assert not reference.is_actor
    assert not reference.entropy


def test_tokenizer_and_context(folder: str) -> None:
    assert load_tokenizer(folder)("1+1=")["input_ids"] == [3, 12, 3, 13]
    assert stated_context(load_config(folder)) == tiny_model()[0].config.max_position_embeddings


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            256,
        ),  # 4 x 64, as in Qwen's files
        ({"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 64}, 80),
        ({"rope_type": "linear", "factor": 4.0}, 80),
        (None, 80),
    ],
)
def test_yarn_extends_the_context(rope: dict[str, Any] | None, context: int) -> None:
    config = transformers.Qwen2Config(max_position_embeddings=80, rope_parameters=rope)
    assert stated_context(config) == context


def test_what_a_model_folder_lacks_is_told(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_model_folder(folder)
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        check_model_folder(str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match=r"--model runs/sums/fina: there is no such folder\.$"):
        check_model_folder("runs/sums/fina")
    monkeypatch.setenv("HOME", str(Path(folder).parent))
    with pytest.raises(FileNotFoundError, match=r"there is no such folder\. Write out ~"):
        check_model_folder(f"~/{Path(folder).name}")
    with pytest.raises(FileNotFoundError, match="no config.json"):
        check_model_folder(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="It holds an adapter: give the model that it belongs to"):
        check_model_folder(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="no tokenizer"):
        check_model_folder(str(tmp_path))
    for name in ("", "builtin:subtraction"):
        with pytest.raises(ValueError, match="neither a folder nor a Hugging Face name"):
            check_model_folder(name)


def test_damaged_weights_are_told(folder: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    with (copy / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(ValueError, match="its weights cannot be read"):
        load_policy(str(copy), materialize=True)


def test_quantised_weights_are_told(folder: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    quantised = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(
        json.dumps({**config, "quantization_config": quantised | {"config_groups": groups, "ignore": ["lm_head"]}})
    )
    packed: dict[str, torch.Tensor] = {}
    for name, value in load_file(copy / "model.safetensors").items():
        if not name.endswith("proj.weight"):
            packed[name] = value
            continue
        packed[f"{name}_packed"] = torch.zeros(value.shape[0], -(-value.shape[1] // 4), dtype=torch.int32)
        packed |= {f"{name}_scale": torch.ones(value.shape[0], 1), f"{name}_shape": torch.tensor(value.shape)}
    save_file(packed, copy / "model.safetensors", metadata={"format": "pt"})
    tokenizer, told = load_tokenizer(str(copy)), "--model .* holds quantised weights"
    with pytest.raises(ValueError, match=told):
        load_policy(str(copy), materialize=True)
    with pytest.raises(ValueError, match=told):
        load_critic(str(copy), materialize=True, init_std=0.0, seed=0)
    with pytest.raises(ValueError, match=told):
        load_reward_model(str(copy), tokenizer, materialize=True, seed=0)
    (copy / "model.safetensors").unlink()  # what is refused needs no weights, on no rank
    for materialize in (True, False):
        with pytest.raises(ValueError, match=told):
            load_critic(str(copy), materialize=materialize, init_std=0.0, seed=0)


def with_generation_config(folder: str, copy: Path, **entries: object) -> str:
    shutil.copytree(folder, copy)
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, **entries}))
    return str(copy)


def test_a_generation_config_that_names_a_temperature_can_be_saved(folder: str, tmp_path: Path) -> None:
    model = load_policy(
        with_generation_config(folder, tmp_path / "copy", temperature=0.6, top_p=0.9), materialize=True
    ).hf
    model.save_pretrained(tmp_path / "saved")
    saved = transformers.GenerationConfig.from_pretrained(tmp_path / "saved")
    assert (saved.do_sample, saved.temperature, saved.top_p) == (True, 0.6, 0.9)


def test_a_generation_config_that_cannot_be_saved_is_told_before_the_run(folder: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--model .*: its generation config cannot be read .*length_penalty"):
        load_policy(with_generation_config(folder, tmp_path / "copy", length_penalty=2.0), materialize=True)
    sampling = with_generation_config(folder, tmp_path / "right", do_sample=False, temperature=1.0)
    assert load_policy(sampling, materialize=True).hf.generation_config.do_sample is False


def test_the_class_that_loads_a_model_follows_its_config() -> None:
    assert model_loader(transformers.Qwen3Config()) is transformers.AutoModelForCausalLM
    assert model_loader(tiny_config("qwen3_vl")) is transformers.AutoModelForImageTextToText
    with pytest.raises(
        ValueError, match="'llava' takes images in a way that lightrl does not know.* qwen2_5_vl, qwen3_vl"
    ):
        model_loader(transformers.LlavaConfig())
