"""A tiny model, samples of uneven lengths, a loss, and the plain PyTorch training that every strategy must equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import AutoModelForCausalLM, Qwen3Config

from lightrl.algorithms.losses import ppo_clip
from lightrl.algorithms.tokens import PolicyTokens
from lightrl.data.packing import dummy_batch, pack
from lightrl.models.policy import Policy
from lightrl.records import Experience, PackedBatch, Prompt, Sample, TokenScores

VOCAB = 98  # not a multiple of 4 ranks; the embedding is tied: both have broken sharded training before
TEMPERATURE = 0.8
STEPS = 3
EVERYTHING = 99  # samples in a micro-batch: more than there are

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


class Trained(NamedTuple):
    """The result of a training."""

    losses: list[float]
    norms: list[float]  # before clipping
    parameters: dict[str, Tensor]


def tiny_policy(seed: int = 0, device: str = "cpu") -> Policy:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    with torch.device(device):
        return Policy(AutoModelForCausalLM.from_config(config))


def samples(step: int, count: int = 9) -> list[Experience]:
    """Draws prompts of 1 to 6 tokens and responses of 1 to 12; the same on every rank."""
    draw = torch.Generator().manual_seed(100 + step)
    return [_experience(position, draw) for position in range(count)]


def _experience(position: int, draw: torch.Generator) -> Experience:
    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=draw))

    prompt = tuple(integer(0, VOCAB) for _ in range(integer(1, 7)))
    response = tuple(integer(0, VOCAB) for _ in range(integer(1, 13)))
    logprobs = (-4.6 + 0.3 * torch.randn(len(response), generator=draw)).tolist()
    sample = Sample(
        prompt=Prompt(index=position, text="", token_ids=prompt),
        position=position,
        sample_index=0,
        response_ids=response,
        sampler_logprobs=tuple(logprobs),
        versions=(0,) * len(response),
        finish_reason="stop",
        text="",
    )
    return Experience(sample=sample, reward=0.0, advantage=float(torch.randn((), generator=draw)))


def make_batch(experiences: Sequence[Experience]) -> PackedBatch:
    if not experiences:
        return dummy_batch(temperature=TEMPERATURE)
    old = {(e.sample.position, 0): e.sample.sampler_logprobs for e in experiences}
    return pack(experiences, temperature=TEMPERATURE, old_logprobs=old, ref_logprobs=None)


def loss_fn(scores: TokenScores, batch: PackedBatch) -> Tensor:
    assert batch.old_logprobs is not None
    tokens = PolicyTokens(
        logprobs=scores.logprobs,
        old_logprobs=batch.old_logprobs,
        advantages=batch.advantages,
        mask=batch.loss_mask,
        sequence_index=batch.sequence_index,
        num_sequences=len(batch.keys),
    )
    loss_sum = ppo_clip(tokens, clip_low=0.2, clip_high=0.3).terms.sum()
    entropy = torch.where(batch.loss_mask, scores.entropy, 0.0).sum()
    return (loss_sum - 0.01 * entropy) / num_tokens(batch).clamp(min=1)


def num_tokens(batch: PackedBatch) -> Tensor:
    return batch.loss_mask.sum()


def padded_loss(model: Any, experiences: Sequence[Experience]) -> Tensor:
    """Computes the same loss from transformers' padded forward and full logits, without any code of lightrl."""
    longest = max(e.num_tokens for e in experiences)
    total, count = torch.zeros(()), 0
    ids = torch.zeros(len(experiences), longest, dtype=torch.int64)
    mask = torch.zeros(len(experiences), longest, dtype=torch.int64)
    for row, e in enumerate(experiences):
        ids[row, : e.num_tokens] = torch.tensor(e.sample.prompt.token_ids + e.sample.response_ids)
        mask[row, : e.num_tokens] = 1
    logprobs = (model(input_ids=ids, attention_mask=mask).logits.float() / TEMPERATURE).log_softmax(-1)
    for row, e in enumerate(experiences):
        first = len(e.sample.prompt.token_ids) - 1
        own = logprobs[row, first : e.num_tokens - 1]  # these positions predict the response
        chosen = own.gather(1, torch.tensor(e.sample.response_ids)[:, None])[:, 0]
        ratio = torch.exp(chosen - torch.tensor(e.sample.sampler_logprobs))
        policy = torch.minimum(ratio * e.advantage, ratio.clamp(0.8, 1.3) * e.advantage)
        entropy = -(own.exp() * own).sum(-1)
        total = total - policy.sum() - 0.01 * entropy.sum()
        count += len(chosen)
    return total / count


def plain_training(
    make_optimizer: MakeOptimizer, max_norm: float, *, frozen: str | None = None, steps: int = STEPS
) -> Trained:
    """Takes plain steps in one process; parameters whose name begins with `frozen` do not train."""
    torch.manual_seed(0)
    model: Any = tiny_policy().hf
    model.set_attn_implementation("eager")
    freeze(model, frozen)
    parameters = trainable(model)
    optimizer = make_optimizer(parameters)
    losses, norms = [], []
    for step in range(steps):
        loss = padded_loss(model, samples(step))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        norms.append(float(norm))
    return Trained(losses, norms, {name: p.detach().clone() for name, p in model.named_parameters()})


def freeze(model: nn.Module, prefix: str | None) -> None:
    for name, parameter in model.named_parameters():
        if prefix is not None and name.startswith(prefix):
            parameter.requires_grad_(False)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Makes AdamW with two groups, which a strategy must keep apart."""
    found = list(parameters)
    half = len(found) // 2
    groups = [{"params": found[:half], "weight_decay": 0.1}, {"params": found[half:], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3)


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)
