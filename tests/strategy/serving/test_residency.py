"""Storages that leave the device and come back, and the trainer that makes room for the engine."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lightrl.checkpoint import save_tensors
from lightrl.comm import Comm
from lightrl.config import StrategyOptions
from lightrl.strategy.layout.plain import PlainLayout
from lightrl.strategy.optim.optimizers import TrainedModels
from lightrl.strategy.serving.residency import Residency, StorageOffloader
from lightrl.strategy.torch_native import SingleStrategy
from lightrl.testing.tiny_training import fresh, make_batch, parameters, same, samples, tiny_policy, train

GREEDY = {"max_tokens": 4, "temperature": 0.0}
PROMPTS = [[5, 9, 33], [7]]


def test_shared_storages_leave_once_and_come_back_bit_by_bit() -> None:
    whole = torch.randn(3, 4)
    before, half = whole.clone(), whole[:2]  # 48 bytes behind both
    offloader = StorageOffloader()
    assert (offloader.offload([whole, half, torch.empty(0)]), offloader.is_offloaded) == (48, True)
    assert whole.untyped_storage().nbytes() == 0
    assert offloader.offload([whole]) == 0
    assert (offloader.restore(), offloader.restore()) == (48, 0)
    assert torch.equal(whole, before)
    assert torch.equal(half, before[:2])


def test_a_move_that_finds_no_memory_moves_nothing_and_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = torch.zeros(2), torch.zeros(3)
    offloader, empty = StorageOffloader(), torch.empty

    def refuse(size: int, **settings: Any) -> Tensor:
        if size == second.nbytes:
            raise MemoryError
        return empty(size, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", refuse)
        with pytest.raises(MemoryError):
            offloader.offload([first, second])
    assert not offloader.is_offloaded
    first.fill_(7.0)  # training goes on
    assert offloader.offload([first, second]) == 20

    calls: list[int] = []

    def refuse_second(size: int, **settings: Any) -> Tensor:
        calls.append(size)
        if len(calls) == 2:
            raise torch.OutOfMemoryError
        return empty(size, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", refuse_second)
        with pytest.raises(torch.OutOfMemoryError):
            offloader.restore()
    assert first.untyped_storage().nbytes() == second.untyped_storage().nbytes() == 0
    assert offloader.restore() == 20
    assert (first.tolist(), second.tolist()) == ([7.0, 7.0], [0.0, 0.0, 0.0])


def test_weights_that_find_no_memory_stay_refused_until_a_call_brings_them_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strategy, policy = with_engine()
    train(strategy, policy, 0)
    before = parameters(strategy, policy)
    strategy.offload_optimizer()
    strategy.offload_param_and_grad()

    def refuse(self: StorageOffloader) -> int:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(StorageOffloader, "restore", refuse)
        for load in (strategy.load_param_and_grad, strategy.load_optimizer):
            with pytest.raises(torch.OutOfMemoryError):
                load()
    for kind in ("weights", "states"):
        with pytest.raises(RuntimeError, match=f"{kind} are offloaded"):
            strategy.trained.require_on_device(policy if kind == "weights" else strategy.trained.entry(None).optimizer)
    assert strategy.load_param_and_grad() > 0
    assert strategy.load_optimizer() > 0
    same(parameters(strategy, policy), before)
    train(strategy, policy, 1)


def test_a_mapped_file_stays(tmp_path: Path) -> None:
    """As from_pretrained leaves the weights of a model that is not moved to another device."""
    save_tensors(tmp_path / "file", {"weight": torch.ones(3)})
    weight = load_file(tmp_path / "file")["weight"]
    if weight.untyped_storage().resizable():
        pytest.skip("this version of safetensors reads into memory of its own")
    offloader = StorageOffloader()
    assert offloader.offload([weight]) == 0
    assert weight.tolist() == [1.0, 1.0, 1.0]


def with_engine(ema_decay: float = 0.0, **settings: Any) -> tuple[SingleStrategy, Any]:
    strategy = SingleStrategy(0, 1.0, 1, 1, StrategyOptions(exact_batches=True, **settings))
    strategy.setup_distributed()
    policy, _ = fresh(strategy)
    if ema_decay:
        strategy.keep_average(policy, ema_decay)
    strategy.setup_inference_engine(None, "native", actor=policy)
    strategy.maybe_sleep_inference_engine()
    return strategy, policy


def test_every_call_says_how_many_bytes_moved() -> None:
    strategy, policy = with_engine()
    train(strategy, policy, 0)
    size = sum(parameter.nbytes for parameter in policy.parameters())
    buffers = sum(buffer.nbytes for buffer in policy.buffers())
    assert (strategy.offload_optimizer(), strategy.offload_optimizer()) == (2 * size, 0)  # two moments
    assert (strategy.load_optimizer(), strategy.load_optimizer()) == (2 * size, 0)
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert strategy.offload_param_and_grad(offload_grad=True) == 2 * size + buffers
    assert strategy.load_param_and_grad(load_grad=True) == 2 * size + buffers
    assert all(bool((parameter.grad == 1).all()) for parameter in policy.parameters())
    assert strategy.offload_param_and_grad() == size + buffers  # the gradients stay
    assert all(bool((parameter.grad == 1).all()) for parameter in policy.parameters())
    strategy.load_param_and_grad()


def test_a_checkpoint_of_what_is_offloaded(tmp_path: Path) -> None:
    strategy, policy = with_engine()
    train(strategy, policy, 0)
    weights, size = parameters(strategy, policy), sum(parameter.nbytes for parameter in policy.parameters())
    buffers = sum(buffer.nbytes for buffer in policy.buffers())
    strategy.offload_param_and_grad()
    strategy.save_checkpoint(str(tmp_path))  # only the weights leave again
    assert (strategy.load_param_and_grad(), strategy.load_optimizer()) == (size + buffers, 0)
    train(strategy, policy, 1)
    strategy.offload_param_and_grad(offload_grad=True)
    strategy.offload_optimizer()
    strategy.load_checkpoint(str(tmp_path))
    assert (strategy.load_param_and_grad(load_grad=True), strategy.load_optimizer()) == (size + buffers, 2 * size)
    same(parameters(strategy, policy), weights)


@pytest.mark.parametrize("settings", [{}, {"engine_sleep_level": 2}, {"ema_decay": 0.9}])
def test_offload_while_generating_changes_no_number(settings: dict[str, Any]) -> None:
    def run(offload: bool) -> tuple[list[Any], dict[str, Tensor], int]:
        strategy, policy = with_engine(offload_while_generating=offload, **settings)
        reference = strategy.prepare(tiny_policy(seed=4), is_rlhf=True)
        found = []
        for step in range(2):
            items = strategy.gather_and_generate(GREEDY, all_prompt_token_ids=PROMPTS)
            scores = strategy.forward(my_prompts(), model=reference)
            found += [[item.output_token_ids for item in items], scores[0].logprobs.tolist()]
            found.append(train(strategy, policy, step).loss)
            strategy.set_global_step(step + 1)
            strategy.update_engine_weights(policy)
        found.append(strategy.gather_and_generate(GREEDY, all_prompt_token_ids=PROMPTS)[0].output_token_ids)
        return found, parameters(strategy, policy), strategy.residency.offloaded_bytes

    wanted, weights, none = run(False)
    found, offloaded_weights, num_bytes = run(True)
    assert found == wanted
    same(offloaded_weights, weights)
    size = sum(value.nbytes for value in weights.values())
    # the policy, its two moments (and its average), and the reference
    assert none == 0
    assert num_bytes >= (5 if "ema_decay" in settings else 4) * size


def my_prompts() -> list[Any]:
    return [make_batch(samples(0)[:2])]


def test_an_engine_that_stays_awake_keeps_the_trainer_away_until_it_sleeps() -> None:
    strategy, policy = with_engine(offload_while_generating=True)
    reference = strategy.prepare(tiny_policy(), is_rlhf=True)
    strategy.gather_and_generate(GREEDY, all_prompt_token_ids=PROMPTS, sleep_engine=False)
    for model in (policy, reference):
        with pytest.raises(RuntimeError, match="weights are offloaded"):
            strategy.forward(my_prompts(), model=model)
    strategy.gather_and_generate(GREEDY, all_prompt_token_ids=PROMPTS, sleep_engine=False)
    strategy.update_engine_weights(policy)  # brings the weights back, since it reads them
    strategy.gather_and_generate(GREEDY, all_prompt_token_ids=PROMPTS, sleep_engine=False)
    strategy.maybe_sleep_inference_engine()
    train(strategy, policy, 0)


def test_an_error_while_generating_brings_everything_back() -> None:
    strategy, policy = with_engine(offload_while_generating=True)
    before = parameters(strategy, policy)
    with pytest.raises(ValueError, match="prompt 0 holds token id 999"):
        strategy.gather_and_generate(GREEDY, all_prompt_token_ids=[[999]])
    same(parameters(strategy, policy), before)


class PlainTrainer:
    """A trainer of plain modules on the host, without hooks."""

    device = torch.device("cpu")
    layout = PlainLayout(Comm())

    def __init__(self) -> None:
        self.trained = TrainedModels()

    def after_forward_only(self, model: torch.nn.Module) -> None:
        pass


def test_an_engine_that_cannot_wake_up_wholly_brings_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, policy = with_engine(offload_while_generating=True)
    assert strategy.engine is not None
    wake = strategy.engine.engine.wake

    def refuse(part: Any) -> None:
        if part == "kv_cache":
            raise MemoryError
        wake(part)

    monkeypatch.setattr(strategy.engine.engine, "wake", refuse)
    with pytest.raises(RuntimeError, match="no memory to wake the engine's kv_cache"):
        strategy.gather_and_generate(GREEDY, PROMPTS)
    train(strategy, policy, 0)
    monkeypatch.undo()
    assert len(strategy.gather_and_generate(GREEDY, PROMPTS)) == 2


def test_a_residency_alone_moves_one_model_and_refuses_its_use_meanwhile() -> None:
    moving, staying, frozen = (torch.nn.Linear(2, 1, bias=False) for _ in range(3))
    optimizer = torch.optim.SGD(moving.parameters(), lr=0.1, momentum=0.9)
    trainer = PlainTrainer()
    residency = Residency(trainer)
    entry = residency.add(moving, optimizer)
    assert residency.add(moving, optimizer) is residency.of_optimizer(optimizer) is entry
    residency.add(staying)
    residency.add(frozen)
    moving(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before = moving.weight.detach().clone()
    assert residency.offload_parameters(with_gradients=True) == 16  # two numbers, two gradients
    assert residency.offload_optimizers() == 8
    with pytest.raises(RuntimeError, match="weights are offloaded"):
        moving(torch.ones(1, 2))
    with pytest.raises(RuntimeError, match="weights are offloaded"):
        trainer.trained.require_on_device(moving)
    with pytest.raises(RuntimeError, match="states are offloaded"):
        trainer.trained.require_on_device(optimizer)
    staying(torch.ones(1, 2))  # it does not train, so it did not leave
    residency.leave_device()
    assert residency.offloaded_bytes == 16  # those two
    residency.return_to_device()
    assert torch.equal(moving.weight, before)
    assert moving.weight.grad is not None
    assert not moving._forward_pre_hooks  # nothing is left on the way of a plain step
    trainer.trained.require_on_device(optimizer)
    frozen(torch.ones(1, 2))
    moving(torch.ones(1, 2)).sum().backward()
    residency.leave_device()
    residency.leave_device()  # finds nothing more
    assert residency.offloaded_bytes == 40  # three models, the gradients and the momentum of one: 8 bytes each
    residency.return_to_device()
