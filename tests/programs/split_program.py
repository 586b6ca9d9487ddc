"""Checks that models split over ranks (--tp_size, --sp_size) give the results of one process.

It runs on several ranks and takes the flags of train_grpo.py.
"""

import sys
import tempfile
from dataclasses import fields

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig, Qwen3Config

from lightrl.config import GRPOConfig, parse_config
from lightrl.models.critic import ActorCritic, Critic, ValueHead
from lightrl.models.policy import Policy
from lightrl.models.reward_model import RewardModel
from lightrl.strategy import create_strategy
from lightrl.strategy.layout.sequence_parallel import UlyssesGroup
from lightrl.testing.tiny_training import (
    expect,
    fresh,
    make_batch,
    my_batches,
    parameters,
    same,
    samples,
    train,
)

SIZES = {
    "vocab_size": 98,
    "hidden_size": 36,
    "intermediate_size": 46,  # neither 4 ranks share its rows evenly, nor 2 the 23 of a part
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


def llama(num_kv_heads: int = 2) -> LlamaConfig:
    return LlamaConfig(
        **SIZES, num_key_value_heads=num_kv_heads, attention_bias=True, mlp_bias=True, tie_word_embeddings=False,
        pad_token_id=0, num_labels=1,
    )  # fmt: skip


def qwen3() -> Qwen3Config:
    return Qwen3Config(**SIZES, num_key_value_heads=2, tie_word_embeddings=True)


def seeded(build):
    """The same on every rank; biases and norms are drawn too, since zeros and ones would hide what is left out."""
    torch.manual_seed(0)
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


MODELS = {
    "policy with biases": lambda: Policy(AutoModelForCausalLM.from_config(llama())),
    "policy with tied embeddings": lambda: Policy(AutoModelForCausalLM.from_config(qwen3())),
    "critic": lambda: Critic(AutoModel.from_config(llama()), ValueHead(36)),
    "actor critic": lambda: ActorCritic(AutoModelForCausalLM.from_config(llama()), ValueHead(36)),
    "reward model": lambda: RewardModel(AutoModelForSequenceClassification.from_config(llama())),
}
ONLY_TOKENS = {
    "one key-value head for two ranks": lambda: Policy(AutoModelForCausalLM.from_config(llama(num_kv_heads=1))),
}


def outputs_of(output) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    values = [getattr(output, item.name) for item in fields(output)]
    return [value for value in values if value is not None]


def loss_of(output) -> Tensor:
    """Every value counts, each in another way."""
    parts = outputs_of(output)
    return sum(
        ((place + 1) * part.square() * torch.arange(1, part.numel() + 1)).sum() for place, part in enumerate(parts)
    )


def check_model(strategy, build) -> None:
    """Outputs and gradients of all ranks' micro-batches; the whole of every parameter."""
    alone, model = seeded(build), strategy.prepare_model(seeded(build))
    everyones = [[make_batch(samples(0)[rank :: strategy.comm.world])] for rank in range(strategy.comm.world)]
    compare(strategy, alone, model, everyones=everyones)
    wanted = dict(alone.named_parameters())
    for name, parameter in sorted(model.named_parameters()):
        weight = strategy.layout.gather(parameter.detach())
        assert torch.equal(weight, wanted[name].detach()), name


def compare(strategy, alone, model, *, everyones, given=None, atol=1e-4) -> None:
    """Compares outputs and gradients of a model with those of the same one in one process.

    everyones: the micro-batches of each rank. given: those of this rank as the model takes them, if it takes others.
    atol: of gradients, as a share of the largest of a parameter.
    """
    mine = everyones[strategy.comm.rank]
    given = given or mine
    for output, batch in zip(strategy.forward(given, model=model), mine, strict=True):
        for ours, wanted in zip(outputs_of(output), outputs_of(alone(batch)), strict=True):
            assert_close(ours, wanted, atol=1e-5, rtol=1e-5)
    for batch in (batch for part in everyones for batch in part):
        loss_of(alone(batch)).backward()
    for batch in strategy.group_batches(given).batches:
        strategy.backward(loss_of(model(batch)), model, None, weight=1.0)
    wanted = {name: parameter.grad for name, parameter in alone.named_parameters()}
    for name, parameter in sorted(model.named_parameters()):
        if wanted[name] is None:
            assert parameter.grad is None, name
            continue
        scale = float(wanted[name].abs().max()) + 1e-3
        found = strategy.layout.gather(parameter.grad)
        assert_close(
            found / scale, wanted[name] / scale, atol=atol, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


def check_replicas_stay_equal(strategy) -> None:
    """What tensor parallelism keeps whole, the norms of queries above all, does not drift apart: the loss hardly shows
    it."""
    policy, _ = fresh(strategy)
    for step in range(3):
        train(strategy, policy, step)
    for name, parameter in sorted(policy.named_parameters()):
        mesh = strategy.meshes.tensors
        if "norm" in name and parameter.device_mesh != strategy.meshes.rest:
            own = parameter.to_local().detach().contiguous()
            others = [torch.empty_like(own) for _ in range(mesh.size())]
            dist.all_gather(others, own, group=mesh.get_group())
            assert all(torch.equal(other, own) for other in others), name


def check_frozen_stays_frozen(strategy) -> None:
    policy = seeded(MODELS["policy with biases"])
    for parameter in policy.hf.model.layers[0].parameters():
        parameter.requires_grad_(False)
    policy = strategy.prepare_model(policy)
    frozen = {name for name, parameter in policy.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in policy.named_parameters() if ".layers.0." in name}


def check_average(strategy) -> None:
    """Of the parts of weights that are cut along two axes; a checkpoint holds it."""
    policy, _ = fresh(strategy)
    strategy.keep_average(policy, 0.5)
    first = parameters(strategy, policy)
    train(strategy, policy, 0)
    last = parameters(strategy, policy)
    wanted = {name: 0.5 * first[name] + 0.5 * value for name, value in last.items()}
    folder = strategy.comm.broadcast_object(tempfile.mkdtemp())
    strategy.save_ckpt(policy, folder, max_mem=0)
    again, _ = fresh(strategy, seed=5)
    strategy.keep_average(again, 0.5)
    strategy.load_ckpt(again, folder)
    for model in (policy, again):
        with strategy.averaged_weights(model):
            found = parameters(strategy, model)
        for name, value in wanted.items():
            assert_close(found[name], value, atol=1e-6, rtol=0)
        same(parameters(strategy, model), last)


def check_exchange(strategy) -> None:
    """Two heads of one token on each of two ranks: 10 x token + head."""
    group, rank = UlyssesGroup(strategy.meshes.tokens.get_group()), strategy.meshes.tokens.get_local_rank()
    part = torch.tensor([10.0 * rank, 10.0 * rank + 1]).view(1, 2, 1, 1).requires_grad_()
    heads = group.exchange(part)
    assert heads.flatten().tolist() == [rank, 10.0 + rank]  # this rank's head of both tokens
    back = group.exchange(heads.transpose(1, 2))
    assert back.shape == (1, 1, 2, 1)
    assert back.flatten().tolist() == part.flatten().tolist()
    weights = torch.tensor([1.0, 2.0]) + 2 * rank  # of head `rank`: token 0, token 1
    (heads.flatten() * weights).sum().backward()
    # Token t's gradient of head h is the weight that rank h gave it: 1 + t + 2h
    assert part.grad.flatten().tolist() == [1.0 + rank, 3.0 + rank]
    values = torch.tensor([1.0 + rank], requires_grad=True)
    (group.total(values) * 5).sum().backward()
    assert values.grad.tolist() == [5.0]


def check_different_batches_are_refused(strategy) -> None:
    policy, _ = fresh(strategy)
    mine = my_batches(strategy, 0)[0]
    expect(ValueError, "called the model on different micro-batches", lambda: policy(mine))
    model = nn.Linear(2, 2)
    expect(ValueError, "not Linear", lambda: strategy.prepare_model(model))


def main() -> None:
    strategy = create_strategy(parse_config(GRPOConfig, sys.argv[1:]))
    strategy.setup_distributed()
    is_cut = strategy.options.tp_size > 1
    for name, build in (MODELS if is_cut else MODELS | ONLY_TOKENS).items():
        print(name, flush=True)
        check_model(strategy, build)
    if is_cut:
        check_replicas_stay_equal(strategy)
        check_average(strategy)
        check_frozen_stays_frozen(strategy)
    if strategy.options.sp_size > 1:
        check_exchange(strategy)
    check_different_batches_are_refused(strategy)
    strategy.close()


if __name__ == "__main__":
    main()
