"""What engines read off a model: end tokens, architecture, folder."""

import json
import re
from pathlib import Path

import pytest
import torch
from tiny_engine_models import TEXT_FAMILIES, save_tiny_model
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3_5Config, Qwen3Config, Qwen3ForCausalLM

from lightrl.engines.base import architecture_of, eos_ids, model_folder, skeleton

SHAPE = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}


def tiny() -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, **HEADS, eos_token_id=2, tie_word_embeddings=True))


def test_eos_ids_collects_every_source() -> None:
    class Tokenizer:
        eos_token_id = 9

    model = tiny()
    model.generation_config = GenerationConfig(eos_token_id=[7, 2])
    assert eos_ids(model, Tokenizer()) == (2, 7, 9)
    assert eos_ids(model) == (2, 7)
    model.config.eos_token_id = None
    model.generation_config = None
    assert eos_ids(model) == ()


@pytest.mark.parametrize("value", ["</s>", [2, "</s>"], [2, None], 2.0])
def test_an_end_token_that_is_no_id_is_told(value: object) -> None:
    model = tiny()
    model.generation_config = GenerationConfig(eos_token_id=value)
    with pytest.raises(ValueError, match=f"GenerationConfig is {re.escape(repr(value))}. It must be a token id"):
        eos_ids(model)


def test_the_architecture_is_that_of_the_class_before_it_was_sharded() -> None:
    model = tiny()
    model.__class__ = type("FSDPQwen3ForCausalLM", (type(model),), {"unshard": None})  # as fully_shard() leaves it
    assert architecture_of(model) == "Qwen3ForCausalLM"
    bare = skeleton(model)
    assert type(bare) is Qwen3ForCausalLM
    assert all(parameter.device == torch.device("meta") for parameter in bare.parameters())
    assert bare.lm_head.weight is bare.model.embed_tokens.weight


def test_the_folder_that_the_model_came_from_or_one_with_its_config(tmp_path: Path) -> None:
    folder = save_tiny_model("tied", tmp_path / "model")
    source = AutoModelForCausalLM.from_pretrained(folder)
    scratch = tmp_path / "scratch"
    assert model_folder(source, None, scratch) == folder
    source.name_or_path = "org/some-model"
    assert model_folder(source, None, scratch) == "org/some-model"
    assert not scratch.exists()
    made = AutoModelForCausalLM.from_config(TEXT_FAMILIES["untied"]())
    made.__class__ = type("FSDPQwen2ForCausalLM", (type(made),), {"unshard": None})  # as fully_shard() leaves it
    for name in ("", str(tmp_path / "gone")):
        made.name_or_path = name
        assert model_folder(made, None, scratch) == str(scratch)
        assert json.loads((scratch / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]


def test_the_language_model_of_a_larger_model_is_described_by_itself(tmp_path: Path) -> None:
    part = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "vocab_size": 16, "hidden_size": 8}
    whole = Qwen3_5Config(text_config=part | {"intermediate_size": 8, "num_attention_heads": 1, "head_dim": 8})
    whole.save_pretrained(tmp_path / "whole")
    source = AutoModelForCausalLM.from_config(whole)
    source.name_or_path = str(tmp_path / "whole")
    scratch = tmp_path / "scratch"
    assert model_folder(source, None, scratch) == str(scratch)
    described = json.loads((scratch / "config.json").read_text())
    assert (described["architectures"], described["model_type"]) == (["Qwen3_5ForCausalLM"], "qwen3_5_text")
    changed = json.loads((tmp_path / "whole/config.json").read_text()) | {"text_config": None}
    (tmp_path / "whole/config.json").write_text(json.dumps(changed))
    assert model_folder(source, None, scratch) == source.name_or_path
