"""Products by tile instructions equal those of float64, up to one rounding of bfloat16 or some of float32."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from lightrl.c_library import find_compiler
from lightrl.engines.native.adapted import AdaptedLinear
from lightrl.engines.native.amx import as_tiles, make_tiles
from lightrl.engines.native.products import FusedLinear, PackedHead, fused_linear
from lightrl.engines.native.row_adapters import NO_ADAPTER, ChosenAdapters
from lightrl.engines.weights.adapters import Factors


def products_or_none(dtype):
    try:
        find_compiler()
    except RuntimeError:
        return None
    return make_tiles(torch.empty(512, 512, dtype=dtype))


make_weight, make_split = products_or_none(torch.bfloat16), products_or_none(torch.float32)
needs_tiles = pytest.mark.skipif(make_weight is None, reason="needs a processor with AMX, and a compiler that knows it")


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def assert_rounded_once(got, expected):
    # bfloat16 has 8 significant bits, so the nearest is within 2**-8; sums in float32 may decide a tie.
    assert got.dtype == torch.bfloat16
    assert_close(got.double(), expected, rtol=2**-8 * 1.01, atol=1e-5)


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@needs_tiles
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("num_rows", [1, 15, 16, 17, 33, 48, 64, 65, 130, 200])
@pytest.mark.parametrize("sizes", [(32, 16), (64, 98), (128, 1), (96, 63), (512, 272)])
def test_any_number_of_rows_and_outputs(num_rows, sizes):
    num_inputs, num_outputs = sizes
    inputs, weight, bias = drawn(num_rows, num_inputs), drawn(num_outputs, num_inputs), drawn(num_outputs)
    expected, tiles = inputs.double() @ weight.double().T, make_weight()
    assert_rounded_once(tiles.product(inputs, weight), expected)
    assert_rounded_once(tiles.product(inputs, weight, bias), expected + bias.double())
    # With numbers around what is written, which must stay.
    hidden = drawn(num_rows + 2, num_outputs)
    before, rows = hidden.double(), hidden[1:-1]
    assert tiles.add_product(rows, inputs, weight)
    assert_rounded_once(rows, expected + before[1:-1])
    assert torch.equal(hidden[[0, -1]].double(), before[[0, -1]])


def test_tiles_hold_pairs_of_inputs_of_each_output():
    weight = torch.arange(17 * 64, dtype=torch.float32).view(17, 64)
    tiles = as_tiles(weight)
    assert tiles.shape == (2, 2, 16, 16, 2)  # 17 outputs are filled up to 32
    assert tiles[0, 1, 3, 5].tolist() == [5 * 64 + 32 + 6, 5 * 64 + 32 + 7]
    assert tiles[1, 0, 0, 0].tolist() == [16 * 64, 16 * 64 + 1]
    assert not tiles[1, :, :, 1:].any()


@needs_tiles
def test_a_row_has_the_same_bits_beside_any_others():
    inputs, weight, tiles = drawn(70, 64), drawn(40, 64), make_weight()
    whole = tiles.product(inputs, weight)
    for row in (0, 20, 69):
        assert torch.equal(tiles.product(inputs[row : row + 1], weight)[0], whole[row])


@needs_tiles
def test_products_of_torch_before_and_after_are_right():
    """Both set the shapes of the processor's tiles, and neither may rely on what the other has set."""
    inputs, weight, tiles = drawn(100, 160), drawn(96, 160), make_weight()
    expected = inputs.double() @ weight.double().T
    for _ in range(3):
        assert_rounded_once(inputs.mm(weight.t()), expected)
        assert_rounded_once(tiles.product(inputs, weight), expected)


@needs_tiles
@pytest.mark.parametrize(
    ("inputs", "weight"),
    [
        (drawn(4, 48), drawn(16, 48)),  # one tile and a half of inputs
        (drawn(4, 64)[:, ::2], drawn(16, 32)),
        (drawn(513, 32), drawn(16, 32)),  # a prompt
    ],
)
def test_what_tiles_do_not_fit_is_left_to_torch(inputs, weight):
    tiles, hidden = make_weight(), torch.ones(len(inputs), len(weight), dtype=torch.bfloat16)
    assert tiles.product(inputs, weight) is None
    assert not tiles.add_product(hidden, inputs, weight)
    assert hidden.eq(1).all()


@needs_tiles
def test_hidden_states_that_are_not_adjacent_are_left_to_torch():
    hidden = drawn(4, 32)[:, ::2]
    before = hidden.clone()
    assert not make_weight().add_product(hidden, drawn(4, 32), drawn(16, 32))
    assert torch.equal(hidden, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_types_have_no_tiles(dtype):
    assert make_tiles(torch.empty(512, 512, dtype=dtype)) is None


def test_float32_weights_of_a_small_model_have_no_tiles():
    assert make_tiles(torch.empty(98, 128)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_of_no_whole_tiles_are_left_to_the_packed_products_of_torch(dtype):
    assert make_tiles(torch.empty(4096, 432, dtype=dtype)) is None


def linears(*num_outputs, num_inputs=64, bias=True):
    torch.manual_seed(0)
    return [nn.Linear(num_inputs, outputs, bias=bias, dtype=torch.bfloat16) for outputs in num_outputs]


@needs_tiles
@torch.no_grad()
@pytest.mark.parametrize("num_inputs", [64, 40], ids=["fits", "left to torch"])
def test_fused_layers_read_the_parameters_of_the_last_refresh(num_inputs):
    layers, inputs = linears(32, 16, num_inputs=num_inputs), drawn(9, num_inputs)
    fused = FusedLinear(layers).packed_as(make_weight())
    for _ in range(2):
        expected = torch.cat([inputs.double() @ layer.weight.double().T + layer.bias.double() for layer in layers], 1)
        assert_rounded_once(fused(inputs), expected)
        for layer in layers:
            layer.weight.mul_(2)
        fused.refresh()


@needs_tiles
@torch.no_grad()
def test_an_adapted_layer_keeps_its_adapters():
    (layer,), inputs, hidden, chosen = linears(32, bias=False), drawn(9, 64), drawn(9, 32), ChosenAdapters()
    layer.adapter_factors = {0: Factors(drawn(4, 64), drawn(32, 4))}
    adapted = AdaptedLinear([layer], chosen=chosen).packed_as(make_weight())
    adapted.refresh()
    down, up = (part.double().T for part in layer.adapter_factors[0])
    wide, base = inputs.double(), hidden.double()
    for adapter, weight in ((0, layer.weight.double().T + down @ up), (NO_ADAPTER, layer.weight.double().T)):
        chosen.rows = adapter
        assert_close(adapted(inputs).double(), wide @ weight, rtol=2**-7, atol=0.2)  # up to 60; rounds three times
    chosen.rows = 0
    adapted.add_to(hidden, inputs)
    assert_close(hidden.double(), base + wide @ (layer.weight.double().T + down @ up), rtol=2**-7, atol=0.3)


@needs_tiles
@torch.no_grad()
def test_a_head_scores_any_vocabulary():
    head, hidden = nn.Linear(64, 61, bias=False, dtype=torch.bfloat16), drawn(5, 64)
    assert_rounded_once(PackedHead(head, make_weight())(hidden), hidden.double() @ head.weight.double().T)


# ---- float32 weights


def drawn_float32(*shape):
    """Draws numbers with all 24 significant bits, of sizes from 1e-3 to 1e3."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator) * 10 ** (6 * torch.rand(shape, generator=generator) - 3)


def assert_float32(got, inputs, weight, added=0.0):
    # MKL's errors also come close to 2**-20 of the sizes; without the third parts they would be 2**-16.
    sizes = inputs.double().abs() @ weight.double().abs().T + abs(added)
    errors = (got.double() - (inputs.double() @ weight.double().T + added)).abs()
    assert got.dtype == torch.float32
    assert (errors <= 2**-20 * sizes + 1e-30).all(), float((errors / sizes).max())


@needs_tiles
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("num_rows", [4, 15, 16, 17, 33, 48, 64, 65, 130, 200, 512])
@pytest.mark.parametrize("sizes", [(32, 16), (64, 98), (128, 1), (96, 63), (160, 33), (512, 272)])
def test_float32_products_of_any_number_of_rows_and_outputs(num_rows, sizes):
    num_inputs, num_outputs = sizes
    inputs, weight = drawn_float32(num_rows, num_inputs), drawn_float32(num_outputs, num_inputs)
    bias, tiles = drawn_float32(num_outputs), make_split()
    assert_float32(tiles.product(inputs, weight), inputs, weight)
    assert_float32(tiles.product(inputs, weight, bias), inputs, weight, bias.double())
    # With numbers around what is written, which must stay.
    hidden = drawn_float32(num_rows + 2, num_outputs)
    before, rows = hidden.clone(), hidden[1:-1]
    assert tiles.add_product(rows, inputs, weight)
    assert_float32(rows, inputs, weight, before[1:-1].double())
    assert torch.equal(hidden[[0, -1]], before[[0, -1]])


@needs_tiles
def test_float32_numbers_of_all_bits_are_multiplied_exactly():
    # (2**24 - 1) * 2**-24 has 24 ones, eight in each part; times 1 and times 2**-10 it is exact in float32.
    number = 1 - 2.0**-24
    inputs, weight = torch.zeros(4, 32), torch.zeros(2, 32)
    inputs[:, 3], weight[0, 3], weight[1, 3] = number, 1.0, 2.0**-10
    assert torch.equal(make_split().product(inputs, weight), torch.tensor([[number, number * 2.0**-10]]).expand(4, 2))
    assert torch.equal(
        make_split().product(weight.repeat(2, 1), inputs)[:2, :1], torch.tensor([[number], [number / 1024]])
    )


@needs_tiles
def test_a_float32_row_has_the_same_bits_beside_any_others():
    inputs, weight, tiles = drawn_float32(70, 192), drawn_float32(40, 192), make_split()
    whole = tiles.product(inputs, weight)
    for row in (0, 20, 66):
        assert torch.equal(tiles.product(inputs[row : row + 4], weight)[0], whole[row])


@needs_tiles
def test_numbers_that_are_not_finite_reach_only_their_own_row_and_output():
    inputs, weight = drawn_float32(20, 64), drawn_float32(40, 64)
    inputs[3, 5], weight[7, 1] = torch.inf, torch.nan
    got = make_split().product(inputs, weight)
    assert not got[3].isfinite().any()
    assert not got[:, 7].isfinite().any()
    assert got[[*range(3), *range(4, 20)]][:, [*range(7), *range(8, 40)]].isfinite().all()


@needs_tiles
@pytest.mark.parametrize(
    ("inputs", "weight"),
    [
        (torch.ones(4, 48), torch.ones(16, 48)),  # one tile and a half of inputs
        (torch.ones(4, 64)[:, ::2], torch.ones(16, 32)),
        (torch.ones(4, 32), torch.ones(32, 16).t()),  # a weight [in, out]
        (torch.ones(3, 32), torch.ones(16, 32)),
        (torch.ones(513, 32), torch.ones(16, 32)),  # a prompt
    ],
)
def test_float32_products_that_tiles_do_not_fit_are_left_to_torch(inputs, weight):
    hidden = torch.ones(len(inputs), len(weight))
    assert make_split().product(inputs, weight) is None
    assert not make_split().add_product(hidden, inputs, weight)
    assert hidden.eq(1).all()


@needs_tiles
@torch.no_grad()
@pytest.mark.parametrize("num_inputs", [512, 1024])
@pytest.mark.parametrize("num_rows", [2, 9])
def test_fused_float32_layers_read_the_parameters_as_they_are(num_inputs, num_rows):
    torch.manual_seed(0)
    layers = [nn.Linear(num_inputs, outputs) for outputs in (512, 64)]
    fused, inputs = fused_linear(layers).packed_as(make_split()), drawn_float32(num_rows, num_inputs)
    for _ in range(2):
        weight, bias = (torch.cat([getattr(layer, name) for layer in layers]) for name in ("weight", "bias"))
        assert_float32(fused(inputs), inputs, weight, bias.double())
        for layer in layers:
            layer.weight.mul_(2)  # without a refresh: nothing is kept
    hidden, weight = drawn_float32(num_rows, 512 + 64), torch.cat([layer.weight for layer in layers])
    before = hidden.double()
    FusedLinear.add_to(fused, hidden, inputs) if num_rows < 4 else fused.add_to(hidden, inputs)
    assert_float32(hidden, inputs, weight, before)
