"""Fingerprints: exact, the same however a tensor is cut, and different for other values or other places."""

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch

from lightrl.engines.weights import fingerprint as module
from lightrl.engines.weights import row_sums
from lightrl.engines.weights.fingerprint import Span, Sums, fingerprint, span_of

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8]


def random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-100, 100, shape, generator=generator)
    return values.to(dtype) if dtype == torch.int8 else (values + torch.rand(shape, generator=generator)).to(dtype)


def wrapped(number: int) -> int:
    """Returns the number modulo 2**64, as int64 shows it."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def share_of(tensor: torch.Tensor, span: Span | None = None) -> int:
    sums = Sums()
    sums.add(tensor, span)
    return int(sums.totals())


@pytest.fixture(params=["compiled", "integers", "float64"], autouse=True, name="_product")
def product(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs every test with compiled sums and the product of integers, where there are, and the one of other devices."""
    monkeypatch.setattr(row_sums, "_library", None)  # an earlier test may have compiled it for the process
    if request.param == "compiled":
        try:
            row_sums.compile_row_sums()
        except RuntimeError as error:
            pytest.skip(str(error))
        if row_sums._library is None:
            pytest.skip("needs a processor with AVX-512 VNNI")
    if request.param == "float64":
        monkeypatch.setattr(module, "_has_exact_product", lambda: False)


def factors_of_places() -> list[list[int]]:
    return module._matrix(torch.device("cpu"), torch.int8).t().tolist()


def numbers_of_places() -> list[int]:
    factors = module._odd_numbers(3 << 32, 2).tolist()
    return [sum(value * factor for value, factor in zip(row, factors, strict=True)) for row in factors_of_places()]


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_sum_of_bytes_times_the_numbers_of_their_places(dtype: torch.dtype) -> None:
    tensor = random(dtype, 6, 5000)
    places, rows = numbers_of_places(), module._odd_numbers(0, 300).tolist()
    content = tensor.view(torch.int8).flatten().tolist()
    expected = sum(byte * places[i % 4096] * rows[i // 4096] for i, byte in enumerate(content))
    assert fingerprint(tensor) == (wrapped(expected), 30_000)


def test_it_does_not_depend_on_how_many_rows_are_read_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = random(torch.float32, 70, 301)  # more than 20 rows of bytes
    own = fingerprint(tensor)
    monkeypatch.setattr(module, "_IN_CACHE", 8)
    monkeypatch.setattr(module, "_ON_DEVICE", 8)
    assert fingerprint(tensor) == own


def test_no_two_changed_bytes_of_a_row_cancel_out() -> None:
    rows = factors_of_places()
    assert {math.gcd(*row) for row in rows} == {1}
    assert len({max((a, b), (-a, -b)) for a, b in rows}) == 4096  # so no two are multiples of each other
    assert max(abs(value) for row in rows for value in row) <= 63


def test_the_two_sums_of_a_row_do_not_cancel_out_either() -> None:
    first, second = module._odd_numbers(3 << 32, 2).tolist()
    # The pairs (x, y) with x * first + y * second = 0 modulo 2**64 are a lattice; Gauss's reduction ends with the
    # shortest. A change of a row moves its sums by less than 4096 * 255 * 63 < 2**26.
    long, short = (1 << 64, 0), (-second * pow(first, -1, 1 << 64) % (1 << 64), 1)
    while True:
        long, short = sorted((long, short), key=lambda pair: -math.hypot(*pair))
        times = round(Fraction(long[0] * short[0] + long[1] * short[1], short[0] ** 2 + short[1] ** 2))
        if not times:
            break
        long = (long[0] - times * short[0], long[1] - times * short[1])
    assert (short[0] * first + short[1] * second) % (1 << 64) == 0
    assert max(map(abs, short)) > 1 << 28


def test_any_stride_is_read() -> None:
    rows = random(torch.float32, 20, 5)
    for tensor in (rows[:1, 0], rows[:1, :1], rows[:, 2], rows[:0, 0], rows.t(), rows[3, 3]):
        assert fingerprint(tensor) == fingerprint(torch.tensor(tensor.tolist()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_shards_add_up_however_they_are_cut(dtype: torch.dtype) -> None:
    whole = random(dtype, 70, 141)  # of an odd width: rows begin within words
    total = fingerprint(whole).total

    def share(rows: slice, columns: slice) -> int:
        part = whole[rows, columns]
        span = span_of(whole.shape, part.shape, (rows.start, columns.start))
        assert span.width == (0 if part.shape[1] == 141 else part.shape[1])
        return share_of(part, span)

    everything = slice(0, 141)
    assert wrapped(sum(share(rows, everything) for rows in (slice(0, 23), slice(23, 70), slice(70, 70)))) == total
    halves = [slice(0, 71), slice(71, 141)]
    assert wrapped(sum(share(slice(0, 70), columns) for columns in halves)) == total
    grid = [(rows, columns) for rows in (slice(0, 9), slice(9, 70)) for columns in halves]
    assert wrapped(sum(share(*place) for place in grid)) == total
    flat = whole.reshape(-1)
    cuts = [0, 1, 5000, 5001, 9001, 9870]
    pieces = [share_of(flat[a:b], Span(a)) for a, b in pairwise(cuts)]
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_two_values_that_differ_in_the_sign_alone_do_not_change_places_unseen(dtype: torch.dtype) -> None:
    tensor = torch.ones(64, 130, dtype=dtype)
    tensor[3, 1] = -1.0
    own = fingerprint(tensor)
    for row, column in ((3, 3), (3, 129), (60, 1), (0, 0)):
        moved = torch.ones(64, 130, dtype=dtype)
        moved[row, column] = -1.0
        assert fingerprint(moved) != own


def test_many_tensors_are_summed_as_each_alone() -> None:
    tensors = [random(dtype, *shape) for dtype in DTYPES for shape in ((3,), (70, 141), (5, 5), (300, 301), (0,))]
    sums = Sums()
    for tensor in tensors:
        sums.add(tensor)
    assert sums.totals().tolist() == [fingerprint(tensor).total for tensor in tensors]
    lent, sums = tensors[0].clone(), Sums()
    sums.add(lent, is_lent=True)
    lent.zero_()
    assert int(sums.totals()) == fingerprint(tensors[0]).total
    assert Sums().totals().tolist() == []


def test_the_product_of_integers_is_checked_before_its_use(monkeypatch: pytest.MonkeyPatch) -> None:
    check = module._has_exact_product.__wrapped__ if hasattr(module._has_exact_product, "__wrapped__") else None
    if check is None:
        return  # the parameter that replaces it

    def saturating(rows: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_((rows.int() @ matrix.int()).clamp_max(1 << 20))

    for broken in (saturating, None):
        monkeypatch.setattr(torch, "_int_mm", broken, raising=False)
        assert not check()
