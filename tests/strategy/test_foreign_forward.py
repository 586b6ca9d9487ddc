"""The forward of padded rows equals the model's own, and a step trains as train_batch does."""

from __future__ import annotations

from argparse import Namespace
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from lightrl.builtin.model import tiny_model
from lightrl.models.critic import Critic, ValueHead
from lightrl.models.policy import Policy, response_batch
from lightrl.strategy import StrategyBase
from lightrl.strategy.torch_native import SingleStrategy
from lightrl.testing.tiny_training import adamw, loss_fn, make_batch, num_tokens, samples, tiny_policy

IDS = torch.tensor([[0, 0, 3, 4, 5], [6, 7, 8, 9, 2], [0, 0, 0, 0, 5]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]])


def own_logits(hf: Any) -> Tensor:
    """Returns the logits of each row alone, with zeros for padding; a policy changes the attention of its model."""
    whole = torch.zeros(*IDS.shape, hf.config.vocab_size)
    for row, (ids, mask) in enumerate(zip(IDS, MASK.bool(), strict=True)):
        whole[row, mask] = hf(input_ids=ids[mask][None]).logits[0]
    return whole


@pytest.fixture(scope="module")
def hf() -> Any:
    torch.manual_seed(0)
    return tiny_model()[0].eval()


def test_logits_of_padded_rows(hf: Any) -> None:
    wanted = own_logits(hf)
    with torch.no_grad():
        for model in (Policy(deepcopy(hf)), hf):
            found = StrategyBase.custom_forward(model, IDS, MASK, temperature=2.0)
            assert_close(found, wanted / 2, atol=1e-4, rtol=0)


def test_a_processor_gets_logits_and_its_arguments_in_packs(hf: Any) -> None:
    seen: dict[str, Any] = {}

    def processor(logits: Any, label: Tensor, input_ids: Tensor) -> dict[str, Tensor]:
        seen.update(shape=tuple(logits.shape), label=label, ids=input_ids)
        return {"log_probs": logits.log_softmax(-1).gather(-1, label[:, None])[:, 0], "double": 2.0 * label}

    policy = Policy(deepcopy(hf))
    arguments = {"label": IDS + 1, "input_ids": IDS}
    found = StrategyBase.custom_forward(
        policy, IDS, MASK, logits_processor=processor, logits_processor_args=arguments, temperature=0.5
    )
    assert seen["shape"] == (9, hf.config.vocab_size)  # 3 + 5 + 1 tokens
    assert sorted(seen["ids"].tolist()) == sorted(IDS[MASK.bool()].tolist())
    assert torch.equal(seen["label"], seen["ids"] + 1)
    assert torch.equal(found["double"], 2.0 * (IDS + 1) * MASK)
    wanted = (own_logits(hf) / 0.5).log_softmax(-1).gather(-1, (IDS + 1)[..., None])[..., 0] * MASK
    assert_close(found["log_probs"], wanted, atol=1e-4, rtol=0)
    found["log_probs"].sum().backward()
    wanted.sum().backward()
    got, own = (item.get_input_embeddings().weight.grad for item in (policy.hf, hf))
    assert_close(got, own, atol=1e-3, rtol=1e-3)
    hf.zero_grad()


def test_values_of_padded_rows(hf: Any) -> None:
    critic = Critic(deepcopy(hf.model), ValueHead(hf.config.hidden_size))
    found = StrategyBase.custom_forward(critic, IDS, MASK, value_model=True)
    batch = response_batch([(IDS[1, :1].tolist(), IDS[1, 1:].tolist())])
    assert_close(found[1, :4], critic(batch).values, atol=1e-4, rtol=0)
    assert torch.equal(found != 0, MASK.bool())

    class Scorer(nn.Module):
        def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
            return input_ids[..., None].float()

    assert torch.equal(StrategyBase.custom_forward(Scorer(), IDS, MASK, value_model=True), (IDS * MASK).float())


def made() -> Any:
    strategy = SingleStrategy(1, 1.0, 1, 1, Namespace(lr=1e-2, exact_batches=True))  # type: ignore[arg-type]
    strategy.setup_distributed()
    return strategy


def test_a_step_of_packs_trains_as_train_batch_does() -> None:
    batches = [make_batch(samples(4)[:2]), make_batch(samples(4)[2:])]
    weights = [float(num_tokens(batch)) for batch in batches]
    results = []
    for by_steps in (False, True):
        strategy, policy = made(), tiny_policy()
        policy, optimizer = strategy.prepare((policy, adamw(policy.parameters())))
        if not by_steps:
            strategy.train_batch(batches, loss_fn, num_tokens)
        else:
            step = strategy.get_forward_step_func(loss_fn)
            (micro_batches,) = strategy.make_data_iterator_list(iter(batches))
            for weight in weights:
                outputs, make_loss = step(micro_batches, policy)
                loss, numbers = make_loss(outputs)
                assert numbers["loss"] == loss.detach()
                strategy.backward(loss, policy, optimizer, weight=weight / sum(weights))
            strategy.optimizer_step(optimizer, policy, None)
        results.append(torch.cat([item.detach().reshape(-1) for item in policy.parameters()]))
    assert_close(results[1], results[0], atol=1e-7, rtol=0)


def test_a_step_of_rows_scores_the_next_tokens(hf: Any) -> None:
    strategy = made()
    step = strategy.get_forward_step_func()
    with torch.no_grad():
        outputs, same = step(iter([{"input_ids": IDS, "attention_mask": MASK}]), Policy(deepcopy(hf)))
        wanted = own_logits(hf).log_softmax(-1)
    assert same(outputs) is outputs
    found = outputs["log_probs"]
    assert_close(found[1, :4], wanted[1, :4].gather(-1, IDS[1, 1:, None])[:, 0], atol=1e-4, rtol=0)
    assert found[:, -1].tolist() == [*found[0, :2].tolist(), 0.0] == [0.0] * 3
    assert float(outputs["entropy"][1, 0]) > 0


def test_positions_are_those_of_the_rows_tokens_or_refused(hf: Any) -> None:
    positions = (MASK.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        wanted = StrategyBase.custom_forward(hf, IDS, MASK)
        assert_close(StrategyBase.custom_forward(hf, IDS, MASK, positions), wanted, atol=0, rtol=0)
    with pytest.raises(ValueError, match="count the tokens of each row from 0"):
        StrategyBase.custom_forward(hf, IDS, MASK, positions + MASK)
