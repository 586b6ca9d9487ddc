"""Fingerprints of tensors: exact sums over their bytes, in which every position counts and shards add up.

A tensor is read once, as rows of bytes. Each byte is multiplied by a number for its position in the whole tensor, and
the products are added modulo 2**64. The order of the sum does not matter, so the fingerprints of shards add up to that
of the whole tensor, whatever the device. One changed byte always shows, and so do any two in a row of 4096. Four random
bytes, such as one float32 value, go unnoticed with a chance of about 1 in 2**28; each further row that changes
multiplies the chance by as much, down to 1 in 2**60.

The number of a position is that of its place in a row times that of the row. The first is a sum of two products, since
rows of bytes times a vector of small integers is what processors compute fastest, about as fast as they read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightrl.engines.weights.row_sums import ROW, row_sums

_NUM_SUMS = 2  # sums of each row
_IN_CACHE = 1 << 8  # rows that a CPU reads once per sum
_SMALLEST, _LARGEST = 9, 63  # of the matrix: with 7 bits, products on processors without VNNI do not saturate
_SMALL = 1 << 16  # bytes below which a tensor is read together with others
_STAGED_BYTES = 1 << 18
_WAITING_ROWS = 1 << 18  # rows whose products wait for the rest of the sum
_ON_DEVICE = 1 << 10  # rows that an accelerator converts at a time


class Fingerprint(NamedTuple):
    """A sum over the bytes of a whole tensor, modulo 2**64, and the number of elements."""

    total: int
    numel: int


class Placed(NamedTuple):
    """A weight that is proven in the engine's own memory, where the trainer's ranks wrote it."""

    fingerprint: Fingerprint
    memory: Tensor

    def has_beside(self, tensor: Tensor) -> bool:
        """Returns whether a tensor is somewhere in the same storage."""
        return bool(tensor.untyped_storage()._cdata == self.memory.untyped_storage()._cdata)


# What is known of a weight before it is sent: its fingerprint or, if it is sent by reference, the trainer's own tensor,
# whose memory then proves it without reading it.
KnownWeight: TypeAlias = Fingerprint | Placed | Tensor
KnownWeights: TypeAlias = Mapping[str, KnownWeight]  # keyed by Hugging Face name


class Span(NamedTuple):
    """The places of a shard's elements in the flattened whole tensor: runs of `width`, `pitch` apart.

    Width 0 means that all elements are consecutive.
    """

    start: int = 0
    width: int = 0
    pitch: int = 0


def span_of(whole: Sequence[int], part: Sequence[int], offsets: Sequence[int]) -> Span:
    """Returns the span of a part that begins at these offsets and is cut along dim 0 and at most one other dim."""
    cut = [dim for dim in range(1, len(whole)) if part[dim] != whole[dim]]
    assert len(cut) < 2, (whole, part)
    start = sum(offset * math.prod(whole[dim + 1 :]) for dim, offset in enumerate(offsets))
    if not cut:
        return Span(start)
    return Span(start, math.prod(part[cut[0] :]), math.prod(whole[cut[0] :]))


def fingerprint(tensor: Tensor) -> Fingerprint:
    """Returns the fingerprint of a whole tensor."""
    sums = Sums()
    sums.add(tensor)
    return Fingerprint(int(sums.totals()), tensor.numel())


def fingerprint_of(known: KnownWeight) -> Fingerprint:
    """Returns the fingerprint of a known weight, computing it if a tensor is known."""
    if isinstance(known, Placed):
        return known.fingerprint
    return fingerprint(known) if isinstance(known, Tensor) else known


class Sums:
    """The sums of many tensors or shards; small ones are read together."""

    def __init__(self) -> None:
        self._count = 0
        self._products: list[Tensor] = []  # products of rows with the matrix
        self._places: list[_Rows] = []  # of these rows
        self._num_waiting = 0  # rows
        self._totals: list[tuple[Tensor, Tensor]] = []  # tensors, and parts of their sums
        self._staged: list[Tensor] = []  # whole rows of small tensors
        self._staged_places: list[_Rows] = []
        self._num_bytes = 0  # staged

    def add(self, tensor: Tensor, span: Span | None = None, *, is_lent: bool = False) -> None:
        """Adds the next tensor's or shard's share of the sum. is_lent: its memory may be gone after the call."""
        tensor, span = tensor.detach(), span or Span()
        for part, start in _in_order(tensor, span) if span.width else ((tensor, span.start),):
            content = part.contiguous().reshape(-1).unsqueeze(-1).view(torch.int8).view(-1)  # of any stride
            size, first_byte = content.numel(), start * part.element_size()
            if size <= _SMALL:
                self._stage(content.clone() if is_lent else content, first_byte)
            else:
                self._read(content, first_byte)
        self._count += 1

    def totals(self) -> Tensor:
        """Returns the sums in the order of the tensors, [n] int64 in host memory."""
        self._read_staged()
        self._sum_products()
        totals = torch.zeros(self._count, dtype=torch.int64)
        for owners, shares in self._totals:
            totals.index_add_(0, owners, shares.cpu())
        return totals

    def _read(self, content: Tensor, start: int) -> None:
        """Adds consecutive bytes that begin at byte `start` of the whole tensor."""
        head = -start % ROW  # bytes up to the first whole row
        num_rows = (content.numel() - head) // ROW
        end = head + num_rows * ROW
        self._multiply(content[head:end].view(num_rows, ROW), [_Rows(self._count, (start + head) // ROW, num_rows)])
        if head or end < content.numel():
            self._stage(content[:head].clone(), start)
            self._stage(content[end:].clone(), start + end)

    def _stage(self, content: Tensor, start: int) -> None:
        """Keeps bytes that fill only a few rows or a part of one, with zeros around them."""
        size, lead = content.numel(), start % ROW
        if not size:
            return
        if self._num_bytes > _STAGED_BYTES or (self._staged and self._staged[0].device != content.device):
            self._read_staged()
        tail = -(lead + size) % ROW
        zeros = torch.zeros(ROW, dtype=torch.int8, device=content.device) if lead or tail else content
        self._staged += [zeros[:lead], content, zeros[:tail]] if lead or tail else [content]
        self._staged_places.append(_Rows(self._count, start // ROW, (lead + size + tail) // ROW))
        self._num_bytes += lead + size + tail

    def _read_staged(self) -> None:
        if self._staged:
            self._multiply(torch.cat(self._staged).view(-1, ROW), self._staged_places)
            self._staged, self._staged_places, self._num_bytes = [], [], 0

    def _multiply(self, rows: Tensor, places: list[_Rows]) -> None:
        if self._products and self._products[0].device != rows.device:
            self._sum_products()
        self._products.append(_product(rows))
        self._places += places
        self._num_waiting += len(rows)
        if self._num_waiting > _WAITING_ROWS:
            self._sum_products()

    def _sum_products(self) -> None:
        if not self._products:
            return
        owners, firsts, nums = np.array(self._places).T
        ends = nums.cumsum()
        indices = torch.from_numpy(np.arange(ends[-1]) + (firsts - ends + nums).repeat(nums))
        products = torch.cat(self._products, 1).to(torch.int64)
        factors = _row_factors(products.device, int((firsts + nums).max()))[indices.to(products.device)]
        shares = (products * _sum_factors(products.device)).sum(0) * factors
        self._totals.append((torch.from_numpy(owners.repeat(nums)), shares))
        self._products, self._places, self._num_waiting = [], [], 0


class _Rows(NamedTuple):
    """Consecutive rows of bytes of a whole tensor."""

    owner: int
    first: int
    num: int


def _in_order(tensor: Tensor, span: Span) -> Iterator[tuple[Tensor, int]]:
    """Puts a shard cut by columns into rows of zeros, which add nothing; yields parts and their first places."""
    column, runs = span.start % span.pitch, tensor.reshape(-1, span.width)
    num_runs = max(1, _STAGED_BYTES // (span.pitch * tensor.element_size()))
    for first in range(0, len(runs), num_runs):
        some = runs[first : first + num_runs]
        whole = some.new_zeros(len(some), span.pitch)
        whole[:, column : column + span.width] = some
        yield whole, span.start - column + first * span.pitch


def _product(rows: Tensor) -> Tensor:
    """Returns the product of rows of bytes and the matrix, [_NUM_SUMS, rows] integers."""
    if rows.device.type == "cpu":
        sums = row_sums(rows, _matrix(rows.device, torch.int8))
        if sums is not None:
            return sums
        if _has_exact_product():
            return _integer_product(rows)
    matrix = _matrix(rows.device, torch.float64)  # exact: a sum is below 2**31
    return torch.cat([matrix.mm(part.to(torch.float64).t()).to(torch.int32) for part in rows.split(_ON_DEVICE)], 1)


def _integer_product(rows: Tensor) -> Tensor:
    """Computes the product vector by vector, as oneDNN leaves most of a CPU idle with a matrix of few columns."""
    sums = torch.empty(_NUM_SUMS, len(rows), 1, dtype=torch.int32)
    columns = _matrix(rows.device, torch.int8).unsqueeze(2)
    for start in range(0, len(rows), _IN_CACHE):
        part = rows[start : start + _IN_CACHE]
        for column, own in zip(columns, sums, strict=True):
            torch._int_mm(part, column, out=own[start : start + _IN_CACHE])
    return sums.squeeze(2)


@functools.lru_cache
def _has_exact_product() -> bool:
    """Returns whether torch's product of 8-bit integers works on this processor without saturating."""
    signs = torch.from_numpy(_odd_numbers(2 << 32, 4 * ROW)).view(4, ROW) >> 63
    rows, matrix = (signs ^ 127).to(torch.int8), _matrix(torch.device("cpu"), torch.int8)
    worst = torch.where(matrix[0] > 0, 127, -128).to(torch.int8)
    rows = torch.cat([rows, worst.expand(28, -1)])
    try:
        got = _integer_product(rows)
    except (RuntimeError, AttributeError, TypeError):
        return False
    return torch.equal(got.to(torch.float64), matrix.to(torch.float64).mm(rows.to(torch.float64).t()))


# ---- The numbers -------------------------------------------------------------------------------------------------


@functools.lru_cache
def _matrix(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Returns [_NUM_SUMS, ROW]: the numbers of a place are parallel to no other's.

    So two changed bytes of a row never cancel out in both of its sums.
    """
    pairs = np.mgrid[_SMALLEST : _LARGEST + 1, -_LARGEST : _LARGEST + 1].reshape(2, -1)
    pairs = pairs[:, np.gcd(*pairs) == 1]
    chosen = _odd_numbers(1 << 32, pairs.shape[1])
    signs = 1 - (chosen >> 31 & 2)
    order = chosen.argsort()[:ROW]
    return torch.from_numpy((pairs * signs)[:, order].astype(np.int8)).to(device, dtype).contiguous()


@functools.lru_cache
def _sum_factors(device: torch.device) -> Tensor:
    """Returns a factor for each of the sums of a row, [_NUM_SUMS, 1]."""
    return torch.from_numpy(_odd_numbers(3 << 32, _NUM_SUMS)).to(device).unsqueeze(1)


def _row_factors(device: torch.device, count: int) -> Tensor:
    return _many_row_factors(device, 1 << max(8, (count - 1).bit_length()))[:count]


@functools.lru_cache
def _many_row_factors(device: torch.device, count: int) -> Tensor:
    return torch.from_numpy(_odd_numbers(0, count)).to(device)


def _odd_numbers(start: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Returns pseudo-random odd numbers, by splitmix64 (https://doi.org/10.1145/2714064.2660195)."""
    values = np.arange(start + 1, start + 1 + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (values ^ (values >> np.uint64(31)) | np.uint64(1)).view(np.int64)
