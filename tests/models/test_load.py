from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from lightrl.builtin.model import tiny_model
from lightrl.models.load import context_length, load_policy, load_tokenizer


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


def test_a_reference_is_no_actor(folder: str) -> None:
    assert load_policy(folder, materialize=True).is_actor
    reference = load_policy(folder, materialize=True, is_reference=True)
    assert not reference.is_actor
    assert not reference.entropy


def test_tokenizer_and_context(folder: str) -> None:
    assert load_tokenizer(folder)("1+1=")["input_ids"] == [3, 12, 3, 13]
    assert context_length(folder) == tiny_model()[0].config.max_position_embeddings
