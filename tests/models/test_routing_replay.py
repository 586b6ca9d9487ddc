"""The policy's forward with the experts of another router, as an engine would have chosen them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_hybrids import tiny_model as tiny_hybrid
from tiny_moe import CONFIGS, NUM_EXPERTS, NUM_LAYERS, TOP_K, tiny_moe
from torch import Tensor
from torch.testing import assert_close

from lightrl.models.policy import Policy, response_batch
from lightrl.models.routing import routers_of
from lightrl.models.routing_replay import attach_replay, balance_loss, detach_replay, z_loss
from lightrl.records import PackedBatch, RoutingScores

PAIRS = (([5, 6, 7], [8, 9]), ([10, 11], [12, 13, 14, 15]))


def policy(name: str, *, keeps_logits: bool = False) -> Policy:
    made = Policy(tiny_moe(name))
    attach_replay(made, keeps_logits=keeps_logits)
    return made


def routed(experts: Tensor, pairs: Sequence[Any] = PAIRS) -> PackedBatch:
    return replace(response_batch(list(pairs)), routing=experts.to(torch.int16))


def random_experts(num_tokens: int = 11) -> Tensor:
    draw = torch.rand(num_tokens, NUM_LAYERS, NUM_EXPERTS, generator=torch.Generator().manual_seed(3))
    return draw.argsort(-1)[..., :TOP_K]


def forced(model: Policy, experts: Tensor) -> Tensor:
    """The logprobs with experts written into each router's output by hand."""
    handles = []
    for index, router in enumerate(routers_of(model.hf)):
        chosen = experts[:, index].to(torch.int64)

        def put(module: Any, args: Any, output: Any, router: Any = router, chosen: Tensor = chosen) -> Any:
            return router.with_experts(output, chosen)

        handles.append(router.module.register_forward_hook(put))
    with torch.no_grad():
        logprobs: Tensor = model(response_batch(list(PAIRS))).logprobs
    for handle in handles:
        handle.remove()
    return logprobs


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_the_forward_uses_the_experts_of_the_pack(name: str) -> None:
    model, experts = policy(name), random_experts()
    with torch.no_grad():
        own = model(response_batch(list(PAIRS)))
        replayed = model(routed(experts))
        unknown = model(routed(torch.full((11, NUM_LAYERS, TOP_K), -1)))
    assert_close(replayed.logprobs, forced(model, experts), atol=1e-6, rtol=0)
    assert (replayed.logprobs - own.logprobs).abs().max() > 1e-3
    assert_close(unknown.logprobs, own.logprobs, atol=1e-5, rtol=0)
    assert own.routing.num_routed == unknown.routing.num_routed == 0


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_replaying_a_routers_own_experts_changes_nothing(name: str) -> None:
    model, own = policy(name), list[Tensor]()
    for router in routers_of(model.hf):
        router.module.register_forward_hook(lambda m, a, output, router=router: own.append(router.experts(output)))
    with torch.no_grad():
        plain = model(response_batch(list(PAIRS)))
        replayed = model(routed(torch.stack(own, dim=1)))
    assert_close(replayed.logprobs, plain.logprobs, atol=1e-6, rtol=0)
    assert (replayed.routing.num_routed, replayed.routing.num_tokens_differ) == (11, 0)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "phimoe", "ernie4_5_moe", "afmoe", "laguna"])
def test_the_gradient_reaches_the_router_and_survives_checkpointing(name: str) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = policy(name, keeps_logits=True).train()
        if checkpointing:
            model.hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        scores = model(routed(random_experts()))
        scores.logprobs.sum().backward()
        assert all(next(router.module.parameters()).grad.abs().max() > 1e-4 for router in routers_of(model.hf))
        scores = model(routed(random_experts()))
        loss = scores.logprobs.sum() + balance_loss(scores.routing, (0, 5, 11)).sum()
        (loss + z_loss(scores.routing, (0, 5, 11)).sum()).backward()
        gradients.append([next(router.module.parameters()).grad for router in routers_of(model.hf)])
    for plain, recomputed in zip(*gradients, strict=True):
        assert plain.abs().max() > 1e-4
        assert_close(recomputed, plain, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["granitemoehybrid", "kimi_linear", "qwen3_next"])
def test_recurrent_layers_leave_the_experts_to_the_router(family: str) -> None:
    model = Policy(tiny_hybrid(family))
    attach_replay(model, keeps_logits=True)
    num_routers = len(routers_of(model.hf))
    draw = torch.rand(11, num_routers, 4, generator=torch.Generator().manual_seed(3))  # of 4 experts
    experts = draw.argsort(-1)[..., :2]
    replayed = model(routed(experts)).routing
    assert replayed.num_routed == 11
    for index, used in enumerate(replayed.experts):
        assert torch.equal(used, experts[:, index])


def test_a_model_that_runs_each_sequence_alone_is_refused() -> None:
    """Its routers would see one sequence at a time, and the losses of the routers need a whole pack."""
    with pytest.raises(ValueError, match=r"needs whole packs, but models of type minimax run each sequence alone"):
        attach_replay(Policy(tiny_hybrid("minimax")), keeps_logits=True)


def test_a_layer_of_experts_alone_is_refused() -> None:
    with pytest.raises(ValueError, match=r"does not know what in NemotronHBlock runs before the router"):
        attach_replay(Policy(tiny_hybrid("nemotron_h")), keeps_logits=False)


def test_layers_that_do_not_hand_the_experts_on_are_refused() -> None:
    model = policy("qwen3_moe")
    layer = model.hf.get_submodule(routers_of(model.hf)[1].layer_name)

    def drop(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {name: value for name, value in kwargs.items() if name != "expert_routing"}

    layer.register_forward_pre_hook(drop, with_kwargs=True)
    with pytest.raises(ValueError, match=r"--routing.replay: 1 of 2 routers got the experts of the pack"):
        model(routed(random_experts()))


def test_only_tokens_with_other_experts_are_counted() -> None:
    model = policy("qwen3_moe")
    with torch.no_grad():
        own: list[Tensor] = []
        hooks = [
            router.module.register_forward_hook(lambda m, a, out, router=router: own.append(router.experts(out)))
            for router in routers_of(model.hf)
        ]
        model(response_batch(list(PAIRS)))
        for hook in hooks:
            hook.remove()
        experts = torch.stack(own, dim=1).flip(-1)  # the order of a token's experts does not matter
        same = model(routed(experts)).routing
        # Another expert for token 10 in the last layer changes that choice alone, since nothing follows it. Token 4 is
        # not known, so 10 of the 11 tokens are counted.
        free = next(e for e in range(NUM_EXPERTS) if e not in experts[10, -1].tolist())
        experts[10, -1, 0] = free
        experts[4] = -1
        changed = model(routed(experts)).routing
    assert (same.num_routed, same.num_tokens_differ, same.num_choices_differ) == (11, 0, 0)
    assert (changed.num_routed, changed.num_tokens_differ, changed.num_choices_differ) == (10, 1, 1)


def test_another_policy_of_the_same_model_takes_over() -> None:
    first = policy("qwen3_moe")
    second = Policy(first.hf)
    attach_replay(second, keeps_logits=False)
    with torch.no_grad():
        scores = second(routed(random_experts()))
    assert_close(scores.logprobs, forced(second, random_experts()), atol=1e-6, rtol=0)


def test_a_policy_without_its_replay_uses_its_own_experts() -> None:
    model = policy("qwen3_moe")
    with torch.no_grad():
        own = model(response_batch(list(PAIRS)))
        assert detach_replay(model)
        found = model(routed(random_experts()))
    assert_close(found.logprobs, own.logprobs, atol=1e-6, rtol=0)
    assert found.routing is None
    assert not detach_replay(model)


def scores_of(logits: Sequence[Sequence[float]], experts: Sequence[Sequence[int]]) -> RoutingScores:
    return RoutingScores(
        logits=(torch.tensor(logits),),
        experts=(torch.tensor(experts),),
        is_sigmoid=False,
        num_layers=1,
        num_routed=0,
        num_tokens_differ=0,
        num_choices_differ=0,
    )


def test_router_losses_by_hand() -> None:
    ln3 = 1.0986122886681098
    # Sequence 1, two tokens of probabilities (1/4, 3/4), both to expert 1: 2 * (0 * 1/4 + 1 * 3/4) = 1.5.
    # Sequence 2, one token of (1/2, 1/2) to expert 0: 2 * (1 * 1/2) = 1.
    scores = scores_of([[0.0, ln3], [0.0, ln3], [0.0, 0.0]], [[1], [1], [0]])
    assert_close(balance_loss(scores, (0, 2, 3)), torch.tensor([1.5, 1.0]), atol=1e-6, rtol=0)
    # logsumexp(0, ln 3) = ln 4 and logsumexp(0, 0) = ln 2: squares 1.921812 and 0.480453.
    assert_close(z_loss(scores, (0, 2, 3)), torch.tensor([1.921812, 0.480453]), atol=1e-6, rtol=0)
    # Sigmoids of 0 and ln 3 are 1/2 and 3/4, so the shares are 2/5 and 3/5: 2 * 3/5 = 1.2.
    assert_close(balance_loss(replace(scores, is_sigmoid=True), (0, 2, 3)), torch.tensor([1.2, 1.0]), atol=1e-6, rtol=0)
