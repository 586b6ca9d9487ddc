"""The tokens of a tree dealt out in turn to the ranks that split them (--sp_size).

Cut in order, the first ranks would hold the prompts and the last ones the responses, whose scores they alone compute.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from torch import Tensor
from torch.nn import functional as F

from lightrl.models.packed_attention import PackedLayout, Scoring, SplitLayout
from lightrl.records import VisionInputs
from lightrl.sharing.attention import TreeLayout
from lightrl.sharing.tree import KeptBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class DealtLayout(PackedLayout):
    """A tree whose tokens come rank by rank: token i is number i // size of rank i % size."""

    tree: TreeLayout
    size: int  # ranks

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Computes attention along the tree: [1, T, heads, dim] in the order of the ranks."""
        query, key, value = (_rearranged(part, 2, self.size) for part in (query, key, value))
        return _rearranged(self.tree.attend(query, key, value, scoring), 1, self.num_tokens // self.size)


def split_tree(split: SplitLayout, tree: TreeLayout) -> SplitLayout:
    """Returns the layout of a rank whose tokens deal() dealt."""
    parts = {field.name: getattr(tree, field.name) for field in fields(PackedLayout)}
    return replace(split, whole=DealtLayout(**parts, tree=tree, size=split.group.size))


def deal(batch: KeptBatch, size: int) -> KeptBatch:
    """Returns the tokens of a tree, padded by a segment of its own, in the order of the ranks that get them."""
    num_tokens = len(batch.input_ids)
    padding = -num_tokens % size
    length = (num_tokens + padding) // size
    padded = (F.pad(part, (0, padding)) for part in (batch.input_ids, batch.position_ids))
    input_ids, position_ids = (_rearranged(part, part.dim() - 1, length) for part in padded)
    return replace(
        batch,
        input_ids=input_ids,
        position_ids=position_ids,
        cu_seqlens=(*batch.cu_seqlens, num_tokens + padding) if padding else batch.cu_seqlens,
        score_index=batch.score_index % size * length + batch.score_index // size,
        last=tuple(index % size * length + index // size for index in batch.last),
        vision=None if batch.vision is None else _dealt_vision(batch.vision, size, length),
    )


def _dealt_vision(vision: VisionInputs, size: int, length: int) -> VisionInputs:
    positions = vision.feature_positions % size * length + vision.feature_positions // size
    order = positions.argsort()
    return replace(vision, feature_positions=positions[order], feature_index=vision.feature_index[order])


def _rearranged(part: Tensor, dim: int, num_parts: int) -> Tensor:
    """Takes the first of each of so many equal parts along a dim, then the second of each, and so on."""
    parts: Tensor = part.unflatten(dim, (num_parts, -1))
    return parts.transpose(dim, dim + 1).flatten(dim, dim + 1)
