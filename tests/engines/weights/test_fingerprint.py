"""Fingerprints: exact, the same however a tensor is cut, and different for other values or other places."""

from itertools import pairwise

import pytest
import torch

from lightrl.engines.weights import fingerprint as module
from lightrl.engines.weights.fingerprint import Span, fingerprint, span_of, weighted_sum

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8]


def random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-100, 100, shape, generator=generator)
    return values.to(dtype) if dtype == torch.int8 else (values + torch.rand(shape, generator=generator)).to(dtype)


def wrapped(number: int) -> int:
    """Returns the number modulo 2**64, as int64 shows it."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_sum_of_words_times_the_factors_of_their_places(dtype: torch.dtype) -> None:
    tensor = random(dtype, 3, 5000)
    factors, blocks = module._odd_numbers(1 << 32, 4096).tolist(), module._odd_numbers(0, 8).tolist()
    content = bytes(tensor.view(torch.uint8).numpy().tobytes())
    words = [int.from_bytes(content[start : start + 8], "little") for start in range(0, len(content), 8)]
    expected = sum(word * factors[i % 4096] * blocks[i // 4096] for i, word in enumerate(words) if i < 32768)
    assert fingerprint(tensor) == (wrapped(expected), 15000)
    assert all(number % 2 for number in (*factors, *blocks))


@pytest.mark.parametrize("dtype", DTYPES)
def test_shards_add_up_however_they_are_cut(dtype: torch.dtype) -> None:
    whole = random(dtype, 70, 141)  # of an odd width: rows begin within words
    total = fingerprint(whole).total

    def share(rows: slice, columns: slice) -> int:
        part = whole[rows, columns]
        span = span_of(whole.shape, part.shape, (rows.start, columns.start))
        assert span.width == (0 if part.shape[1] == 141 else part.shape[1])
        return int(weighted_sum(part, span))

    everything = slice(0, 141)
    assert wrapped(sum(share(rows, everything) for rows in (slice(0, 23), slice(23, 70), slice(70, 70)))) == total
    halves = [slice(0, 71), slice(71, 141)]
    assert wrapped(sum(share(slice(0, 70), columns) for columns in halves)) == total
    grid = [(rows, columns) for rows in (slice(0, 9), slice(9, 70)) for columns in halves]
    assert wrapped(sum(share(*place) for place in grid)) == total
    flat = whole.reshape(-1)
    cuts = [0, 1, 5000, 5001, 9001, 9870]
    pieces = [int(weighted_sum(flat[a:b], Span(a))) for a, b in pairwise(cuts)]
    assert wrapped(sum(pieces)) == total
    assert fingerprint(flat[3:9]) == fingerprint(flat[3:9].clone())  # a view that begins within a word


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_changed_or_moved_value_shows(dtype: torch.dtype) -> None:
    tensor = random(dtype, 64, 130)
    own = fingerprint(tensor)
    assert own == fingerprint(tensor.clone())
    changed = tensor.clone()
    changed[5, 7] *= 1.01
    others = [changed, -tensor, tensor[:63], tensor[torch.arange(63, -1, -1)], tensor.roll(1, 1), tensor + 0.5]
    others += [tensor[[1, 0, *range(2, 64)]], tensor[:, [*range(128), 129, 128]]]
    assert all(own != fingerprint(other) for other in others)


def test_the_bits_count() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert fingerprint(nan) == fingerprint(nan.clone())
    assert fingerprint(torch.tensor([0.0])) != fingerprint(torch.tensor([-0.0]))
    assert fingerprint(torch.zeros(5)) == (0, 5)
    assert fingerprint(torch.zeros(5)) != fingerprint(torch.zeros(6))
    assert fingerprint(torch.zeros(0)) == (0, 0)
