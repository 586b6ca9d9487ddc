from typing import Any

import pytest
import torch
from torch import nn

from lightrl.config import GRPOConfig, OptimConfig, lr_scales
from lightrl.strategy import create_strategy
from lightrl.strategy.optim.optimizers import TrainedModels, parameter_groups
from lightrl.strategy.optim.parameter_kinds import apply_lr_scales, special_kinds
from lightrl.testing.tiny_training import tiny_policy


class Tiny(nn.Module):
    """One parameter of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 2)
        self.layers = nn.ModuleList([nn.Linear(2, 2)])
        self.norm = nn.LayerNorm(2, bias=False)
        self.lm_head = nn.Linear(2, 5, bias=False)
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def described(model: nn.Module, **settings: Any) -> list[tuple[list[str], float, float]]:
    """(names, rate, decay) of each group at lr 1 and weight decay 0.1."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(
        model, OptimConfig(**settings), lr=1.0, weight_decay=0.1, shape_of=lambda parameter: parameter.shape
    )
    return [([names[id(item)] for item in group["params"]], group["lr"], group["weight_decay"]) for group in groups]


def test_vectors_are_not_decayed_and_embeddings_as_asked() -> None:
    matrices, vectors = ["layers.0.weight"], ["layers.0.bias", "norm.weight"]
    assert described(Tiny()) == [(["embed.weight", *matrices, "lm_head.weight"], 1.0, 0.1), (vectors, 1.0, 0.0)]
    assert described(Tiny(), decay_embeddings=False) == [
        (matrices, 1.0, 0.1),
        (["embed.weight", *vectors, "lm_head.weight"], 1.0, 0.0),
    ]


class Stacked(nn.Module):
    """A parameter of each kind that holds several vectors, and matrices of similar names."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Module()
        for name in ("A_log", "D", "down_proj_bias", "down_proj", "bias_proj", "LORA_D"):
            block.register_parameter(name, nn.Parameter(torch.zeros(2, 2)))
        block.time_mix_key = nn.Parameter(torch.zeros(1, 1, 2))  # of RWKV
        block.q_norm = nn.LayerNorm((2, 2), bias=False)  # with a vector for each head, as in Cohere's Command R+
        self.layers = nn.ModuleList([block])


@pytest.mark.parametrize("settings", [{}, {"name": "muon"}, {"decay_embeddings": False}])
def test_vectors_that_are_stored_as_a_matrix_are_vectors(settings: dict[str, Any]) -> None:
    matrices = [f"layers.0.{name}" for name in ("down_proj", "bias_proj", "LORA_D")]
    vectors = [f"layers.0.{name}" for name in ("A_log", "D", "down_proj_bias", "time_mix_key", "q_norm.weight")]
    groups = described(Stacked(), **settings)
    assert sorted(groups) == sorted([(matrices, 1.0, 0.1), (vectors, 1.0, 0.0)])


def test_rates_by_pattern_and_the_first_that_fits() -> None:
    found = described(Tiny(), lr_scales=("lm_head=0.5", "layers.*.bias=0", "layers=2"))
    assert found == [
        (["embed.weight"], 1.0, 0.1),
        (["norm.weight"], 1.0, 0.0),
        (["layers.0.bias"], 0.0, 0.0),
        (["lm_head.weight"], 0.5, 0.1),
        (["layers.0.weight"], 2.0, 0.1),
    ]


def test_muon_takes_the_matrices_of_blocks() -> None:
    model = tiny_policy()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, OptimConfig(name="muon"), lr=1.0, weight_decay=0.0, shape_of=lambda p: p.shape)
    chosen = {names[id(item)] for group in groups if group["is_muon"] for item in group["params"]}
    assert len(chosen) == 2 * 7  # q, k, v, o, gate, up, down of two layers
    assert all("layers." in name and name.endswith("proj.weight") for name in chosen)
    assert sum(len(group["params"]) for group in groups) == len(names)
    blocks = nn.Module()
    blocks.layers = nn.ModuleList([nn.Embedding(3, 2), nn.Linear(2, 2)])
    kinds = special_kinds(blocks, OptimConfig(name="muon"), lambda parameter: parameter.shape)
    assert [kind.is_muon for kind in kinds.values()] == [False, True, False]


def test_patterns_that_are_wrong_are_told() -> None:
    with pytest.raises(ValueError, match=r"--optim.lr_scales \*=0 leaves no parameter to train"):
        apply_lr_scales([Tiny()], OptimConfig(lr_scales=("*=0",)), must_match=True)
    with pytest.raises(ValueError, match="no parameter that trains has head2 in its name"):
        apply_lr_scales([Tiny(), nn.Linear(1, 1)], OptimConfig(lr_scales=("head2=0.1", "norm=2")), must_match=True)
    later = OptimConfig(lr_scales=("norm=2", "value_head=3"))  # of a critic
    apply_lr_scales([None, Tiny()], later, must_match=True)
    with pytest.raises(ValueError, match="no parameter that trains has frozen in its name"):  # as all but adapters
        apply_lr_scales([Tiny()], OptimConfig(lr_scales=("frozen=2",)), must_match=True)
    for bad in ("lm_head", "=0.1", "lm_head=-1", "lm_head=x", "lm_head=nan"):
        with pytest.raises(ValueError, match="must be pattern=factor, such as"):
            GRPOConfig(optim=OptimConfig(lr_scales=(bad,)))
    with pytest.raises(ValueError, match="a pattern is given twice"):
        lr_scales(OptimConfig(lr_scales=("a=1", "a=2")))


def test_what_has_the_factor_0_is_frozen() -> None:
    model = Tiny()
    apply_lr_scales([model, None], OptimConfig(lr_scales=("layers.*.bias=0", "embed=0", "layers=2")), must_match=True)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"embed.weight", "frozen", "layers.0.bias"}
    apply_lr_scales([Tiny()], OptimConfig(lr_scales=("no_such=0",)), must_match=False)


def test_a_model_without_an_actor_is_checked_too() -> None:
    """A reward model takes the critic's place; a critic beside an actor may lack what the pattern fits there."""
    config = GRPOConfig(strategy="single", optim=OptimConfig(lr_scales=("norm=2",)))
    strategy = create_strategy(config)
    with pytest.raises(ValueError, match="no parameter that trains has norm in its name"):
        strategy.prepare_models_and_optimizers(None, nn.Linear(1, 1), None, None, strategy.args, 1)
    strategy.prepare_models_and_optimizers(Tiny(), None, None, None, strategy.args, 1)
    strategy.prepare_models_and_optimizers(None, nn.Linear(1, 1), None, None, strategy.args, 1)


def test_the_models_that_train_are_found_by_name_or_as_the_only_actor() -> None:
    trained = TrainedModels()
    with pytest.raises(ValueError, match="has no optimizer yet"):
        trained.entry(None)
    actor, critic = nn.Linear(1, 1), nn.Linear(1, 1)
    first, second, third = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (actor, actor, critic))
    trained.add(actor, first)
    trained.add(actor, second)  # in place of the first
    assert trained.entry(None) == trained.entry(actor) == trained.entries[0]
    assert trained.entries[0].optimizer is second
    trained.add(critic, third)
    assert trained.placed == {actor: second, critic: third}
    with pytest.raises(ValueError, match="2 models are trained here: say which one by model="):
        trained.entry(None)
    actor.is_actor = True  # type: ignore[assignment]
    assert trained.entry(None).model is actor
    trained.require_on_device(actor, second)
    trained.offloaded |= {critic, second}
    with pytest.raises(RuntimeError, match="model's weights are offloaded. Call load_param_and_grad"):
        trained.require_on_device(actor, critic)
    with pytest.raises(RuntimeError, match="optimizer's states are offloaded. Call maybe_load_optimizer"):
        trained.require_on_device(second)
