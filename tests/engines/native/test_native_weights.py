import pytest
import torch
from torch.testing import assert_close

from lightrl.engines.base import WeightSyncError
from lightrl.engines.native.engine import NativeEngine


def make_engine(model) -> NativeEngine:
    return NativeEngine(model, eos_token_ids=(2,), device=torch.device("cpu"))


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "qwen3_moe"])
def test_weights_are_copied_in_place_and_tied_ones_may_come_once_or_twice(family, tiny_model):
    engine, source = make_engine(tiny_model(family)), tiny_model(family, 1)
    storages = {name: parameter.data_ptr() for name, parameter in engine.model.named_parameters()}
    for version, keep_duplicates in enumerate((False, True)):
        engine.load_weights(list(source.named_parameters(remove_duplicate=not keep_duplicates)), version)
        pairs = zip(engine.model.named_parameters(), source.named_parameters(), strict=True)
        for (name, got), (_, expected) in pairs:
            assert got.data_ptr() == storages[name]
            assert_close(got, expected, atol=0, rtol=0)


def test_weights_that_do_not_fit_are_all_named(tiny_model):
    engine, source = make_engine(tiny_model("qwen3")), tiny_model("qwen3")
    weights = [(name, tensor) for name, tensor in source.named_parameters() if name != "model.norm.weight"]
    weights[0] = (weights[0][0], torch.zeros(3, 4))
    weights.append(("model.extra", torch.zeros(2)))
    shapes = "misshapen model.embed_tokens.weight: got .3, 4., the model has .61, 32."
    with pytest.raises(WeightSyncError, match=shapes) as error:
        engine.load_weights(weights, 5)
    assert "unknown model.extra" in str(error.value)
    assert "missing model.norm.weight" in str(error.value)


def test_a_generator_is_consumed_to_its_end_before_the_error(tiny_model):
    engine, consumed = make_engine(tiny_model("qwen3")), []

    def stream():
        for name, tensor in [("model.extra", torch.zeros(2)), *tiny_model("qwen3").named_parameters()]:
            consumed.append(name)
            yield name, tensor

    with pytest.raises(WeightSyncError, match="Weight sync to version 5 failed: unknown model.extra"):
        engine.load_weights(stream(), 5)
    assert len(consumed) == 1 + len(list(engine.model.parameters()))


def test_a_weight_that_another_overwrites_is_named(tiny_model):
    engine, source = make_engine(tiny_model("qwen3")), tiny_model("qwen3", 1)
    honest = dict(source.named_parameters())

    def stream():
        yield from honest.items()
        engine.model.model.norm.weight.mul_(1 + 1e-6)

    with pytest.raises(WeightSyncError, match="the engine does not hold model.norm.weight as it was given"):
        engine.load_weights(stream(), 5)


@pytest.mark.parametrize(("device", "is_placeable"), [("cpu", True), ("meta", False)])
def test_only_weights_in_host_memory_may_be_placed(device, is_placeable, tiny_model):
    engine = NativeEngine(tiny_model("llama").to(device), eos_token_ids=[2], device=torch.device(device))
    assert bool(engine.placeable_parameters()) == is_placeable
