"""Splits a user's dictionary of tensors, padded [B, L] or packed [T], into sequences, and packs these again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from lightrl.data.packing import Key

_LAYOUT_KEYS = ("cu_seqlens", "max_seqlen")  # computed anew for every micro-batch
_NUM_DUMMY_TOKENS = 2
Kind = tuple[bool, torch.dtype, tuple[int, ...]]  # of a key: whether it is per token, its type, the shape of one value
Kinds = dict[str, Kind]


class UserBatch(dict[str, Any]):
    """A dictionary of tensors for train_batch that also describes the tensors and limits the micro-batches."""

    def __init__(
        self,
        tensors: Mapping[str, Any],
        *,
        per_token: Sequence[str] = (),
        per_sequence: Sequence[str] = (),
        max_tokens: int | None = None,
        max_sequences: int | None = None,
    ) -> None:
        """Takes over the tensors.

        Args:
            tensors: input_ids [B, L] with attention_mask [B, L], or input_ids [T] with cu_seqlens [B + 1]; and more.
            per_token: the keys that have a value for each token; needed only if the shapes are ambiguous.
            per_sequence: the keys that have a value for each sequence; likewise.
            max_tokens: largest number of tokens in a micro-batch.
            max_sequences: largest number of sequences in a micro-batch. Without either limit the strategy's own holds.
        """
        super().__init__(tensors)
        unknown = sorted({*per_token, *per_sequence} - set(self))
        if unknown or set(per_token) & set(per_sequence):
            raise ValueError(
                f"per_token is {list(per_token)}, per_sequence {list(per_sequence)}: name keys of the batch "
                f"({', '.join(sorted(self))}), each in one of them."
            )
        self.per_token = frozenset(per_token)
        self.per_sequence = frozenset(per_sequence)
        self.max_tokens = max_tokens
        self.max_sequences = max_sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """One sequence with its values."""

    index: int  # among the sequences of all ranks
    per_token: dict[str, Tensor]  # [L, ...], including input_ids
    per_sequence: dict[str, Tensor]

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence."""
        return self.per_token["input_ids"].shape[0]

    @property
    def key(self) -> Key:
        """The name of the sequence, which is the same on any rank."""
        return (self.index, 0)

    @property
    def label(self) -> str:
        """Subject of a message about the sequence."""
        return f"Sequence {self.index} of the batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPack:
    """A micro-batch of a user's dictionary: sequences laid end to end, with the fields that a model needs."""

    input_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, from 0 in each sequence
    cu_seqlens: tuple[int, ...]  # S + 1 boundaries, from 0 to T
    data: dict[str, Tensor]  # passed to the loss function: [T, ...] and [S, ...], and cu_seqlens as a tensor
    indices: tuple[int, ...]  # of the sequences; none for a dummy
    vision: None = None

    # The names of the samples in the message about an update that is not finite:

    @property
    def keys(self) -> tuple[Key, ...]:
        """Names of the sequences; none for a dummy."""
        return tuple((index, 0) for index in self.indices)

    @property
    def sequence_index(self) -> Tensor:
        """The sequence of each token, [T] int64."""
        lengths = torch.tensor(self.cu_seqlens, device=self.input_ids.device).diff()
        return torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)

    @property
    def loss_mask(self) -> Tensor:
        """The mask of trained tokens, [T] bool: the one in the data, or else all tokens."""
        return self.data.get("loss_mask", torch.ones_like(self.input_ids)).bool()

    def to(self, device: torch.device) -> TokenPack:
        """Copies the tensors to a device."""
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            position_ids=self.position_ids.to(device),
            data={name: value.to(device) for name, value in self.data.items()},
        )


def next_token(data: Mapping[str, Tensor], name: str) -> Tensor:
    """Moves each token's value to the position that predicts the token; the end of each sequence gets 0.

    Row p of the logits predicts token p + 1, while data[name][p] belongs to token p.
    """
    moved = torch.roll(data[name], -1, 0)
    moved[data["cu_seqlens"][1:].long() - 1] = 0
    return moved


# ---- Reading -----------------------------------------------------------------------------------------------------


def read_rows(batch: UserBatch) -> list[TokenRow]:
    """Returns the sequences in order, on the host, without padding; raises ValueError for shapes that do not fit."""
    tensors = {name: _as_tensor(name, value) for name, value in batch.items() if name != "max_seqlen"}
    if "input_ids" not in tensors or tensors["input_ids"].dim() not in (1, 2):
        raise ValueError(
            "A batch needs input_ids of shape [B, L] with attention_mask, or [T] with cu_seqlens; this one has "
            f"{_described(tensors)}."
        )
    is_padded = tensors["input_ids"].dim() == 2
    spans: list[Any] = _padded_spans(tensors) if is_padded else _packed_spans(tensors)
    names = [name for name in sorted(tensors) if name not in _LAYOUT_KEYS]
    is_token = {name: _is_per_token(batch, name, tensors, len(spans)) for name in names}
    return [
        TokenRow(
            index=row,
            per_token={name: tensors[name][span] for name in names if is_token[name]},
            per_sequence={name: tensors[name][row] for name in names if not is_token[name]},
        )
        for row, span in enumerate(spans)
    ]


def kinds_of(batch: UserBatch) -> Kinds:
    """Returns the kind of each key of a batch that read_rows() accepts."""
    tensors = {name: torch.as_tensor(value) for name, value in batch.items() if name not in _LAYOUT_KEYS}
    ids = tensors["input_ids"]
    count = ids.shape[0] if ids.dim() == 2 else len(batch["cu_seqlens"]) - 1
    kinds = {}
    for name, tensor in sorted(tensors.items()):
        is_token = _is_per_token(batch, name, tensors, count)
        kinds[name] = (is_token, tensor.dtype, tuple(tensor.shape[ids.dim() if is_token else 1 :]))
    return kinds


def _as_tensor(name: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name!r} of the batch is no tensor ({error}). Leave it out, or give numbers.") from error


def _described(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in sorted(tensors.items())) or "nothing"


def _padded_spans(tensors: Mapping[str, Tensor]) -> list[tuple[int, slice]]:
    ids, mask = tensors["input_ids"], tensors.get("attention_mask")
    if mask is None or mask.shape != ids.shape:
        raise ValueError(
            f"Padded input_ids {list(ids.shape)} need an attention_mask of that shape, not "
            f"{None if mask is None else list(mask.shape)}. Without padding it is torch.ones_like(input_ids)."
        )
    spans = []
    for row, real in enumerate(mask.bool()):
        places = real.nonzero()[:, 0].tolist()
        if not places or places[-1] - places[0] + 1 != len(places):
            raise ValueError(
                f"Row {row} of attention_mask has {'no 1' if not places else 'a 0 between its 1s'}: the tokens of a "
                "sequence must follow each other, with padding before or behind them."
            )
        spans.append((row, slice(places[0], places[-1] + 1)))
    return spans


def _packed_spans(tensors: Mapping[str, Tensor]) -> list[slice]:
    total = tensors["input_ids"].shape[0]
    bounds = tensors["cu_seqlens"].tolist() if "cu_seqlens" in tensors else []
    if not bounds or bounds[0] != 0 or bounds[-1] != total or any(end <= start for start, end in pairwise(bounds)):
        raise ValueError(
            f"Packed input_ids [{total}] need cu_seqlens, the boundaries of the sequences that rise from 0 to {total}, "
            f"not {bounds or None}."
        )
    return [slice(start, end) for start, end in pairwise(bounds)]


def _is_per_token(batch: UserBatch, name: str, tensors: Mapping[str, Tensor], num_rows: int) -> bool:
    tensor, ids = tensors[name], tensors["input_ids"]
    by_token = tensor.shape[: ids.dim()] == ids.shape
    by_sequence = tensor.dim() > 0 and tensor.shape[0] == num_rows
    said_token = name in batch.per_token or name in ("input_ids", "attention_mask", "position_ids", "loss_mask")
    said_sequence = name in batch.per_sequence
    if not num_rows:
        return by_token
    is_unclear = ids.dim() == 1 and by_token and by_sequence and not (said_token or said_sequence)
    if is_unclear or not (by_token if said_token else by_sequence if said_sequence else by_token or by_sequence):
        raise ValueError(
            f"{name!r} of the batch has the shape {list(tensor.shape)}. A value per token begins with "
            f"{list(ids.shape)} as input_ids does, one per sequence with [{num_rows}]. Where a shape does not tell, "
            f'give UserBatch(data, per_sequence=["{name}"]) or per_token.'
        )
    return by_token and not said_sequence


# ---- Packing -----------------------------------------------------------------------------------------------------


def dummy_row(kinds: Kinds) -> TokenRow:
    """Returns a sequence of zeros for a rank that has none."""
    tokens = {
        n: torch.zeros((_NUM_DUMMY_TOKENS, *shape), dtype=dtype) for n, (yes, dtype, shape) in kinds.items() if yes
    }
    sequence = {n: torch.zeros(shape, dtype=dtype) for n, (yes, dtype, shape) in kinds.items() if not yes}
    return TokenRow(index=-1, per_token=tokens, per_sequence=sequence)


def pack_rows(rows: Sequence[TokenRow]) -> TokenPack:
    """Lays sequences end to end, shortest first, so that attention can batch equal lengths."""
    rows = sorted(rows, key=lambda row: (row.num_tokens, row.key))
    bounds = tuple(accumulate((row.num_tokens for row in rows), initial=0))
    data = {name: torch.cat([row.per_token[name] for row in rows]) for name in rows[0].per_token}
    data |= {name: torch.stack([row.per_sequence[name] for row in rows]) for name in rows[0].per_sequence}
    data["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32)
    return TokenPack(
        input_ids=data["input_ids"].long(),
        position_ids=torch.cat([torch.arange(row.num_tokens) for row in rows]),
        cu_seqlens=bounds,
        data=data,
        indices=tuple(row.index for row in rows if row.index >= 0),
    )


def rows_of_pack(pack: TokenPack, values: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yields (index, values of the sequence) from one value per token of a pack."""
    pieces = values.split([end - start for start, end in pairwise(pack.cu_seqlens)])
    yield from zip(pack.indices, pieces, strict=False)
