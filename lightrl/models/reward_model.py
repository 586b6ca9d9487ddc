"""The reward model: one score per sequence of a pack, with the same head and rule as transformers' own classifiers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from lightrl.models.packed_attention import packed_hidden_states
from lightrl.models.policy import (
    QUANTISED,
    explained,
    prepare_decoder,
    quantised_weights,
    refuse_quantised,
    remove_randomness,
    response_batch,
)
from lightrl.models.token_split import SequenceGroup, apply_to_split
from lightrl.records import PackedBatch
from lightrl.seeding import mix_seed

HEAD_NAME = "score"
_HEAD_STREAM = 0x53434F5245  # separates the random draw of a new head from all others of the same seed
_CHECK_LENGTHS = (7, 7, 12)  # tokens of the sequences that check_reward_scores() runs


class RewardModel(nn.Module):
    """Scores a sequence at its last token that is not padding, as AutoModelForSequenceClassification does."""

    is_actor = False

    def __init__(self, hf_model: PreTrainedModel) -> None:
        """Takes over a sequence-classification model with one label, and makes its attention accept packs."""
        super().__init__()
        self.hf: Any = hf_model
        hf_model.score.computes_in_float32 = True  # type: ignore[union-attr]  # half precision is too coarse to compare
        self.sequence_group: SequenceGroup | None = None  # ranks that split the tokens of every pack
        prepare_decoder(hf_model)
        remove_randomness(hf_model)

    def forward(self, batch: PackedBatch) -> Tensor:
        """Returns the scores, [S] float32, in the order of batch.keys."""
        group = self.sequence_group
        hidden = packed_hidden_states(self.hf.get_decoder(), batch, group=group)
        positions = last_positions(batch.input_ids, batch.cu_seqlens, self.hf.config.get_text_config().pad_token_id)
        if group is None:
            return self._score(hidden[positions])
        (scores,) = apply_to_split(lambda rows, _: (self._score(rows),), hidden, positions, group)
        return scores

    def _score(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            scores: Tensor = self.hf.score(hidden.float())
        return scores[:, 0].clone()  # a copy: FSDP warns about modules that return views


def last_positions(input_ids: Tensor, cu_seqlens: tuple[int, ...], pad_token_id: int | None) -> Tensor:
    """Returns the index of each sequence's last token that is not padding, [S]; of the first token if all are."""
    device = input_ids.device
    if pad_token_id is None:
        return torch.tensor(cu_seqlens[1:], device=device) - 1
    starts = torch.tensor(cu_seqlens[:-1], device=device)
    lengths = torch.tensor([end - start for start, end in pairwise(cu_seqlens)], device=device)
    owners = torch.arange(len(lengths), device=device).repeat_interleave(lengths, output_size=len(input_ids))
    candidates = torch.where(input_ids != pad_token_id, torch.arange(len(input_ids), device=device), 0)
    return starts.scatter_reduce(0, owners, candidates, "amax")


def load_reward_model(
    path: str, tokenizer: PreTrainedTokenizerBase, *, materialize: bool, seed: int, trust_remote_code: bool = False
) -> RewardModel:
    """Loads a reward model in float32, from a language model (with a new head) or from a reward model (with its own).

    Args:
        tokenizer: provides the padding token.
        materialize: False builds it on the meta device, for ranks that receive its weights later.
        seed: seed of a new head.
    """
    config = _config(path, tokenizer, trust_remote_code=trust_remote_code)
    loader, settings = AutoModelForSequenceClassification, {"dtype": torch.float32}
    if materialize:
        model = _load(path, config, seed, trust_remote_code=trust_remote_code)
    else:
        with torch.device("meta"):
            model = loader.from_config(config, trust_remote_code=trust_remote_code, **settings)
    return RewardModel(model)


def _config(path: str, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool) -> Any:
    with explained(path, "config"):
        config: Any = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    refuse_quantised(config, path)
    is_classifier = _is_classifier(config)
    if is_classifier and config.num_labels != 1:
        raise ValueError(f"--model {path} scores {config.num_labels} labels: a reward model has one. Choose another.")
    is_remote = "AutoModelForSequenceClassification" in (getattr(config, "auto_map", None) or {})
    # A private table, as in policy.model_loader().
    if not is_remote and type(config) not in AutoModelForSequenceClassification._model_mapping:
        raise ValueError(
            f"transformers has no sequence classifier of model type {config.model_type!r}, so it cannot become a "
            "reward model. Choose another model."
        )
    config.num_labels = 1
    text = config.get_text_config()  # the padding is that of the text, also in a config with a vision tower
    end = tokenizer.eos_token_id
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end
    if not is_classifier:
        # Users of the saved model pad with the tokenizer; without a padding token they could not score a batch.
        text.pad_token_id = padding
        if padding is None:
            raise ValueError(f"--model {path}: its tokenizer has neither a padding nor an end token. Give it one.")
    elif text.pad_token_id is None and padding != end:  # if it is the end, scores would be read before it from now on
        text.pad_token_id = padding
    return config


def _load(path: str, config: Any, seed: int, *, trust_remote_code: bool) -> PreTrainedModel:
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # otherwise it would report the new head
    try:
        with explained(path, "weights"):
            model, report = AutoModelForSequenceClassification.from_pretrained(
                path, config=config, dtype=torch.float32, trust_remote_code=trust_remote_code, output_loading_info=True
            )
    finally:
        transformers_logging.set_verbosity(verbosity)
    if hasattr(model, QUANTISED):
        raise quantised_weights(path)
    head = f"{HEAD_NAME}.weight"
    if not hasattr(model, HEAD_NAME) or getattr(model.score, "bias", None) is not None:
        kind = type(model).__name__
        raise ValueError(f"--model {path}: {kind} has no linear head named {HEAD_NAME!r} without a bias.")
    missing = sorted(set(report["missing_keys"]) - {head})
    if missing:
        raise ValueError(f"--model {path} lacks weights of the model's body: {', '.join(missing[:5])}.")
    if head in report["missing_keys"]:
        _refuse_lost_head(path, config)
        generator = torch.Generator().manual_seed(mix_seed(_HEAD_STREAM, seed))
        with torch.no_grad():  # small, so that the first scores are near 0
            model.score.weight.normal_(0.0, 1 / (model.score.in_features + 1), generator=generator)
    loaded: PreTrainedModel = model
    return loaded


def _refuse_lost_head(path: str, config: Any) -> None:
    """Raises ValueError for a reward model without its head: new weights would give random scores."""
    if _is_classifier(config):
        raise ValueError(
            f"--model {path}: its config.json says that it scores sequences, and its files lack {HEAD_NAME}.weight: "
            "scores would be random. Copy the files anew, or give the language model that it was made from."
        )


def _is_classifier(config: Any) -> bool:
    return any("SequenceClassification" in name for name in config.architectures or ())


def check_reward_scores(model: RewardModel) -> None:
    """Raises ValueError unless the scores of a pack equal those of the model's own forward, to within 1e-3.

    This refuses models that pool or mix tokens in another way. Call it before the model is sharded.
    """
    device = next(model.parameters()).device
    sequences = [_random_ids(model.hf.config, length, seed) for seed, length in enumerate(_CHECK_LENGTHS)]
    decoder, is_training = model.hf.get_decoder(), model.training
    model.eval()
    with torch.no_grad():
        ours = model(response_batch([(ids.tolist(), ()) for ids in sequences]).to(device))
        packed = decoder.config._attn_implementation
        decoder.set_attn_implementation("eager")
        try:
            theirs = torch.cat([model.hf(input_ids=ids[None].to(device)).logits[:, 0] for ids in sequences])
        finally:
            decoder.set_attn_implementation(packed)
    model.train(is_training)
    difference = (ours - theirs).abs().max() / theirs.abs().max()
    if not difference <= 1e-3:  # a NaN fails too
        raise ValueError(
            f"The scores of model type {model.hf.config.model_type!r} differ from its own by {difference:.2g} relative "
            "(1e-3 is allowed): it pools tokens in a way that lightrl does not know. Choose another model."
        )


def _random_ids(config: Any, length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.get_text_config().vocab_size, (length,), generator=generator)
