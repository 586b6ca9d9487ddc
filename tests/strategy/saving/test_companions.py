"""Models that are saved beside another, such as a critic: one checkpoint, whole or not at all."""

from pathlib import Path

import pytest
import torch
from torch import nn

from lightrl.strategy.torch_native import SingleStrategy


def started(seed: int, *, head: bool = False) -> tuple[SingleStrategy, nn.Module, nn.Module]:
    """An actor and a critic with optimizers, trained by a step of their own."""
    torch.manual_seed(seed)
    strategy = SingleStrategy(seed, 1.0, 1, 1, {"lr": 0.1, "critic_lr": 0.2, "critic_warmup_steps": int(head)})
    strategy.setup_distributed()
    critic: nn.Module = nn.ModuleDict({"body": nn.Linear(3, 3), "value_head": nn.Linear(3, 1)})
    (actor, *_), (critic, *_), _, _ = strategy.prepare_models_and_optimizers(
        nn.Linear(3, 1), critic, None, None, None, 9
    )
    return strategy, actor, critic


def values(model: nn.Module) -> list[torch.Tensor]:
    return [value.detach().clone() for value in model.state_dict().values()]


def train(strategy: SingleStrategy, model: nn.Module) -> None:
    entry = next(entry for entry in strategy.trained.entries if entry.model is model)
    strategy.backward(sum(item.square().sum() for item in model.parameters()), model, entry.optimizer)  # type: ignore[arg-type]
    strategy.optimizer_step(entry.optimizer, model, entry.scheduler)


def test_a_companion_goes_on_where_it_was(tmp_path: Path) -> None:
    strategy, actor, critic = started(0)
    for model in (actor, critic):
        train(strategy, model)
    strategy.set_global_step(1)
    strategy.save_ckpt(actor, str(tmp_path), client_state={"step": 1}, companions={"critic": critic})
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["step-000001"]
    again, other, other_critic = started(1)
    path, state = again.load_ckpt(other, str(tmp_path), companions={"critic": other_critic})
    assert (path.name, state) == ("step-000001", {"step": 1})
    for run, models in ((strategy, (actor, critic)), (again, (other, other_critic))):
        for model in models:
            train(run, model)  # Adam's moments and the schedules too
    for mine, yours in ((actor, other), (critic, other_critic)):
        assert all(torch.equal(a, b) for a, b in zip(values(mine), values(yours), strict=True))


def test_a_checkpoint_without_the_companion_is_refused(tmp_path: Path) -> None:
    strategy, actor, critic = started(0)
    strategy.save_ckpt(actor, str(tmp_path))
    with pytest.raises(ValueError, match="step-000000 holds no critic: it was saved by a run that had none"):
        strategy.load_ckpt(actor, str(tmp_path), companions={"critic": critic})


def test_a_damaged_companion_is_a_damaged_checkpoint(tmp_path: Path) -> None:
    strategy, actor, critic = started(0)
    strategy.save_ckpt(actor, str(tmp_path), companions={"critic": critic})
    next((tmp_path / "step-000000" / "critic").glob("*.safetensors")).unlink()
    assert strategy.load_ckpt(actor, str(tmp_path), companions={"critic": critic}) == (None, None)


def test_the_critic_of_the_options_warms_up_its_head_alone() -> None:
    strategy, _, critic = started(0, head=True)
    before = values(critic)
    train(strategy, critic)
    moved = [not torch.equal(old, new) for old, new in zip(before, values(critic), strict=True)]
    assert moved == [False, False, True, True]
    train(strategy, critic)
    assert not torch.equal(before[0], values(critic)[0])


def test_a_value_head_on_the_actors_body_has_a_rate_of_its_own() -> None:
    strategy = SingleStrategy(0, 1.0, 1, 1, {"lr": 0.1, "critic_lr": 0.3})
    strategy.setup_distributed()
    actor: nn.Module = nn.ModuleDict({"hf": nn.Linear(3, 3), "value_head": nn.Linear(3, 1)})
    (_, optimizer, _), *_ = strategy.prepare_models_and_optimizers(actor, None, None, None, None, 9)
    rates = {id(item): group["lr"] for group in optimizer.param_groups for item in group["params"]}
    named = {name: rates[id(parameter)] for name, parameter in actor.named_parameters()}
    assert named == {"hf.weight": 0.1, "hf.bias": 0.1, "value_head.weight": 0.3, "value_head.bias": 0.3}
