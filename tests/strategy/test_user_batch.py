"""train_batch over a dictionary: any form, micro-batch size and number of ranks gives plain torch's gradient."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrl.config import StrategyOptions
from lightrl.strategy.torch_native import SingleStrategy
from lightrl.strategy.user_batch import UserBatch, gather_logprobs, next_token
from lightrl.testing import run_spmd
from lightrl.testing.spmd import run_program
from lightrl.testing.tiny_training import fresh, parameters, same

PROGRAM = Path(__file__).parents[1] / "programs" / "user_batch_program.py"
ZERO_3 = ("--deepspeed.zero_stage", "3", "--deepspeed.param_persistence_threshold", "0")


@pytest.mark.slow
def test_one_process() -> None:
    assert run_program([sys.executable, str(PROGRAM), "--strategy", "single"], timeout_s=120).count("all checked") == 1


@pytest.mark.slow
@pytest.mark.parametrize(("world", "flags"), [(3, ("fsdp",)), (2, ("deepspeed", *ZERO_3))])
def test_several_ranks(world: int, flags: tuple[str, ...]) -> None:
    if flags[0] == "deepspeed":
        pytest.importorskip("deepspeed")
    said = run_spmd(PROGRAM, "--strategy", *flags, world_size=world, timeout_s=200)
    assert said.count("all checked") == world


def _strategy() -> SingleStrategy:
    strategy = SingleStrategy(0, 1.0, 2, 2, StrategyOptions(exact_batches=True))
    strategy.setup_distributed()
    return strategy


def _batch(**changes: Any) -> dict[str, Any]:
    ids = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    ones = torch.ones_like(ids)
    return {"input_ids": ids, "attention_mask": ones, "loss_mask": torch.tensor([[0, 1, 1]] * 3), **changes}


def _loss(logits: Any, data: dict[str, torch.Tensor]) -> torch.Tensor:
    mask = next_token(data, "loss_mask").bool()
    logprobs = gather_logprobs(logits, next_token(data, "input_ids"))
    return -logprobs[mask].mean()


def test_micro_batches_have_the_strategys_size_unless_the_batch_gives_one() -> None:
    strategy = _strategy()
    fresh(strategy)
    weight = lambda data: data["loss_mask"].count_nonzero()  # noqa: E731
    assert strategy.train_batch(_batch(), _loss, weight).num_micro_batches == 2  # of 2 sequences at most
    assert strategy.train_batch(UserBatch(_batch(), max_sequences=1), _loss, weight).num_micro_batches == 3
    assert strategy.train_batch(UserBatch(_batch(), max_tokens=99), _loss, weight).num_micro_batches == 1
    with pytest.raises(ValueError, match="Sequence 0 of the batch has 3 tokens"):
        strategy.train_batch(UserBatch(_batch(), max_tokens=2), _loss, weight)


def test_a_loss_that_is_no_number_is_refused_and_the_model_is_as_before() -> None:
    strategy = _strategy()
    policy, _ = fresh(strategy)
    with pytest.raises(ValueError, match=r"must return one number.*not \[6\]"):
        strategy.train_batch(_batch(), lambda logits, data: logits.sum(-1), lambda data: 1)
    assert "scores" not in policy.__dict__


def test_a_batch_without_sequences_is_refused() -> None:
    strategy = _strategy()
    fresh(strategy)
    with pytest.raises(ValueError, match="No rank has a sequence"):
        strategy.train_batch({name: value[:0] for name, value in _batch().items()}, _loss, lambda data: 1)


def test_an_update_that_is_not_finite_or_empty_is_skipped_and_names_the_sequence() -> None:
    strategy = _strategy()
    policy, _ = fresh(strategy)
    before = parameters(strategy, policy)
    weight = lambda data: data["loss_mask"].count_nonzero()  # noqa: E731
    scale = torch.ones(3, 3)
    scale[1, 2] = float("nan")
    bad = strategy.train_batch(
        _batch(scale=scale), lambda logits, data: _loss(logits, data) * data["scale"].mean(), weight
    )
    assert bad.skipped
    assert "scale is nan at response token 2 of sample (1, 0)" in bad.reason
    empty = strategy.train_batch(_batch(loss_mask=torch.zeros(3, 3)), _loss, weight)
    assert empty.skipped
    same(parameters(strategy, policy), before)


def test_an_evaluation_of_nothing_sends_numbers_of_the_type_that_other_ranks_send(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks reduce floats and integers separately, so one integer among floats would let all of them wait forever."""
    strategy = _strategy()
    fresh(strategy)
    sent: list[dict[str, float]] = []
    monkeypatch.setattr(strategy.comm, "all_reduce", lambda data, op: sent.append(data) or data)
    assert strategy.eval_batch(_batch(), _loss, lambda data: 0) == 0.0
    assert [{name: type(value) for name, value in data.items()} for data in sent] == [{"loss": float, "weight": float}]
