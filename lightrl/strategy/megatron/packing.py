"""Lays a pack out for Megatron: pads it so that ranks can split it, and takes this rank's tokens."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from lightrl.records import PackedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """This rank's tokens of a micro-batch, with what attention and the output head need."""

    cu_seqlens: tuple[int, ...]  # tokens of the whole pack, padding included
    source: Tensor  # [t] int64: which token of the micro-batch each of this rank's is; 0 for padding
    where: Tensor  # [T] int64: where this rank holds each token of the micro-batch; -1: another rank holds it
    own_positions: tuple[Tensor, ...]  # per sequence: the positions of this rank's tokens in it
    joined: Tensor | None  # order of all ranks' tokens, gathered, that is the pack's; None: this rank holds all
    angles: tuple[Tensor, Tensor] | None = None  # cosines and sines of the rotary embedding, [t, 1, head size]
    experts: Tensor | None = None  # [t, layers, k] of the tokens that this rank's routers see; None: their own choice


def lay_out(batch: PackedBatch, *, num_parts: int, part: int, multiple: int) -> Pack:
    """Pads each sequence to 2 x num_parts equal pieces; a rank takes one from the beginning and one from the end.

    Early tokens attend to few others and late ones to many, so taking from both ends gives each rank equal work.

    Args:
        num_parts: the number of ranks that split the tokens of each sequence.
        multiple: each rank's number of tokens must be a multiple of this (sequence parallelism).
    """
    lengths = [end - start for start, end in pairwise(batch.cu_seqlens)]
    piece = 2 * num_parts if num_parts > 1 else 1
    padded = [-(-length // piece) * piece for length in lengths]
    while sum(padded) // num_parts % multiple:
        padded[-1] += piece
    device = batch.input_ids.device
    starts = [0]
    for length in padded:
        starts.append(starts[-1] + length)
    owned = [own_positions(length, num_parts, part, device) for length in padded]
    first_tokens = batch.cu_seqlens[:-1]
    is_real = torch.cat([own < length for own, length in zip(owned, lengths, strict=True)])
    source = torch.cat([own + first for own, first in zip(owned, first_tokens, strict=True)]) * is_real
    where = torch.full((batch.cu_seqlens[-1],), -1, device=device)
    where[source[is_real]] = torch.arange(source.shape[0], device=device)[is_real]
    return Pack(
        cu_seqlens=tuple(starts),
        source=source,
        where=where,
        own_positions=tuple(owned),
        joined=_joined(starts, padded, num_parts, device) if num_parts > 1 else None,
    )


def own_positions(length: int, num_parts: int, part: int, device: torch.device) -> Tensor:
    """Returns the positions of a sequence that a rank holds: the piece number `part` from either end."""
    if num_parts == 1:
        return torch.arange(length, device=device)
    pieces = torch.arange(length, device=device).chunk(2 * num_parts)
    return torch.cat([pieces[part], pieces[2 * num_parts - 1 - part]])


def _joined(starts: list[int], lengths: list[int], num_parts: int, device: torch.device) -> Tensor:
    """Returns the order that turns the tokens of all ranks, concatenated by rank, into the pack."""
    held = [
        torch.cat([own_positions(n, num_parts, part, device) + s for s, n in zip(starts, lengths, strict=False)])
        for part in range(num_parts)
    ]
    return torch.cat(held).argsort()
