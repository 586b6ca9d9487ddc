"""The critic: a language model's body with a head for one value per token, or a second head on a policy."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel

from lightrl.models.buffers import as_loaded
from lightrl.models.hub import file_of
from lightrl.models.multimodal import FAMILIES, embedded
from lightrl.models.packed_attention import packed_hidden_states
from lightrl.models.policy import (
    QUANTISED,
    Policy,
    explained,
    load_config,
    prepare_decoder,
    quantised_weights,
    refuse_quantised,
    remove_randomness,
)
from lightrl.models.token_split import SequenceGroup, apply_to_split
from lightrl.records import PackedBatch, ScoresAndValues, StateValues

HEAD_FILE = "value_head.safetensors"
_BODY, _HEAD = "body.", "value_head."
# Names of heads with one output for each token: in transformers' classifiers, such as reward models, in TRL, and in
# OpenRLHF.
_OTHER_HEADS = ("score", "v_head.summary", "value_head")
_ONE_FILE = "model.safetensors"


class ValueHead(nn.Linear):
    """Maps a hidden state to one number, always in float32, whatever type the body computes in."""

    computes_in_float32 = True

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1, dtype=torch.float32)

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps [N, H] to [N]."""
        with torch.autocast(hidden.device.type, enabled=False):
            return torch.mv(hidden.float(), self.weight[0].float()) + self.bias.float()


class Critic(nn.Module):
    """A critic that values the states of packed sequences. Its names in a checkpoint are body.* and value_head.*.

    Attributes:
        sequence_group: ranks that split the tokens of every pack among them; None: each rank runs whole packs.
    """

    is_actor = False

    def __init__(self, body: PreTrainedModel, value_head: ValueHead) -> None:
        """Takes over a transformers model without an output embedding, as AutoModel makes it."""
        super().__init__()
        self.body = body
        self.value_head = value_head
        self.sequence_group: SequenceGroup | None = None
        self.takes_images = body.config.model_type in FAMILIES
        prepare_decoder(body)
        remove_randomness(body)

    def forward(self, batch: PackedBatch) -> StateValues:
        """Returns the values of the states of a pack."""
        embed = partial(embedded, self.body) if self.takes_images else None
        hidden = packed_hidden_states(self.body.get_decoder(), batch, embed, self.sequence_group)
        values, final_values = _values(self.value_head, hidden, batch, self.sequence_group)
        return StateValues(values=values, final_values=final_values)

    def save_pretrained(self, path: str | Path, state_dict: Mapping[str, Tensor]) -> None:
        """Writes the body as a Hugging Face folder, with the head beside it; load_critic() reads both."""
        body = {name.removeprefix(_BODY): value for name, value in state_dict.items() if name.startswith(_BODY)}
        self.body.save_pretrained(path, state_dict=body)
        save_value_head(
            path, {name.removeprefix(_HEAD): value for name, value in state_dict.items() if name.startswith(_HEAD)}
        )


class ActorCritic(Policy):
    """A policy with a value head on its body. The head is not part of the Hugging Face model."""

    def __init__(self, hf_model: PreTrainedModel, value_head: ValueHead) -> None:
        super().__init__(hf_model)
        self.value_head = value_head

    def forward(self, batch: PackedBatch) -> ScoresAndValues:
        """Returns the scores of the response tokens and the values of the states from one pass of the body."""
        hidden = self.hidden_states(batch)
        scores = self.scores(hidden, batch)
        values, final_values = _values(self.value_head, hidden, batch, self.sequence_group)
        return ScoresAndValues(
            logprobs=scores.logprobs, entropy=scores.entropy, values=values, final_values=final_values
        )


def _values(head: ValueHead, hidden: Tensor, batch: PackedBatch, group: SequenceGroup | None) -> tuple[Tensor, Tensor]:
    """Returns the values of the states that choose response tokens, [N], and of each final state, [S].

    The state that chooses a token is the position that predicts it; a final state is a sequence's last token. One call
    of the head serves both, because each call of a sharded head gathers it.
    """
    last_tokens = torch.tensor(batch.last_tokens, device=hidden.device)
    positions = torch.cat([batch.score_index, last_tokens])
    if group is None:
        values = head(hidden[positions])
    else:
        (values,) = apply_to_split(lambda rows, _: (head(rows),), hidden, positions, group)
    num_scored = batch.score_index.shape[0]
    # Copies: FSDP warns about modules that return views.
    return values[:num_scored].clone(), values[num_scored:].clone()


# ---- Loading and saving ------------------------------------------------------------------------------------------


def load_critic(path: str, *, materialize: bool, init_std: float, seed: int, trust_remote_code: bool = False) -> Critic:
    """Loads a critic in float32 from the folder of a policy, a reward model or a critic.

    Args:
        materialize: False builds it on the meta device, for ranks that receive its weights later.
        init_std: standard deviation of a new head, for a folder that has none.
    """
    config = load_config(path, trust_remote_code=trust_remote_code)
    refuse_quantised(config, path)
    if materialize:
        body = _load_body(path, trust_remote_code)
    else:
        with explained(path, "config"), torch.device("meta"):
            body = as_loaded(AutoModel.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code))
    _require_decoder(path, body)
    return Critic(body, load_value_head(path, body.config, materialize=materialize, init_std=init_std, seed=seed))


def _require_decoder(path: str, body: nn.Module) -> None:
    """Raises ValueError for an encoder such as BERT: a value may depend only on the tokens before it."""
    get_decoder: Any = getattr(body, "get_decoder", None)
    decoder = get_decoder() if callable(get_decoder) else body  # a vision tower beside it need not be causal
    if any(getattr(module, "is_causal", True) is False for module in decoder.modules()):
        raise ValueError(
            f"--model {path}: in {type(body).__name__} a token sees those after it. Choose a language model, or a "
            "reward model made from one."
        )


def load_value_head(path: str, config: Any, *, materialize: bool, init_std: float, seed: int) -> ValueHead:
    """Loads the head of a critic or the score head of a reward model; draws a new one if the folder has neither.

    Args:
        init_std: standard deviation of a new head; 0 makes all values 0.
    """
    text = config.get_text_config()
    hidden_size = getattr(text, "word_embed_proj_dim", None) or text.hidden_size
    with torch.device("cpu" if materialize else "meta"):
        head = ValueHead(hidden_size)
    if not materialize:
        return head
    with torch.no_grad():
        head.weight.normal_(std=init_std, generator=torch.Generator().manual_seed(seed % 2**63))
        head.bias.zero_()
        with explained(path, "value head"):
            saved = _saved_head(path)
        if saved and init_std:
            raise ValueError(
                f"--critic.head_init_std {init_std:g} has no effect: {path} has a value head of its own. Leave it out."
            )
        for name, value in saved.items():
            target: Tensor = getattr(head, name)
            if value.shape != target.shape:
                raise ValueError(
                    f"--model {path}: its value head's {name} has shape {list(value.shape)}, but a critic of this "
                    f"model needs {list(target.shape)}. Give a model with one score per token."
                )
            target.copy_(value)
    return head


def save_value_head(path: str | Path, state: Mapping[str, Tensor]) -> None:
    """Writes a value head beside a Hugging Face model, whose loaders ignore the file."""
    save_file({name: value.detach().cpu().contiguous() for name, value in state.items()}, Path(path) / HEAD_FILE)


def _load_body(path: str, trust_remote_code: bool) -> PreTrainedModel:
    # transformers' report would list the output embedding, which is left out on purpose.
    with _without_load_report(), explained(path, "weights"):
        body, report = AutoModel.from_pretrained(
            path, dtype=torch.float32, trust_remote_code=trust_remote_code, output_loading_info=True
        )
    if hasattr(body, QUANTISED):
        raise quantised_weights(path)
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(f"--model {path} lacks weights: {', '.join(missing[:5])}. Give a whole model.")
    loaded: PreTrainedModel = body
    return loaded


@contextmanager
def _without_load_report() -> Iterator[None]:
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _saved_head(path: str) -> dict[str, Tensor]:
    """Returns the weight and, if there is one, the bias of a folder's head; empty if it has no head."""
    head = file_of(path, HEAD_FILE)
    if head is not None:
        return load_file(head)
    files = _files_of_tensors(path)
    kind = next((kind for kind in _OTHER_HEADS if f"{kind}.weight" in files), "")
    named = {part: f"{kind}.{part}" for part in ("weight", "bias")}
    return {part: _read_tensor(path, files[name], name) for part, name in named.items() if name in files}


def _files_of_tensors(path: str) -> dict[str, str]:
    """Returns the file of each tensor of a model, by names."""
    index = file_of(path, f"{_ONE_FILE}.index.json")
    if index is not None:
        return dict(json.loads(Path(index).read_text())["weight_map"])
    weights = file_of(path, _ONE_FILE)
    if weights is None:
        return {}
    with safe_open(weights, framework="pt") as file:
        return dict.fromkeys(file.keys(), _ONE_FILE)


def _read_tensor(path: str, file_name: str, name: str) -> Tensor:
    weights = file_of(path, file_name)
    if weights is None:
        raise FileNotFoundError(f"the file {file_name}, which should hold {name}, is missing")
    with safe_open(weights, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor.float()
