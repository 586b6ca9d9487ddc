"""Trains the tiny model under a strategy with the samples split in many ways; all must equal plain training."""

from __future__ import annotations

from typing import Any, NamedTuple

from lightrl.strategy.base import StrategyBase
from lightrl.testing.tiny_training import (
    EVERYTHING,
    STEPS,
    MakeOptimizer,
    Trained,
    adamw,
    freeze,
    loss_fn,
    make_batch,
    num_tokens,
    samples,
    sgd,
    tiny_policy,
    trainable,
)


class Variant(NamedTuple):
    """One way to train: optimizer, clipping, how the samples are split, and which parameters are frozen."""

    make_optimizer: MakeOptimizer = adamw
    max_norm: float = 1.0  # 0 does not clip: a clip hides a gradient that is wrong by a factor, and so does Adam
    micro_size: int = EVERYTHING
    all_on_the_last_rank: bool = False
    frozen: str | None = None  # freezes parameters whose Hugging Face name begins with this


VARIANTS = {
    "all at once": Variant(),
    "micro-batches of 1": Variant(micro_size=1),
    "micro-batches of 4": Variant(micro_size=4),
    "a rank without samples": Variant(micro_size=2, all_on_the_last_rank=True),
    "sgd without clipping": Variant(make_optimizer=sgd, max_norm=0.0, micro_size=2),
    "a frozen embedding": Variant(make_optimizer=sgd, max_norm=0.0, micro_size=4, frozen="model.embed_tokens"),
}

# For a combination of options that are each tested with all of VARIANTS: both optimizers, with and without clipping,
# uneven micro-batches, a rank without any, frozen parameters.
FEW_VARIANTS = ("a rank without samples", "sgd without clipping", "a frozen embedding")


def train(strategy: StrategyBase, variant: Variant, steps: int = STEPS) -> Trained:
    """Trains a tiny policy in this way and returns the results, which must equal those of plain PyTorch."""
    rank, world = strategy.comm.rank, strategy.comm.world
    # Rank 0's weights must be used, whatever the other ranks were built with.
    policy: Any = tiny_policy(seed=rank, device="cpu" if strategy.materializes_weights else "meta")
    freeze(policy.hf, variant.frozen)
    policy = strategy.prepare_model(policy)
    optimizer = variant.make_optimizer(trainable(policy))
    strategy.register(policy, optimizer)
    strategy.max_norm = variant.max_norm
    losses, norms = [], []
    for step in range(steps):
        everything = samples(step)
        mine = everything[rank::world]
        if variant.all_on_the_last_rank:
            mine = everything if rank == world - 1 else []
        size = variant.micro_size
        parts = [mine[i : i + size] for i in range(0, len(mine), size)] or [[]]
        batches = [make_batch(part).to(strategy.device) for part in parts]
        result = strategy.train_batch(batches, loss_fn, num_tokens, model=policy)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    parameters = {name: tensor.detach().cpu().clone() for name, tensor in strategy.full_parameters(policy)}
    return Trained(losses, norms, parameters)
