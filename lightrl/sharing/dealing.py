"""Deals the tokens of a tree in turn to the ranks that split them (--sp_size).

If cut in order, the first ranks would hold prompts and the last ones responses, and only these compute scores.
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
    """Layout of a tree whose tokens are dealt to ranks: token i is number i // size of rank i % size."""

    tree: TreeLayout
    size: int  # number of ranks

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Computes attention along the tree: [1, T, heads, dim] in the order of the ranks."""
        query, key, value = (_rearranged(part, 2, self.size) for part in (query, key, value))
        return _rearranged(self.tree.attend(query, key, value, scoring), 1, self.num_tokens // self.size)


def split_tree(split: SplitLayout, tree: TreeLayout) -> SplitLayout:
    """Returns a rank's layout for tokens in the order of deal()."""
    parts = {field.name: getattr(tree, field.name) for field in fields(PackedLayout)}
    return replace(split, whole=DealtLayout(**parts, tree=tree, size=split.group.size))


def deal(batch: KeptBatch, size: int) -> KeptBatch:
    """Returns the tokens of a tree in the order of the ranks that get them, padded by an extra segment."""
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
    """Cuts a dim into equal parts and takes the first entry of each part, then the second of each, and so on."""
    parts: Tensor = part.unflatten(dim, (num_parts, -1))
    return parts.transpose(dim, dim + 1).flatten(dim, dim + 1)
