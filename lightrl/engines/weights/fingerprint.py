"""Fingerprints of tensors: exact sums over their bits, which shards add up to and in which every position counts.

A tensor is read once, as whole numbers of 64 bits. Each is multiplied by an odd number that belongs to its position in
the whole tensor, and all are added modulo 2**64. The order of the sum does not matter, so the fingerprints of shards
add up to that of the whole tensor, whatever the device. One changed element always shows, and rows that changed places
show but for a small chance. Two single elements that changed places may not: if both lie high in their words, the
highest bits of the sum alone tell them apart, and a difference in the sign bit alone is lost.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_BLOCK = 1 << 12  # words that share a factor; their other factors fit into a core's first cache
_ON_DEVICE = 1 << 22  # words of a copy that an accelerator makes at a time
_SLOWLY = 1 << 20  # elements that are taken one by one at a time
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Fingerprint(NamedTuple):
    """A sum over the bits of a whole tensor, modulo 2**64, and the number of its elements."""

    total: int
    numel: int


class Span(NamedTuple):
    """The places of a shard's elements in the flattened whole tensor: `width` in a row, then a step of `pitch`.

    Width 0 means that all of them follow each other.
    """

    start: int = 0
    width: int = 0
    pitch: int = 0


def span_of(whole: Sequence[int], part: Sequence[int], offsets: Sequence[int]) -> Span:
    """Returns the span of a part that begins at the offsets; it may be cut along dim 0 and one other dimension."""
    cut = [dim for dim in range(1, len(whole)) if part[dim] != whole[dim]]
    assert len(cut) < 2, (whole, part)
    start = sum(offset * int(np.prod(whole[dim + 1 :])) for dim, offset in enumerate(offsets))
    if not cut:
        return Span(start)
    return Span(start, int(np.prod(part[cut[0] :])), int(np.prod(whole[cut[0] :])))


def fingerprint(tensor: Tensor) -> Fingerprint:
    """Returns the fingerprint of a whole tensor."""
    return Fingerprint(int(weighted_sum(tensor)), tensor.numel())


@torch.no_grad()
def weighted_sum(tensor: Tensor, span: Span | None = None) -> Tensor:
    """Returns a tensor's, or a shard's, share of the sum: int64, without dimensions, on its device."""
    span = span or Span()
    size = tensor.element_size()
    bits = tensor.detach().reshape(-1).view(_BITS[size])
    per_word = 8 // size
    if span.width or span.start % per_word:
        return _sum_one_by_one(bits, span)
    if bits.storage_offset() % per_word:
        bits = bits.clone()
    num_words = bits.numel() // per_word
    end = num_words * per_word
    total = _sum_words(bits[:end].view(torch.int64), span.start // per_word)
    if end < bits.numel():
        total = total + _sum_one_by_one(bits[end:], Span(span.start + end))
    return total


def _sum_words(words: Tensor, first: int) -> Tensor:
    """Sums words that follow each other, from word `first` of the whole tensor on."""
    factors, num_words = _factors(words.device), words.numel()
    ahead = min(-first % _BLOCK, num_words)  # up to the first whole block
    num_blocks = (num_words - ahead) // _BLOCK
    end, block = ahead + num_blocks * _BLOCK, (first + ahead) // _BLOCK
    shares = []
    if ahead:
        shares.append(_dot(words[:ahead], factors[first % _BLOCK :][:ahead]) * _block_factor(first // _BLOCK))
    if num_blocks:
        blocks = words[ahead:end].view(num_blocks, _BLOCK)
        shares.append(_dot(_times(blocks, factors), _block_factors(words.device, block + num_blocks)[block:]))
    if end < num_words:
        shares.append(_dot(words[end:], factors[: num_words - end]) * _block_factor(block + num_blocks))
    return functools.reduce(torch.add, shares) if shares else words.new_zeros(())


def _times(blocks: Tensor, factors: Tensor) -> Tensor:
    """Returns the product of a matrix and a vector, which has no kernel for whole numbers on accelerators."""
    if blocks.device.type == "cpu":
        return blocks.mv(factors)
    return torch.cat([(part * factors).sum(1) for part in blocks.split(_ON_DEVICE // _BLOCK)])


def _dot(first: Tensor, second: Tensor) -> Tensor:
    return first.dot(second) if first.device.type == "cpu" else (first * second).sum()


def _sum_one_by_one(bits: Tensor, span: Span) -> Tensor:
    """Sums elements that lie in no whole words: each is shifted to its place in the word that holds it."""
    size = bits.element_size()
    per_word, mask = 8 // size, (1 << 8 * size) - 1
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    if not bits.numel():
        return total
    factors = _factors(bits.device)
    for start in range(0, bits.numel(), _SLOWLY):
        part = bits[start : start + _SLOWLY].to(torch.int64)
        part = part & mask if size < 8 else part
        place = torch.arange(start, start + part.numel(), device=bits.device)
        if span.width:
            place = place // span.width * span.pitch + place % span.width
        place += span.start
        word = place // per_word
        blocks = _block_factors(bits.device, int(word[-1]) // _BLOCK + 1)  # places only grow
        total += ((part << place % per_word * (8 * size)) * (factors[word % _BLOCK] * blocks[word // _BLOCK])).sum()
    return total


# ---- The factors -------------------------------------------------------------------------------------------------


@functools.lru_cache
def _factors(device: torch.device) -> Tensor:
    """Returns a factor for each word of a block."""
    return torch.from_numpy(_odd_numbers(1 << 32, _BLOCK)).to(device)


def _block_factors(device: torch.device, count: int) -> Tensor:
    """Returns a factor for each of the first blocks."""
    return _many_block_factors(device, 1 << max(8, (count - 1).bit_length()))[:count]


@functools.lru_cache
def _many_block_factors(device: torch.device, count: int) -> Tensor:
    return torch.from_numpy(_odd_numbers(0, count)).to(device)


def _block_factor(block: int) -> int:
    return int(_block_factors(torch.device("cpu"), block + 1)[block])


def _odd_numbers(start: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Returns odd numbers that look random, by splitmix64 (https://doi.org/10.1145/2714064.2660195)."""
    values = np.arange(start + 1, start + 1 + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (values ^ (values >> np.uint64(31)) | np.uint64(1)).view(np.int64)
