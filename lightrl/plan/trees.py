"""Prompts computed once, on paper: a model runs the tree of a pack of fake tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from torch import Tensor, nn

from lightrl.models.critic import Critic
from lightrl.models.packed_attention import Scoring
from lightrl.models.policy import Policy
from lightrl.sharing.attention import TreeLayout, attend_by_paths, tree_layout
from lightrl.sharing.model import PromptSharing
from lightrl.sharing.tree import LEAST_SAVED, PrefixTree, prefix_tree


def saved_by(num_sequences: int, num_shared: int) -> int:
    """Returns the tokens that a common prefix of sequences saves; 0 if too few to be worth a part of a tree."""
    saved = (num_sequences - 1) * num_shared
    return saved if saved >= LEAST_SAVED else 0


def paper_tree(families: Sequence[int], num_shared: int, num_own: int) -> PrefixTree | None:
    """Returns the tree of a pack; None if it saves nothing.

    Args:
        families: sequences with each prefix.
        num_shared: tokens of a prefix.
        num_own: tokens of a sequence after its prefix.
    """
    tokens = np.zeros((sum(families), num_shared + num_own), dtype=np.int64)
    tokens[:, 0] = np.repeat(np.arange(len(families)), families)
    tokens[:, num_shared] = np.arange(len(tokens))
    return prefix_tree(tokens.reshape(-1), tuple(accumulate([tokens.shape[1]] * len(tokens), initial=0)))


def share_on_paper(module: nn.Module, *, is_copied: bool) -> PromptSharing:
    """Makes a policy or critic run the trees of packs. is_copied: on an accelerator, whose attention copies keys."""
    return (_CopiedSharing if is_copied else PromptSharing)(scorer_in(module))


def scorer_in(module: nn.Module) -> Policy | Critic:
    """Returns the policy or the critic inside a model of a run that samples."""
    return next(child for child in module.modules() if isinstance(child, Policy | Critic))


class _CopiedLayout(TreeLayout):
    """A tree on an accelerator."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Computes attention along the paths of the tree: [1, U, heads, dim]."""
        return attend_by_paths(query, key, value, self, scoring)


class _CopiedSharing(PromptSharing):
    @staticmethod
    def layout_of(tree: PrefixTree) -> TreeLayout:
        """Returns the layout of a tree on an accelerator."""
        own = tree_layout(tree)
        fields: dict[str, Any] = {name: getattr(own, name) for name in own.__dataclass_fields__}
        return _CopiedLayout(**fields)
