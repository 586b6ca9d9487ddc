"""A checkpoint holds the optimizer and the schedule that train a model, however they came to the strategy."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

from lightrl.strategy.torch_native import SingleStrategy

Trained = tuple[nn.Module, Optimizer, StepLR]


class Wrapped(nn.Module):
    """An actor as other frameworks have it: the network in `.model`, perhaps a head beside it."""

    def __init__(self, *, has_head: bool = False) -> None:
        super().__init__()
        self.model = nn.Linear(2, 2)
        self.head = nn.Linear(2, 1) if has_head else nn.Identity()

    def forward(self, rows: Tensor) -> Tensor:
        result: Tensor = self.head(self.model(rows))
        return result


def strategy() -> SingleStrategy:
    return SingleStrategy(0, 0.0, 1, 1)


def start(model: nn.Module) -> Trained:
    optimizer = Adam(model.parameters(), lr=0.1)
    return model, optimizer, StepLR(optimizer, 2, 0.5)


def update(chosen: SingleStrategy, trained: Trained) -> list[float]:
    """One update of an own loop; returns the weights."""
    model, optimizer, scheduler = trained
    chosen.backward(model(torch.ones(1, 2)).square().sum(), model, optimizer)
    chosen.optimizer_step(optimizer, model, scheduler)
    return [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]


def test_a_model_that_was_prepared_alone_is_saved_with_what_updates_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first = strategy()
    model = first.prepare(Wrapped())
    trained = start(model)
    for _ in range(3):
        update(first, trained)
    first.save_ckpt(model, str(tmp_path))
    second = strategy()
    again = second.prepare(start(Wrapped()))
    second.load_ckpt(again[0], str(tmp_path))
    assert [update(second, again) for _ in range(3)] == [update(first, trained) for _ in range(3)]


def test_the_schedule_that_only_the_update_sees_is_saved_with_a_prepared_pair(tmp_path: Path) -> None:
    first = strategy()
    model, optimizer, scheduler = start(Wrapped())
    first.prepare((model, optimizer))
    for _ in range(3):
        update(first, (model, optimizer, scheduler))
    first.save_ckpt(model, str(tmp_path))
    second = strategy()
    again = second.prepare(start(Wrapped()))
    second.load_ckpt(again[0], str(tmp_path))
    assert (again[2].last_epoch, again[1].param_groups[0]["lr"]) == (3, 0.05)


@pytest.mark.parametrize("given", ["inner", "outer"])
def test_a_module_inside_or_around_the_prepared_one_stands_for_it(given: str, tmp_path: Path) -> None:
    def chosen(model: nn.Module) -> Any:
        return model.model if given == "inner" else nn.ModuleDict({"actor": model})

    torch.manual_seed(0)
    first, second = strategy(), strategy()
    trained, again = first.prepare(start(Wrapped())), second.prepare(start(Wrapped()))
    update(first, trained)
    first.save_ckpt(chosen(trained[0]), str(tmp_path))
    second.load_ckpt(chosen(again[0]), str(tmp_path))
    assert [update(second, again) for _ in range(3)] == [update(first, trained) for _ in range(3)]


def test_what_has_no_known_optimizer_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    chosen = strategy()
    head, _, _ = chosen.prepare(start(Wrapped(has_head=True)))
    torn, _, _ = chosen.prepare(start(nn.Linear(2, 1)))
    second = Adam(torn.parameters(), lr=0.1)
    update(chosen, (torn, second, StepLR(second, 2, 0.5)))
    both = nn.ModuleList([head, nn.Linear(1, 1)])
    for model, text in (
        (nn.Linear(1, 1), r"This Linear has trainable parameters, but no optimizer .* Pass \(model, optimizer, sched"),
        (head.model, "Linear has 2 of the 4 trainable parameters of the Wrapped that was prepared: give that model"),
        (
            both,
            "ModuleList has 6 trainable parameters, the Wrapped that was prepared inside it 4: give that model, and",
        ),
        (torn, "2 optimizers step this Linear"),
    ):
        for companions in (None, {"critic": model}):
            given = model if companions is None else head
            with pytest.raises(ValueError, match=text):
                chosen.save_ckpt(given, str(tmp_path), companions=companions)
    assert not [*tmp_path.iterdir()]


def test_a_load_needs_an_optimizer_unless_only_the_weights_are_wanted(tmp_path: Path) -> None:
    first = strategy()
    trained = first.prepare(start(Wrapped()))
    update(first, trained)
    first.save_ckpt(trained[0], str(tmp_path))
    second, lone = strategy(), Wrapped()
    before = lone.model.weight.detach().clone()
    with pytest.raises(ValueError, match="no optimizer is registered with it.*load_module_only=True"):
        second.load_ckpt(lone, str(tmp_path))
    assert torch.equal(lone.model.weight, before)
    second.load_ckpt(lone, str(tmp_path), load_optimizer_states=False, load_lr_scheduler_states=False)
    assert torch.equal(lone.model.weight, trained[0].model.weight)
    second.load_ckpt(lone, str(tmp_path), load_module_only=True)
    second.load_ckpt(lone.requires_grad_(False), str(tmp_path))  # a reference
    second.save_ckpt(lone, str(tmp_path / "frozen"))


def test_a_load_of_weights_alone_leaves_optimizer_schedule_and_step_as_they_are(tmp_path: Path) -> None:
    first, second = strategy(), strategy()
    saved, other = (chosen.prepare(start(Wrapped())) for chosen in (first, second))
    update(first, saved)
    first.set_global_step(5)
    first.save_ckpt(saved[0], str(tmp_path), client_state={"name": "first"})
    for _ in range(3):
        update(second, other)
    second.set_global_step(7)
    (moments, *_), schedule = map(str, other[1].state.values()), other[2].state_dict()
    _, client_state = second.load_ckpt(other[0], str(tmp_path), load_module_only=True)
    assert client_state == {"name": "first"}
    assert torch.equal(other[0].model.weight, saved[0].model.weight)
    assert next(map(str, other[1].state.values())) == moments
    assert (other[2].state_dict(), second.global_step) == (schedule, 7)
    second.load_ckpt(other[0], str(tmp_path))
    assert second.global_step == 5


def test_optimizer_states_of_other_names_are_refused(tmp_path: Path) -> None:
    """Weights of an inner module, states of the whole: they would be left out without a word."""
    first = strategy()
    trained = first.prepare(start(Wrapped()))
    update(first, trained)
    first.save_ckpt(trained[0].model, str(tmp_path))
    second = strategy()
    bare, _, _ = second.prepare(start(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="states of parameters that the model lacks: model.bias, model.weight"):
        second.load_ckpt(bare, str(tmp_path))
    second.load_ckpt(bare, str(tmp_path), load_optimizer_states=False)


def test_of_several_models_the_prepared_one_is_the_trained_one() -> None:
    chosen = strategy()
    aside = start(nn.Linear(2, 1))
    update(chosen, aside)
    assert chosen.trained.entry(None).model is aside[0]
    actor, *_ = chosen.prepare(start(Wrapped()))
    assert chosen.trained.entry(None).model is actor
    assert chosen.trained.placed.keys() == {aside[0], actor}  # both are offloaded
