"""Routers of every kind: found, and their weights computed again from logits and experts."""

from __future__ import annotations

import inspect

import pytest
import torch
import transformers
from tiny_moe import CONFIGS, NUM_EXPERTS, NUM_LAYERS, QWEN, SHAPE, tiny_moe
from torch.testing import assert_close

from lightrl.models.routing import check_rules, routers_of, uses_sigmoid

SIGMOID = ("afmoe", "deepseek_v3", "hy_v3", "laguna", "minimax_m2")


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_each_family_has_a_rule_that_gives_its_own_weights(name: str) -> None:
    routers = routers_of(tiny_moe(name))
    assert [router.layer for router in routers] == list(range(NUM_LAYERS))
    check_rules(routers)
    assert uses_sigmoid(routers) == (name in SIGMOID)
    router = routers[0]
    biases = torch.zeros(NUM_EXPERTS)
    takes_biases = "bias" in str(inspect.signature(router.module.forward))
    hidden = torch.randn(5, SHAPE["hidden_size"])
    output = router.module(hidden[None] if name == "afmoe" else hidden, *([biases] if takes_biases else []))
    assert router.logits(output).shape == (5, NUM_EXPERTS)
    others = (router.experts(output) + 1) % NUM_EXPERTS
    assert_close(router.experts(router.with_experts(output, others)), others)


def test_weights_of_other_experts_by_hand() -> None:
    # softmax(0, ln 2, ln 3) = 1/6, 2/6, 3/6: experts 0 and 2 weigh 1/6 and 3/6, or of their sum 1/4 and 3/4.
    logits, experts = torch.tensor([[0.0, 2.0, 3.0]]), torch.tensor([[0, 2]])
    logits[0, 1:] = logits[0, 1:].log()
    qwen, mixtral = (routers_of(tiny_moe(name))[0] for name in ("qwen2_moe", "mixtral"))
    assert not qwen.module.norm_topk_prob
    assert_close(qwen.weigh(qwen.module, logits, experts), torch.tensor([[1 / 6, 3 / 6]]), atol=1e-6, rtol=0)
    assert_close(mixtral.weigh(mixtral.module, logits, experts), torch.tensor([[1 / 4, 3 / 4]]), atol=1e-6, rtol=0)


def test_a_dense_model_and_an_unknown_rule_are_refused() -> None:
    with pytest.raises(ValueError, match="qwen3 has no router that transformers records"):
        routers_of(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE)))
    model = tiny_moe("qwen3_moe")
    routers = routers_of(model)
    routers[1].module.norm_topk_prob = False
    check_rules(routers)
    own_forward = routers[1].module.forward

    def doubled(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits, weights, experts = own_forward(hidden)
        return logits, 2 * weights, experts

    routers[1].module.forward = doubled  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="does not know how Qwen3MoeTopKRouter weighs"):
        check_rules(routers)


def test_the_router_of_lfm2_is_refused() -> None:
    """Its rule would be known, but layers with convolutions hand no keyword on."""
    config = transformers.Lfm2MoeConfig(**SHAPE, **QWEN, num_dense_layers=0, layer_types=["full_attention"] * 2)
    with pytest.raises(ValueError, match="does not know how Lfm2MoeTopKRouter weighs"):
        check_rules(routers_of(transformers.AutoModelForCausalLM.from_config(config)))


@pytest.mark.parametrize("problem", [TypeError("forward() lacks a bias"), AttributeError("no norm_topk_prob")])
def test_a_router_that_cannot_be_called_by_itself_is_refused(problem: Exception) -> None:
    """A router that needs more than states and biases is refused."""
    routers = routers_of(tiny_moe("qwen3_moe"))

    def fail(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        raise problem

    routers[0].module.forward = fail  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="does not know how Qwen3MoeTopKRouter weighs"):
        check_rules(routers)
