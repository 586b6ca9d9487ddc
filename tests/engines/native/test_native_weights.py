import pytest
import torch
from torch.testing import assert_close

from lightrl.engines.native.weights import copy_weights


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "qwen3_moe"])
def test_weights_are_copied_in_place_and_tied_ones_may_come_once_or_twice(family, tiny_model):
    model, source = tiny_model(family), tiny_model(family, 1)
    storages = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    for keep_duplicates in (False, True):
        copy_weights(model, list(source.named_parameters(remove_duplicate=not keep_duplicates)))
        for (name, got), (_, expected) in zip(model.named_parameters(), source.named_parameters(), strict=True):
            assert got.data_ptr() == storages[name]
            assert_close(got, expected, atol=0, rtol=0)


def test_a_list_that_does_not_fit_names_everything_and_writes_nothing(tiny_model):
    model, before = tiny_model("qwen3"), tiny_model("qwen3")
    weights = [(name, tensor + 1) for name, tensor in before.named_parameters() if name != "model.norm.weight"]
    weights[0] = (weights[0][0], torch.zeros(3, 4))
    weights.append(("model.extra", torch.zeros(2)))
    with pytest.raises(
        ValueError, match="misshapen model.embed_tokens.weight: got .3, 4., the engine has .61, 32."
    ) as e:
        copy_weights(model, weights)
    assert "unknown model.extra" in str(e.value)
    assert "missing model.norm.weight" in str(e.value)
    assert all(torch.equal(got, old) for got, old in zip(model.parameters(), before.parameters(), strict=True))


def test_a_generator_is_consumed_to_its_end_before_the_error(tiny_model):
    model, consumed = tiny_model("qwen3"), []

    def stream():
        for name, tensor in [("model.extra", torch.zeros(2)), *model.named_parameters()]:
            consumed.append(name)
            yield name, tensor

    with pytest.raises(ValueError, match="do not fit the engine's model: unknown model.extra"):
        copy_weights(model, stream())
    assert len(consumed) == 1 + len(list(model.parameters()))
