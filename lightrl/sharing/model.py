"""Makes a policy or a critic compute the common prefixes in a pack once, with hooks around its decoder.

share_by_itself() is --share_prompts auto: it changes no pack; each model finds what the sequences of a pack share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightrl.metrics import Statistics
from lightrl.models.critic import Critic
from lightrl.models.multimodal import FAMILIES
from lightrl.models.packed_attention import ATTENTION_NAME, CURRENT_LAYOUT, LAYOUT_KEYWORD, Scoring, SplitLayout
from lightrl.models.per_sequence import RUNS_APART
from lightrl.models.policy import Policy, needs_score_check, response_batch
from lightrl.records import PackedBatch
from lightrl.sharing.attention import tree_layout
from lightrl.sharing.dealing import deal, split_tree
from lightrl.sharing.images import trial_with_images
from lightrl.sharing.tree import PrefixTree, SharedBatch, kept_tokens, share, tree_of
from lightrl.strategy import StrategyBase

MODELS = ("model", "policy", "reference", "teacher", "critic")  # attributes of a trainer
MOST_COMPUTED = 0.85  # share of a pack's tokens: with more, a tree costs a small model what it saves
_PROMPT, _RESPONSES = 24, (5, 3, 5)  # tokens of the check
_RUNS_ALONE = (
    ": its layers carry a state from token to token, or attend in a way of their own, so each sequence runs alone."
)


class PromptSharing:
    """Hooks on a model that scores packs, and on its decoder. A pack without a tree runs as usual.

    The model's pack is then the computed tokens, and their states give the scores of the whole pack.
    """

    may_copy = True  # copies keys, for attention without a kernel for trees
    layout_of = staticmethod(tree_layout)

    def __init__(self, model: Policy | Critic) -> None:
        self._tree: PrefixTree | None = None  # tree of the pack in the model's forward, until its decoder begins
        self.copying: Sequence[Scoring] = ()  # kinds of attention that copied keys for the last tree
        self._decoder = _decoder_of(model)
        self._decoder.prompt_sharing = self
        self._hooks = (
            model.register_forward_pre_hook(self._drop_copies),
            self._decoder.register_forward_pre_hook(self._follow_tree, with_kwargs=True),
        )

    def detach(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        del self._decoder.prompt_sharing

    def tree_of(self, batch: PackedBatch) -> tuple[PackedBatch, PrefixTree | None]:
        """Returns a pack and its tree, if it has one; a pack without one runs whole."""
        return batch, batch.tree if isinstance(batch, SharedBatch) else None

    def _drop_copies(self, model: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Passes the model only the tokens that are computed."""
        self._tree = None
        if not args or not isinstance(args[0], PackedBatch):  # a user's dictionary needs the states of all tokens
            return None
        batch, tree = self.tree_of(args[0])
        if tree is not None:
            self._tree, batch, group = tree, kept_tokens(batch, tree), model.sequence_group
            batch = batch if group is None else deal(batch, group.size)
        return (batch, *args[1:])

    def _follow_tree(self, decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Makes tokens attend along their tree, whose segments deal() has padded if ranks split them."""
        tree, self._tree = self._tree, None
        if tree is None:
            return None
        given: Any = CURRENT_LAYOUT.get()
        layout = self.layout_of(replace(tree, cu_seqlens=given.cu_seqlens))
        self.copying = layout.copying
        used = split_tree(given, layout) if isinstance(given, SplitLayout) else layout
        CURRENT_LAYOUT.set(used)  # packed_hidden_states() resets it
        return args, kwargs | ({LAYOUT_KEYWORD: used} if LAYOUT_KEYWORD in kwargs else {})


class OwnTrees(PromptSharing):
    """Hooks that find the tree of any pack; a pack whose tree saves little runs whole."""

    may_copy = False  # with short prompts, it takes longer than whole sequences
    statistics: Statistics | None = None

    def tree_of(self, batch: PackedBatch) -> tuple[PackedBatch, PrefixTree | None]:
        """Returns the pack and its tree if the tree is worth it."""
        (batch, tree), whole = tree_of(batch, MOST_COMPUTED), batch.cu_seqlens[-1]
        if self.statistics is not None:
            self.statistics.mean("tokens/computed_share", whole if tree is None else len(tree.kept), whole)
        return batch, tree


def share_by_itself(trainer: Any) -> None:
    """Lets models of a trainer on a CPU share prompts if their scores do not change; every rank must call it."""
    strategy = trainer.strategy
    if not strategy.comm.agree(strategy.device.type == "cpu"):
        return
    models = [getattr(trainer, name, None) for name in MODELS]
    scorers = {scorer: model for model in models if model is not None and (scorer := _scorer_of(model)) is not None}
    shared = [scorer for scorer, model in scorers.items() if not _attach(OwnTrees, scorer, model, strategy)]
    for scorer in shared:
        _decoder_of(scorer).prompt_sharing.statistics = trainer.statistics
    if shared:
        trainer.batches = "; ".join(filter(None, (trainer.batches, "common prefixes are computed once")))


def attach_sharing(model: nn.Module, strategy: StrategyBase) -> None:
    """Lets a placed model share prompts, if it does not yet; raises ValueError if that changes its scores.

    Every rank must call it, as all may have to score a few tokens with and without sharing.
    """
    scorer = _scorer_of(model)
    if scorer is None or hasattr(_decoder_of(scorer), "prompt_sharing"):
        return
    refusal = _attach(PromptSharing, scorer, model, strategy)
    if refusal:
        raise ValueError(f"--share_prompts does not go with {refusal} Leave it out.")


def _attach(kind: type[PromptSharing], scorer: Policy | Critic, model: nn.Module, strategy: StrategyBase) -> str:
    """Returns why a model cannot share prompts; empty if it shares from now on. All ranks decide alike."""
    refusal = objection_to(scorer)
    if not strategy.comm.agree(not refusal):
        return f"model type {_body_of(scorer).config.model_type!r}{refusal or ', which another rank refused.'}"
    if strategy.comm.agree(strategy.device.type == "cpu" and not needs_score_check(_body_of(scorer))):
        kind(scorer)
        return ""
    return _try(kind, scorer, model, strategy)


def _try(kind: type[PromptSharing], scorer: Policy | Critic, model: nn.Module, strategy: StrategyBase) -> str:
    """Does what _attach() does for a model that the tests do not compare: lets it score a few tokens in both ways."""
    model_type: str = _body_of(scorer).config.model_type
    plain = trial_with_images(_body_of(scorer)) if model_type in FAMILIES else _trial(scorer)
    whole = _numbers(strategy.forward([plain.to(strategy.device)], model=model))
    sharing = kind(scorer)
    shared = _numbers(strategy.forward([share(plain).to(strategy.device)], model=model))
    difference = ((whole - shared).abs().max() / whole.abs().max().clamp(min=1e-6)).item()
    allowed = 1e-3 if strategy.options.dtype == "float32" else 3e-2
    is_fast = kind.may_copy or not sharing.copying
    if strategy.comm.agree(is_fast and difference <= allowed):  # false for NaN
        return ""
    sharing.detach()
    return _mixes_otherwise(model_type, difference, allowed)


def _mixes_otherwise(model_type: str, difference: float, allowed: float) -> str:
    return (
        f"model type {model_type!r}: with it, scores of a few tokens differ by {difference:.2g} relative "
        f"({allowed:g} is allowed). Its layers mix tokens in a way that lightrl does not know."
    )


def _scorer_of(model: nn.Module) -> Policy | Critic | None:
    return next((module for module in model.modules() if isinstance(module, Policy | Critic)), None)


def _decoder_of(model: Policy | Critic) -> Any:
    return _body_of(model).get_decoder()


def _body_of(model: Policy | Critic) -> Any:
    return model.hf if isinstance(model, Policy) else model.body


def objection_to(scorer: Policy | Critic) -> str:
    """Returns an objection to a model unless only attention, of a kind that supports trees, mixes its tokens."""
    decoder = _decoder_of(scorer)
    runs_apart = any(module.__dict__.get(RUNS_APART) for module in decoder.modules())
    return _RUNS_ALONE if runs_apart or decoder.config._attn_implementation != ATTENTION_NAME else ""


def _trial(model: Policy | Critic) -> PackedBatch:
    """Returns a pack of random tokens: several responses to one prompt, and one to another."""
    vocabulary = _decoder_of(model).config.get_text_config().vocab_size
    draw = torch.Generator().manual_seed(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(vocabulary, (count,), generator=draw).tolist())

    prompt = tokens(_PROMPT)
    pairs = [(prompt, tokens(count)) for count in _RESPONSES]
    return response_batch([*pairs, (tokens(2), tokens(3))])


def _numbers(outputs: Any) -> Tensor:
    (output,) = outputs
    numbers: Tensor = output.logprobs if hasattr(output, "logprobs") else output.values
    return numbers.float()
