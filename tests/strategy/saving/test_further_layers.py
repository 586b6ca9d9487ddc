"""Folders of saved models: their configs state layers for further tokens only with their weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from torch import nn

from lightrl.models.policy import load_policy
from lightrl.strategy.saving.state_files import complete_folder
from lightrl.strategy.torch_native import SingleStrategy
from tests.programs.tiny_moe import CONFIGS, NUM_EXPERTS, SHAPE


@pytest.mark.parametrize("stated", [None, 0, 2])
def test_a_saved_model_states_no_layers_that_it_was_loaded_without(stated: int | None, tmp_path: Path) -> None:
    config = CONFIGS["deepseek_v3"]()
    if stated is not None:
        config.num_nextn_predict_layers = stated
    assert saved_config(config, tmp_path)["num_nextn_predict_layers"] == 0
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)[1]
    assert not any(again.values())


def test_the_number_of_another_family_or_inside_a_section_is_known_too(tmp_path: Path) -> None:
    experts = {"num_experts": NUM_EXPERTS, "moe_intermediate_size": 16}
    config = transformers.Qwen3MoeConfig(**SHAPE, **experts, mtp_num_hidden_layers=1)
    assert saved_config(config, tmp_path)["mtp_num_hidden_layers"] == 0
    file = tmp_path / "config.json"
    file.write_text('{"text_config": {"num_mtp_layers": 12}, "num_hidden_layers": 3}')
    complete_folder(nn.Module(), tmp_path, ["model.layers.0.mlp.weight"])
    assert json.loads(file.read_text()) == {"text_config": {"num_mtp_layers": 0}, "num_hidden_layers": 3}


@pytest.mark.parametrize("name", ["model.mtp_layers.0.input_proj.weight", "model.layers.61.eh_proj.weight"])
def test_layers_whose_weights_are_saved_stay_stated(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_nextn_predict_layers": 1}')
    complete_folder(nn.Module(), tmp_path, ["lm_head.weight", name])
    assert json.loads((tmp_path / "config.json").read_text()) == {"num_nextn_predict_layers": 1}


def saved_config(config: transformers.PreTrainedConfig, tmp_path: Path) -> dict[str, Any]:
    """Returns the config of a model that was loaded and saved as in a run."""
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    policy = load_policy(str(tmp_path / "model"), materialize=True)
    SingleStrategy(0, 0.0, 1, 1).save_pretrained(policy, tmp_path / "saved")
    read: dict[str, Any] = json.loads((tmp_path / "saved/config.json").read_text())
    return read
