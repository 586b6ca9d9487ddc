"""Makes a policy or a critic compute the common beginnings of a pack once, by hooks around its decoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightrl.models.critic import Critic
from lightrl.models.multimodal import FAMILIES
from lightrl.models.packed_attention import ATTENTION_NAME, CURRENT_LAYOUT, LAYOUT_KEYWORD
from lightrl.models.per_sequence import RUNS_APART
from lightrl.models.policy import Policy, response_batch
from lightrl.records import PackedBatch
from lightrl.sharing.attention import tree_layout
from lightrl.sharing.tree import PrefixTree, SharedBatch, share
from lightrl.strategy import StrategyBase

_PROMPT, _RESPONSES = 24, (5, 3, 5)  # tokens of the check


class PromptSharing:
    """Hooks on a model that scores packs, and on its decoder. A pack without a tree runs as ever."""

    def __init__(self, model: Policy | Critic) -> None:
        self._tree: PrefixTree | None = None  # of the pack in the model's forward
        decoder: Any = _decoder_of(model)
        decoder.prompt_sharing = self
        model.register_forward_pre_hook(self._begin)
        decoder.register_forward_pre_hook(self._keep, with_kwargs=True)
        decoder.register_forward_hook(self._spread)

    def _begin(self, model: nn.Module, args: tuple[PackedBatch]) -> None:
        self._tree = args[0].tree if isinstance(args[0], SharedBatch) else None

    def _keep(self, decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Gives the decoder the tokens that are computed, and their tree."""
        if self._tree is None:
            return None
        kept, layout = self._tree.kept, tree_layout(self._tree)
        CURRENT_LAYOUT.set(layout)  # packed_hidden_states() resets it
        changed = {name: kwargs[name][..., kept] for name in ("input_ids", "position_ids")}
        if LAYOUT_KEYWORD in kwargs:
            changed[LAYOUT_KEYWORD] = layout
        return args, kwargs | changed

    def _spread(self, decoder: nn.Module, args: Any, output: Any) -> Any:
        """Gives each token of the pack the state that was computed for it."""
        tree, self._tree = self._tree, None
        if tree is None:
            return None
        hidden: Tensor = output[0]
        return (hidden.index_select(1, tree.source),)


def attach_sharing(model: nn.Module, strategy: StrategyBase) -> None:
    """Lets a placed model share prompts, once; raises ValueError for one that computes something else then.

    Every rank calls it: all score a few tokens with and without.
    """
    inner = next((module for module in model.modules() if isinstance(module, Policy | Critic)), None)
    if inner is None or hasattr(_decoder_of(inner), "prompt_sharing"):
        return
    with strategy.comm.phase("set-up", local=True):
        _check_kind(inner)
    PromptSharing(inner)
    plain = _trial(inner)
    outputs = strategy.forward([pack.to(strategy.device) for pack in (plain, share(plain))], model=model)
    allowed = 1e-3 if strategy.options.dtype == "float32" else 3e-2
    with strategy.comm.phase("set-up", local=True):
        _compare(_body_of(inner).config.model_type, _numbers(outputs[0]), _numbers(outputs[1]), allowed)


def _decoder_of(model: Policy | Critic) -> Any:
    return _body_of(model).get_decoder()


def _body_of(model: Policy | Critic) -> Any:
    return model.hf if isinstance(model, Policy) else model.body


def _check_kind(model: Policy | Critic) -> None:
    """Raises ValueError unless attention alone, of a kind that knows trees, mixes the tokens of the model."""
    decoder, model_type = _decoder_of(model), _body_of(model).config.model_type
    if model_type in FAMILIES:
        raise ValueError(
            f"--share_prompts does not go with model type {model_type!r}, which takes images: tokens that are alike "
            "may stand for different ones. Leave it out."
        )
    runs_apart = any(module.__dict__.get(RUNS_APART) for module in decoder.modules())
    if runs_apart or decoder.config._attn_implementation != ATTENTION_NAME:
        raise ValueError(
            f"--share_prompts does not go with model type {model_type!r}: its layers carry a state from "
            "token to token, or attend in a way of their own, so each sequence runs alone. Leave it out."
        )


def _trial(model: Policy | Critic) -> PackedBatch:
    """Returns a pack of random tokens: responses to one prompt, and one to another."""
    vocabulary = _decoder_of(model).config.get_text_config().vocab_size
    draw = torch.Generator().manual_seed(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(vocabulary, (count,), generator=draw).tolist())

    prompt = tokens(_PROMPT)
    pairs = [(prompt, tokens(count)) for count in _RESPONSES]
    return response_batch([*pairs, (tokens(2), tokens(3))])


def _numbers(output: Any) -> Tensor:
    numbers: Tensor = output.logprobs if hasattr(output, "logprobs") else output.values
    return numbers.float()


def _compare(model_type: str, plain: Tensor, shared: Tensor, allowed: float) -> None:
    difference = ((plain - shared).abs().max() / plain.abs().max().clamp(min=1e-6)).item()
    if not difference <= allowed:  # a NaN fails too
        raise ValueError(
            f"--share_prompts does not go with model type {model_type!r}: with it, scores of a few tokens differ by "
            f"{difference:.2g} relative ({allowed:g} is allowed). Its layers mix tokens in a way that lightrl does not "
            "know. Leave it out."
        )
