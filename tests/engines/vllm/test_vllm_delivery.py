"""What happens to tensors on their way through a loader that ignores, refuses or stops; without vLLM."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

from lightrl.engines.vllm.delivery import Delivery, knows_stacked_experts, lost_biases
from lightrl.engines.weights.account import WeightAccount
from lightrl.engines.weights.placement import Placement, ServerRules

SHAPES = {"layer.norm.weight": (6,), "layer.o_proj.weight": (6, 8), "layer.extra": (2,)}


def serving_model() -> nn.Module:
    """Two of the three parameters have a place in it; nothing ever lands there."""
    model = nn.Module()
    model.layer = nn.Module()
    model.layer.norm, model.layer.o_proj = nn.LayerNorm(6, bias=False), nn.Linear(8, 6, bias=False)
    return model


def pairs_of(shapes: dict[str, tuple[int, ...]], consumed: list[str]) -> Iterator[tuple[str, Tensor]]:
    for name, shape in shapes.items():
        yield name, torch.ones(shape)
        consumed.append(name)


def run(load, sent, tied=()) -> tuple[Delivery, list[str]]:
    """Returns the delivery and its problems; values are not the matter here."""
    consumed: list[str] = []
    account = WeightAccount(SHAPES, tied)
    account.remember_values = lambda *args: None
    delivery = Delivery(load, account, Placement(serving_model(), ServerRules()))
    delivery.run(pairs_of(sent, consumed))
    assert consumed == list(sent)  # whatever happened: on other ranks the tensors may come out of collectives
    return delivery, account.problems()


def test_a_name_that_the_loader_ignores_is_found_out() -> None:
    delivery, problems = run(lambda pairs: {name for name, _ in pairs if name != "layer.extra"}, SHAPES)
    assert problems == ["layer.extra was ignored by the engine's loader"]
    assert delivery.loaded == {"layer.norm.weight", "layer.o_proj.weight"}
    assert delivery.unread == ["layer.extra"]


def test_unknown_misshapen_and_missing_parameters_never_reach_the_loader() -> None:
    seen: list[str] = []

    def load(pairs):
        seen.extend(name for name, _ in pairs)

    sent = {"layer.norm.weight": (5,), "a": (1,), "layer.extra": (2,)}
    _, problems = run(load, sent)
    assert seen == ["layer.extra"]
    wrong = ["misshapen layer.norm.weight: got (5,), the model has (6,)", "unknown a"]
    assert problems == [*wrong, "missing layer.o_proj.weight"]
    _, problems = run(load, sent, tied=[frozenset(["layer.o_proj.weight", "layer.extra"])])
    assert problems == wrong


def test_a_refusal_names_the_parameter_and_the_rest_goes_on() -> None:
    def load(pairs):
        for name, _ in pairs:
            assert "norm" not in name, "shapes differ"
        return {"layer.o_proj.weight"}

    _, problems = run(load, SHAPES)
    assert problems == ["layer.norm.weight was refused: AssertionError: shapes differ"]


def test_a_loader_that_stops_early_is_named() -> None:
    _, problems = run(lambda pairs: {"x"}, SHAPES)
    assert problems == ["the loader stopped at the first parameter"]


def test_what_the_model_does_not_hold_is_named() -> None:
    account = WeightAccount(SHAPES)
    delivery = Delivery(lambda pairs: {name for name, _ in pairs}, account, Placement(serving_model(), ServerRules()))
    delivery.run(pairs_of(SHAPES, []))
    assert account.problems() == ["the engine does not hold layer.o_proj.weight as it was given"]  # the norm is ones


def test_an_error_of_the_trainers_is_raised_as_it_is() -> None:
    def broken():
        yield "layer.norm.weight", torch.ones(6)
        raise KeyError("a rank is gone")

    placement = Placement(serving_model(), ServerRules())
    delivery = Delivery(lambda pairs: [name for name, _ in pairs], WeightAccount(SHAPES), placement)
    with pytest.raises(KeyError, match="a rank is gone"):
        delivery.run(broken())


def test_pairs_reach_a_loader_in_the_form_of_the_checkpoint_if_it_knows_no_other() -> None:
    config = MixtralConfig(
        vocab_size=8,
        hidden_size=4,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        num_local_experts=2,
    )
    model, seen = MixtralForCausalLM(config), []
    account = WeightAccount.of_model(model)
    finder = Placement(serving_model(), ServerRules())
    assert not finder.has_home("model.layers.0.mlp.gate.weight")
    assert finder.has_home("layer.q_proj.weight")
    delivery = Delivery(
        lambda pairs: {seen.append(name) or name for name, _ in pairs}, account, finder, converted=model
    )
    sent = [pair for pair in model.named_parameters() if pair[0] != "model.norm.weight"]
    delivery.run([*sent, ("other", torch.ones(1))])
    assert account.problems() == ["unknown other", "missing model.norm.weight"]
    assert "model.layers.0.block_sparse_moe.gate.weight" in seen
    assert "model.layers.0.block_sparse_moe.experts.1.w3.weight" in seen
    assert not [name for name in seen if ".mlp." in name or name == "other"]


EXPERTS = {"model.norm.weight": (6,), "model.layers.1.mlp.experts.down_proj": (4, 2, 3)}


@pytest.mark.parametrize(("error", "is_known"), [(None, True), (KeyError("a"), False), (RuntimeError("b"), True)])
def test_a_loader_that_knows_only_the_experts_of_a_checkpoint_is_found_out(error, is_known) -> None:
    seen: list[tuple[str, tuple[int, ...], torch.dtype]] = []

    def load(pairs) -> None:
        seen.extend((name, tuple(tensor.shape), tensor.dtype) for name, tensor in pairs)
        if error is not None:
            raise error

    assert knows_stacked_experts(load, EXPERTS, torch.zeros(1, dtype=torch.bfloat16)) == is_known
    assert seen == [("model.layers.1.mlp.experts.down_proj", (4, 2, 3), torch.bfloat16)]
    assert knows_stacked_experts(load, SHAPES, torch.zeros(1))  # of a model without experts it is not asked
    assert len(seen) == 1


def test_a_routers_bias_that_the_engine_lacks_is_named_unless_it_is_zero() -> None:
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    (problem,) = lost_biases([(name, torch.tensor([0.0, 0.1])), ("rope.inv_freq", torch.ones(1))], [])
    assert problem.startswith(f"the engine has no {name}, which is not zero")
    assert "topk_method" in problem
    assert lost_biases([(name, torch.zeros(2))], []) == []
    assert lost_biases([(name, torch.ones(2))], [(name, torch.ones(2))]) == []
