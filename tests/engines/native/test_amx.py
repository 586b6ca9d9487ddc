"""Products by tile instructions equal those of float64, up to one rounding to bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from lightrl.c_library import find_compiler
from lightrl.engines.native.adapted import AdaptedLinear
from lightrl.engines.native.amx import as_tiles, make_tiles
from lightrl.engines.native.products import FusedLinear, PackedHead
from lightrl.engines.native.row_adapters import NO_ADAPTER, ChosenAdapters
from lightrl.engines.weights.adapters import Factors


def products_or_none():
    try:
        find_compiler()
    except RuntimeError:
        return None
    return make_tiles(torch.empty(0, dtype=torch.bfloat16))


make_weight = products_or_none()
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_types_have_no_tiles(dtype):
    assert make_tiles(torch.empty(0, dtype=dtype)) is None


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
