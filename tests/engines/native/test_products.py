import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from lightrl.engines.native import products
from lightrl.engines.native.products import FusedLinear, PackedHead, PackedWeight, fused_linear, is_worth_packing

CAN_PACK = products._can_pack(torch.float32)
needs_packing = pytest.mark.skipif(not CAN_PACK, reason="torch has no packed products on this processor")


def test_fused_linear_equals_its_layers_and_follows_their_parameters():
    layers = [nn.Linear(3, 2), nn.Linear(3, 4)]
    inputs = torch.randn(5, 3)
    expected = torch.cat([layer(inputs) for layer in layers], dim=1)
    fused = FusedLinear(layers)
    assert_close(fused(inputs), expected)
    with torch.no_grad():
        layers[1].weight.fill_(1.0)
        layers[1].bias.fill_(0.5)
    assert_close(fused(inputs)[:, 2:], (inputs.sum(1, keepdim=True) + 0.5).expand(-1, 4))


def test_refresh_fuses_parameters_that_got_storage_of_their_own():
    layers = [nn.Linear(3, 2, bias=False), nn.Linear(3, 4, bias=False)]
    fused = FusedLinear(layers)
    layers[0].weight.data = torch.ones(2, 3)
    fused.refresh()
    inputs = torch.randn(5, 3)
    assert_close(fused(inputs), torch.cat([layer(inputs) for layer in layers], dim=1))


@pytest.mark.parametrize("are_turned", [True, False])
def test_refresh_uses_parameters_that_lie_side_by_side_elsewhere(are_turned):
    layers = [nn.Linear(3, 2), nn.Linear(3, 4)]
    fused = FusedLinear(layers)
    memory = torch.arange(24.0)  # two numbers, weights for [6, 3], and four more numbers
    whole = memory[2:20].view(3, 6).t() if are_turned else memory[2:20].view(6, 3)
    layers[0].weight.data, layers[1].weight.data = whole.split([2, 4])
    layers[0].bias.data, layers[1].bias.data = torch.arange(6.0).split([2, 4])
    inputs = torch.randn(5, 3)
    expected = torch.cat([layer(inputs) for layer in layers], dim=1)
    fused.refresh()
    assert_close(fused(inputs), expected)
    is_there = layers[1].weight.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
    assert is_there == are_turned  # weights [out, in] are turned, and move for that
    layers[0].weight.data = torch.ones(2, 3)
    fused.refresh()
    assert_close(fused(inputs), torch.cat([layer(inputs) for layer in layers], dim=1))


@needs_packing
@pytest.mark.parametrize("num_rows", [1, 3, 16, 100])
@pytest.mark.parametrize("has_bias", [False, True])
def test_packed_layers_equal_plain_ones_for_any_number_of_rows(num_rows, has_bias, monkeypatch):
    monkeypatch.setitem(products.LEAST_PACKED, torch.float32, 1)
    torch.manual_seed(0)
    layers = [nn.Linear(40, 24, bias=has_bias), nn.Linear(40, 8, bias=has_bias)]
    fused, inputs = fused_linear(layers), torch.randn(num_rows, 40)
    plain = torch.cat([layer(inputs) for layer in layers], dim=1)
    with torch.inference_mode():
        assert_close(fused(inputs), plain, atol=1e-6, rtol=1e-5)
        assert fused._packed._packed is not None
        hidden = torch.ones(num_rows, 32)
        fused.add_to(hidden, inputs)
    expected = 1 + F.linear(inputs, torch.cat([layer.weight for layer in layers]))
    assert_close(hidden, expected, atol=2e-6, rtol=1e-5)


@needs_packing
def test_packed_weights_follow_a_refresh_and_give_their_memory_back(monkeypatch):
    monkeypatch.setitem(products.LEAST_PACKED, torch.float32, 1)
    head = nn.Linear(3, 2, bias=False)
    logits, inputs = PackedHead(head), torch.tensor([[1.0, 2.0, 4.0]])
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0, 0.0, 1.0], [0.0, 3.0, 0.0]]))
        assert logits(inputs).tolist() == [[5.0, 6.0]]  # 1 + 4 and 3 * 2
        head.weight.mul_(2)
        logits.refresh()
        assert logits._packed._packed is None
        assert logits(inputs).tolist() == [[10.0, 12.0]]


@needs_packing
def test_small_layers_and_other_types_are_left_alone():
    assert not is_worth_packing(torch.empty(511, 512))
    assert is_worth_packing(torch.empty(512, 512))
    assert not is_worth_packing(torch.empty(512, 512, dtype=torch.float64))
    assert not is_worth_packing(torch.empty(512, 512, device="meta"))
    assert PackedWeight().product(torch.empty(1, 512), torch.empty(511, 512)) is None


def test_layers_that_are_packed_lie_as_the_trainer_sends_them(monkeypatch):
    for is_packed in (False, True):
        monkeypatch.setattr(products, "is_worth_packing", lambda *weights, is_packed=is_packed: is_packed)
        layers = [nn.Linear(3, 2, bias=False), nn.Linear(3, 4, bias=False)]
        fused_linear(layers)
        assert layers[1].weight.is_contiguous() == is_packed
