"""One process under the contract of all strategies."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from lightrl.config import StrategyOptions
from lightrl.models.policy import load_policy
from lightrl.strategy.torch_native import SingleStrategy
from lightrl.testing import StrategyContract
from lightrl.testing.tiny_training import adamw, loss_fn, make_batch, samples, tiny_policy


class TestSingle(StrategyContract):
    strategy = "single"
    world_sizes = (1,)


def test_no_loss_is_read_before_the_last_micro_batch_has_been_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, reading one waits for everything that was started before."""
    strategy = SingleStrategy(0, 1.0, 1, 1, StrategyOptions(exact_batches=True))
    policy = strategy.prepare_model(tiny_policy())
    strategy.register(policy, adamw(policy.parameters()))
    batches = [make_batch([sample]) for sample in samples(0, count=3)]
    events, read, backward = [], Tensor.__float__, strategy.backward

    def noted_read(tensor: Tensor) -> float:
        events.append("read")
        return read(tensor)

    def noted_backward(*args: Any, **kwargs: Any) -> None:
        events.append("backward")
        backward(*args, **kwargs)

    monkeypatch.setattr(Tensor, "__float__", noted_read)
    monkeypatch.setattr(strategy, "backward", noted_backward)
    strategy.train_batch(batches, loss_fn, lambda batch: 1.0)
    assert events[:6] == ["backward"] * 3 + ["read"] * 3


def test_a_forward_that_fails_leaves_the_model_in_training_mode() -> None:
    strategy, model = SingleStrategy(0, 0.0, 1, 1), nn.Linear(2, 1)
    with pytest.raises(RuntimeError, match="shapes"):
        strategy.forward([torch.ones(1, 3)], model=model)
    assert model.training


def test_a_model_that_is_trained_on_text_alone_keeps_its_processor_of_images(tmp_path: Path) -> None:
    text = {"vocab_size": 32, "head_dim": 8, "num_key_value_heads": 1}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = sizes | {"image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=sizes | text, vision_config=vision, mm_tokens_per_image=4)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    (tmp_path / "model/preprocessor_config.json").write_text('{"do_resize": true}')
    (tmp_path / "model/preprocessor_config.json").chmod(0o444)
    policy = load_policy(str(tmp_path / "model"), materialize=True)
    SingleStrategy(0, 0.0, 1, 1).save_pretrained(policy, tmp_path / "saved")
    assert (tmp_path / "saved/preprocessor_config.json").read_text() == '{"do_resize": true}'
    assert (tmp_path / "saved/preprocessor_config.json").stat().st_mode & 0o200  # the trainer may write it again
    assert (tmp_path / "saved/model.safetensors").is_file()
    for name in ("", str(tmp_path / "gone")):  # made from a config, it has no folder; one may be gone by now
        policy.hf.name_or_path = name
        SingleStrategy(0, 0.0, 1, 1).save_pretrained(policy, tmp_path / "without")
        assert not (tmp_path / "without/preprocessor_config.json").exists()
