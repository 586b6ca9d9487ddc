"""RewardModel against transformers' own sequence classifiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.testing import assert_close
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
)

from lightrl.builtin.model import builtin_tokenizer, tiny_model
from lightrl.data.example_packing import pack_examples
from lightrl.models.policy import response_batch
from lightrl.models.reward_model import RewardModel, check_reward_scores, load_reward_model
from lightrl.records import Answer, Example

SHAPE: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "num_labels": 1,
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE),
    "gemma2": lambda: transformers.Gemma2Config(**SHAPE, head_dim=8),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=16, n_embd=16, n_layer=2, n_head=2, n_positions=64, num_labels=1, pad_token_id=0
    ),
    "gemma3": lambda: with_vision(),
}


def with_vision() -> Any:
    """Returns a config that has a text config inside and states no padding token itself."""
    text = {**SHAPE, "vocab_size": 32, "head_dim": 8}
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.Gemma3Config(
        text_config=text,
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        num_labels=1,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model, tokenizer = tiny_model()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def load(folder: Path, tokenizer: PreTrainedTokenizerFast, *, materialize: bool = True, seed: int = 0) -> RewardModel:
    return load_reward_model(str(folder), tokenizer, materialize=materialize, seed=seed)


def two_answers() -> Example:
    """Ids [5 6 7 1] and [5 6 8 9 10 1]; 1 is the end token, 0 padding."""
    answers = tuple(
        Answer(prompt_ids=(5, 6), response_ids=ids, loss_mask=(True,) * len(ids)) for ids in ((7, 1), (8, 9, 10, 1))
    )
    return Example(index=0, where="", answers=answers)


def test_a_saved_model_gives_the_same_scores_in_transformers(folder: Path, tmp_path: Path) -> None:
    model = load(folder, builtin_tokenizer()).eval()
    with torch.no_grad():
        model.hf.score.weight.normal_()
        ours = model(pack_examples([two_answers()]))  # the shorter answer first
    model.hf.save_pretrained(tmp_path / "final")
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "final").eval()
    with torch.no_grad():
        one_by_one = [theirs(torch.tensor([ids])).logits[0, 0] for ids in ([5, 6, 7, 1], [5, 6, 8, 9, 10, 1])]
        padded = torch.tensor([[0, 0, 5, 6, 7, 1], [5, 6, 8, 9, 10, 1]])
        together = theirs(padded, attention_mask=(padded != 0).long()).logits[:, 0]
    assert_close(ours, torch.stack(one_by_one), atol=1e-5, rtol=0)
    assert_close(ours, together, atol=1e-5, rtol=0)
    assert abs(float(ours[0] - ours[1])) > 1e-3


def test_where_the_end_token_pads_the_score_is_read_before_it(folder: Path) -> None:
    """Else transformers, which looks for the last other token, would score another place."""
    tokenizer = builtin_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    model = load(folder, tokenizer).eval()
    assert model.hf.config.pad_token_id == 1
    with torch.no_grad():
        model.hf.score.weight.normal_()
        ours = model(pack_examples([two_answers()]))
        model.hf.get_decoder().set_attn_implementation("eager")
        theirs = [model.hf(torch.tensor([ids])).logits[0, 0] for ids in ([5, 6, 7, 1], [5, 6, 8, 9, 10, 1])]
    assert_close(ours, torch.stack(theirs), atol=1e-5, rtol=0)


@pytest.mark.parametrize("pads_with_end", [True, False])
@pytest.mark.parametrize("stated", [0, None])
def test_a_reward_model_is_read_where_its_own_config_says(
    folder: Path, tmp_path: Path, stated: int | None, pads_with_end: bool
) -> None:
    """Not where its tokenizer pads, which transformers never asks: its scores would be those of other tokens."""
    tokenizer = builtin_tokenizer()
    model = load(folder, tokenizer)
    torch.nn.init.normal_(model.hf.score.weight)
    model.hf.config.pad_token_id = stated
    model.hf.save_pretrained(tmp_path / "trained")
    if pads_with_end:
        tokenizer.pad_token = tokenizer.eos_token
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "trained")
    again = load(tmp_path / "trained", tokenizer).eval()
    assert again.hf.config.pad_token_id == (stated if pads_with_end else 0)
    with torch.no_grad():
        ours = again(pack_examples([two_answers()]))
        one_by_one = [theirs(torch.tensor([ids])).logits[0, 0] for ids in ([5, 6, 7, 1], [5, 6, 8, 9, 10, 1])]
    assert_close(ours, torch.stack(one_by_one), atol=1e-5, rtol=0)


@pytest.mark.parametrize("stated", [1, None])
def test_a_model_with_a_vision_tower_states_its_padding_with_its_text(tmp_path: Path, stated: int | None) -> None:
    """There transformers looks for it. 1 is the end token, which the answers end with."""
    config = with_vision()
    config.text_config.pad_token_id = stated
    trained = AutoModelForSequenceClassification.from_config(config)
    torch.nn.init.normal_(trained.score.weight)
    trained.save_pretrained(tmp_path / "trained")
    again = load(tmp_path / "trained", builtin_tokenizer()).eval()
    again.hf.save_pretrained(tmp_path / "again")
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "again")
    assert theirs.config.get_text_config().pad_token_id == (0 if stated is None else stated)
    rows = torch.tensor([[5, 6, 7, 1], [5, 6, 9, 10]])
    with torch.no_grad():
        assert_close(again(response_batch([(ids, ()) for ids in rows.tolist()])), theirs(rows).logits[:, 0])


def test_a_reward_model_that_has_lost_its_head_is_refused(folder: Path, tmp_path: Path) -> None:
    """Such as one whose head has another name: its scores would be those of a new head."""
    model = load(folder, builtin_tokenizer()).hf
    state = {name.replace("score.", "value_head."): value for name, value in model.state_dict().items()}
    model.save_pretrained(tmp_path / "headless", state_dict=state)
    with pytest.raises(
        ValueError, match=r"headless: .* says that it scores sequences, and its files lack score.weight"
    ):
        load(tmp_path / "headless", builtin_tokenizer())


def test_a_new_head_hangs_on_the_seed_and_a_trained_one_is_kept(folder: Path, tmp_path: Path) -> None:
    tokenizer = builtin_tokenizer()
    first, same, other = (load(folder, tokenizer, seed=seed).hf.score.weight for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    model = load(folder, tokenizer)
    model.hf.save_pretrained(tmp_path / "trained")
    assert torch.equal(load(tmp_path / "trained", tokenizer, seed=9).hf.score.weight, first)


def test_other_ranks_build_the_same_names_without_weights(folder: Path) -> None:
    tokenizer = builtin_tokenizer()
    real, empty = load(folder, tokenizer), load(folder, tokenizer, materialize=False)
    assert [name for name, _ in real.named_parameters()] == [name for name, _ in empty.named_parameters()]
    assert all(parameter.is_meta for parameter in empty.parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_any_body_is_scored_as_transformers_does(name: str) -> None:
    torch.manual_seed(0)
    hf = AutoModelForSequenceClassification.from_config(CONFIGS[name]())
    check_reward_scores(RewardModel(hf))


def test_the_check_tells_a_model_that_pools_otherwise() -> None:
    model = RewardModel(AutoModelForSequenceClassification.from_config(CONFIGS["llama"]()))
    forward = model.hf.forward

    def doubled(**inputs: Any) -> Any:
        output = forward(**inputs)
        output.logits = output.logits * 2
        return output

    model.hf.forward = doubled
    with pytest.raises(ValueError, match="it pools tokens in a way that lightrl does not know"):
        check_reward_scores(model)


def test_a_classifier_of_several_labels_is_refused(folder: Path, tmp_path: Path) -> None:
    hf = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
    hf.save_pretrained(tmp_path / "three")
    with pytest.raises(ValueError, match="scores 3 labels: a reward model has one"):
        load(tmp_path / "three", builtin_tokenizer())


def test_a_classifier_with_another_head_is_named_with_its_folder(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    BertForSequenceClassification(BertConfig(vocab_size=16, num_labels=1, **sizes)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^--model .*: BertForSequenceClassification has no linear head"):
        load_reward_model(str(tmp_path), builtin_tokenizer(), materialize=True, seed=0)
