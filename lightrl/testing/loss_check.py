"""check_loss: one update has one loss and one gradient, however its sequences are packed into micro-batches.

The parts are combined as `StrategyBase.train_batch` does: sum(loss x weight) / sum(weight) over all micro-batches of
all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from lightrl.algorithms.losses import PolicyTokens, TokenLoss, TokenWeights, mean_loss, sequence_mean, token_mean

Split: TypeAlias = Sequence[Sequence[int] | None]  # micro-batches: sequences as they are packed; None: a rank's dummy
Aggregate: TypeAlias = Callable[[Tensor, Tensor, int], TokenWeights]

LENGTHS = [3, 1, 7, 4, 2, 5]
WHOLE: Split = [range(len(LENGTHS))]
SPLITS: list[Split] = [
    [[0], [1], [2], [3], [4], [5]],
    [[0, 1, 2], [3, 4, 5]],
    [[5, 3], [2], [4, 0, 1]],
    [[4, 2, 1, 5, 0], [3], None, None],
]
NUM_FEATURES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeTokens:
    """The tokens of a made-up micro-batch, and what else a loss may be computed from."""

    policy: PolicyTokens
    sampler_logprobs: Tensor  # [N]
    ref_logprobs: Tensor  # [N]


def check_loss(loss: Callable[..., TokenLoss], **parameters: object) -> None:
    """Raises AssertionError if the value or gradient of a policy loss depends on how sequences are split.

    The update has six sequences. One of them is not trained, another only in part. All that an untrained token has is
    NaN, except for its logprob.
    It is computed as a whole and in four splits, with the means over tokens and over sequences.

    Args:
        loss: As --algorithm.loss takes it: a function of PolicyTokens.
        parameters: Of the loss, as in --algorithm.loss_args.
    """
    for aggregate in (token_mean, sequence_mean):
        expected = loss_and_gradient(WHOLE, lambda made: loss(made.policy, **parameters).terms, aggregate)
        for split in SPLITS:
            given = loss_and_gradient(split, lambda made: loss(made.policy, **parameters).terms, aggregate)
            if not all(map(_are_close, given, expected)):
                raise _depends_on_the_split(loss, aggregate, split, given[0], expected[0])


def loss_and_gradient(
    split: Split, terms: Callable[[MadeTokens], Tensor], aggregate: Aggregate
) -> tuple[Tensor, Tensor]:
    """Returns the loss of the update, and its gradient with respect to the parameters of a linear policy."""
    theta = torch.full((NUM_FEATURES,), 0.1, dtype=torch.float64, requires_grad=True)
    losses, weights = [], []
    for members in split:
        made = _micro_batch([_sequence(member) for member in members] if members else [_DUMMY], theta)
        policy = made.policy
        token_weights = aggregate(policy.mask, policy.sequence_index, policy.num_sequences)
        losses.append(mean_loss(terms(made), token_weights))
        weights.append(token_weights.total)
    total = torch.stack(weights).sum()
    whole = (torch.stack(losses) * torch.stack(weights)).sum() / total
    (gradient,) = torch.autograd.grad(whole, theta)
    return whole.detach(), gradient


_LOGPROBS = ("base", "old", "sampler", "ref")
_DUMMY = {
    "features": torch.zeros(1, NUM_FEATURES, dtype=torch.float64),
    **{name: torch.zeros(1, dtype=torch.float64) for name in (*_LOGPROBS, "advantages")},
    **{name: torch.zeros(1, dtype=torch.bool) for name in ("selected", "mask")},
}


def _sequence(index: int) -> dict[str, Tensor]:
    """Sequence 1 trains nothing, sequence 3 has a masked middle; what is masked is NaN."""
    generator = torch.Generator().manual_seed(index)
    length = LENGTHS[index]
    mask = torch.ones(length, dtype=torch.bool)
    if index == 1:
        mask[:] = False
    if index == 3:
        mask[1:3] = False
    old = -torch.rand(length, generator=generator, dtype=torch.float64) - 0.2
    fields = {
        "features": torch.randn(length, NUM_FEATURES, generator=generator, dtype=torch.float64),
        "base": old + 0.5 * torch.randn(length, generator=generator, dtype=torch.float64),
        "old": old,
        "sampler": old + 0.5 * torch.randn(length, generator=generator, dtype=torch.float64),
        "ref": old + 0.5 * torch.randn(length, generator=generator, dtype=torch.float64),
        "advantages": torch.randn(length, generator=generator, dtype=torch.float64),
        "selected": torch.rand(length, generator=generator) < 0.3,
        "mask": mask,
    }
    for name in ("old", "sampler", "ref", "advantages"):
        fields[name] = torch.where(mask, fields[name], torch.nan)
    return fields


def _micro_batch(members: Sequence[dict[str, Tensor]], theta: Tensor) -> MadeTokens:
    joined = {name: torch.cat([member[name] for member in members]) for name in _DUMMY}
    lengths = torch.tensor([len(member["mask"]) for member in members])
    policy = PolicyTokens(
        logprobs=joined["base"] + joined["features"] @ theta,
        old_logprobs=joined["old"],
        advantages=joined["advantages"],
        mask=joined["mask"],
        sequence_index=torch.arange(len(members)).repeat_interleave(lengths),
        num_sequences=len(members),
        selected=joined["selected"],
    )
    return MadeTokens(policy=policy, sampler_logprobs=joined["sampler"], ref_logprobs=joined["ref"])


def _are_close(given: Tensor, expected: Tensor) -> bool:
    return torch.allclose(given, expected, atol=1e-6, rtol=0)


def _depends_on_the_split(
    loss: Callable[..., TokenLoss], aggregate: Aggregate, split: Split, given: Tensor, expected: Tensor
) -> AssertionError:
    names = [getattr(function, "__name__", str(function)) for function in (loss, aggregate)]
    return AssertionError(
        f"The loss {names[0]} under {names[1]} is {given.item():.6g} for the micro-batches {split} of an update and "
        f"{expected.item():.6g} for the whole of it, or their gradients differ. A term may depend only on the tokens "
        "of its own sequence, and never on an entry where the mask is False, most of which are NaN here."
    )
