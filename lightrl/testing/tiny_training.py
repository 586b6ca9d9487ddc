"""A tiny model, samples of uneven lengths, a loss, and the plain PyTorch training that every strategy must equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, Qwen3Config

from lightrl.algorithms.losses import PolicyTokens, ppo_clip
from lightrl.data.packing import dummy_batch, pack
from lightrl.engines.weights.fingerprint import KnownWeights
from lightrl.models.policy import Policy
from lightrl.records import Experience, PackedBatch, Prompt, Sample, TokenScores
from lightrl.strategy.base import StrategyBase, TrainBatchResult
from lightrl.strategy.serving.colocated_serving import WeightSource

VOCAB = 98  # not a multiple of 3 or 4 ranks, and the embedding is tied: both have broken sharded training before
TEMPERATURE = 0.8
STEPS = 3
_SMALL = 256  # elements; a smaller reduction carries a norm or a flag, not gradients
EVERYTHING = 99  # samples in a micro-batch: more than there are

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


class Trained(NamedTuple):
    """The result of a training."""

    losses: list[float]
    norms: list[float]  # before clipping
    parameters: dict[str, Tensor]


def tiny_policy(seed: int = 0, device: str = "cpu") -> Policy:
    """Builds a random two-layer Qwen3 whose embeddings are tied."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=35,  # not a multiple of 2, 3 or 4, so the ranks' shards differ in size
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
    """Draws prompts of 1 to 6 tokens and responses of 1 to 12 tokens, the same on every rank."""
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
    """Packs samples into a micro-batch; without samples it is a dummy."""
    if not experiences:
        return dummy_batch(temperature=TEMPERATURE)
    old = {(e.sample.position, 0): e.sample.sampler_logprobs for e in experiences}
    return pack(experiences, temperature=TEMPERATURE, old_logprobs=old, ref_logprobs=None)


def loss_fn(scores: TokenScores, batch: PackedBatch) -> Tensor:
    """Returns PPO's clipped loss, a mean over the trained tokens of a micro-batch."""
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
    """Returns the number of trained tokens of a micro-batch."""
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
    """Trains in plain PyTorch in one process; parameters whose name begins with `frozen` do not train."""
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
    """Freezes the parameters whose name begins with the prefix; None freezes none."""
    for name, parameter in model.named_parameters():
        if prefix is not None and name.startswith(prefix):
            parameter.requires_grad_(False)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that train."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Makes AdamW with two parameter groups, which a strategy must keep apart."""
    found = list(parameters)
    half = len(found) // 2
    groups = [{"params": found[:half], "weight_decay": 0.1}, {"params": found[half:], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3)


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Makes SGD, which does not hide errors of scale."""
    return torch.optim.SGD(parameters, lr=0.05)


# ---- On a strategy ---------------------------------------------------------------------------------------------------


def fresh(strategy: StrategyBase, seed: int = 0, make_optimizer: MakeOptimizer = adamw) -> tuple[Policy, Optimizer]:
    """Prepares a tiny policy on the strategy, with its optimizer."""
    policy: Any = strategy.prepare_model(tiny_policy(seed=seed))
    optimizer = make_optimizer(trainable(policy))
    strategy.register(policy, optimizer)
    return policy, optimizer


def my_batches(strategy: StrategyBase, step: int, size: int = 2) -> list[PackedBatch]:
    """Returns this rank's samples of a step as micro-batches."""
    mine = samples(step)[strategy.comm.rank :: strategy.comm.world]
    return [make_batch(mine[i : i + size]).to(strategy.device) for i in range(0, len(mine), size)]


def train(strategy: StrategyBase, policy: nn.Module, step: int) -> TrainBatchResult:
    """Takes one update on this rank's samples of a step."""
    return strategy.train_batch(my_batches(strategy, step), loss_fn, num_tokens, model=policy)


def parameters(strategy: StrategyBase, policy: nn.Module) -> dict[str, Tensor]:
    """Returns a copy of every whole parameter by name."""
    return {name: tensor.detach().cpu().clone() for name, tensor in strategy.full_parameters(policy)}


def same(actual: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Asserts equality bit for bit."""
    assert sorted(actual) == sorted(wanted)
    for name, value in wanted.items():
        assert_close(actual[name].detach(), value.detach(), atol=0, rtol=0, msg=partial("{}: {}".format, name))


def differ(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Returns whether any tensor differs."""
    return any(not torch.equal(value, second[name]) for name, value in first.items())


def expect(error_type: type[Exception] | tuple[type[Exception], ...], text: str, function: Callable[[], Any]) -> None:
    """Asserts that a call raises this error with this text in its message."""
    try:
        function()
    except error_type as error:
        if text not in str(error):
            raise AssertionError(f"{text!r} is not in the error") from error
        return
    raise AssertionError(f"no error with {text!r}")


class StaleSource:
    """A weight source that sends what another source sends, except for one stale parameter."""

    def __init__(self, honest: WeightSource, victim: str) -> None:
        self._honest, self._victim = honest, victim

    def weight_fingerprints(self, model: nn.Module, dtype: torch.dtype | None) -> KnownWeights | None:
        """Returns the fingerprints of the other source."""
        return self._honest.weight_fingerprints(model, dtype)

    def full_parameters(self, model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yields names and tensors."""
        for name, tensor in self._honest.full_parameters(model, dtype):
            yield name, tensor - 1e-3 if name == self._victim else tensor


@contextmanager
def counted_reductions() -> Iterator[list[str]]:
    """Collects the names of the large reductions that run in the body."""
    names = ("all_reduce", "reduce", "reduce_scatter_tensor", "reduce_scatter_single")  # the last since torch 2.13
    originals = {name: getattr(dist, name) for name in names if hasattr(dist, name)}
    calls: list[str] = []

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [item for item in (*args, *kwargs.values()) if isinstance(item, Tensor)]
            if max(tensor.numel() for tensor in tensors) > _SMALL:
                calls.append(name)
            return function(*args, **kwargs)

        return call

    try:
        for name, function in originals.items():
            setattr(dist, name, counting(name, function))
        yield calls
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)
