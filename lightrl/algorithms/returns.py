"""Estimators of one advantage per token from rewards per token, on packed sequences.

An estimator is `fn(tokens: TokenRewards, **parameters) -> TokenReturns`. Tokens where the mask is False (such as a
tool's output) are not actions of the policy: they are skipped as if the sequence did not contain them, and get 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightrl.algorithms.losses import require_bool_mask, require_same_shape, require_sequence_index
from lightrl.algorithms.ranges import Share
from lightrl.algorithms.registry import returns


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRewards:
    """The response tokens of whole sequences, laid end to end, and their rewards."""

    rewards: Tensor  # [N] for producing the token; not read where the mask is False
    mask: Tensor  # [N] bool, True = produced by the policy
    sequence_index: Tensor  # [N] int64 in [0, num_sequences), ascending
    num_sequences: int
    values: Tensor | None = None  # [N] the critic's value of the state in which the token was chosen; gae needs it
    final_values: Tensor | None = None  # [num_sequences] of the state after the last token: 0 where it is terminal,
    # the critic's value where the response was only cut off. None: all are terminal.
    turn_index: Tensor | None = None  # [N] int64, ascending within a sequence; turn_returns needs it

    def __post_init__(self) -> None:
        require_same_shape(rewards=self.rewards, mask=self.mask)
        require_sequence_index(self.sequence_index, self.mask, self.num_sequences)
        if (self.sequence_index.diff() < 0).any():
            raise ValueError("sequence_index must ascend: the tokens of a sequence must be adjacent and in order.")
        for name, given in (("values", self.values), ("turn_index", self.turn_index)):
            if given is not None:
                require_same_shape(mask=self.mask, **{name: given})
        if self.final_values is not None and self.final_values.shape != (self.num_sequences,):
            raise ValueError(f"final_values has shape {list(self.final_values.shape)}: it must be [num_sequences].")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenReturns:
    """Advantages and returns per token, detached, 0 where the mask is False."""

    advantages: Tensor  # [N]
    returns: Tensor  # [N] what a critic is trained towards


def rewards_at_the_end(rewards: Tensor, mask: Tensor, sequence_index: Tensor) -> Tensor:
    """Gives each sample's reward to its last trained token and 0 to all others, [N].

    A sequence without a trained token loses its reward.

    Args:
        rewards: One per sequence, [S].
        mask: True = trained, [N].
        sequence_index: Ascending, [N].
    """
    require_sequence_index(sequence_index, mask, len(rewards))
    indices, owners = mask.nonzero().squeeze(1), sequence_index[mask]
    is_last = torch.ones_like(owners, dtype=torch.bool)
    is_last[:-1] = owners[1:] != owners[:-1]
    out = rewards.new_zeros(mask.shape)
    out[indices[is_last]] = rewards[owners[is_last]]
    return out


def rewards_when_earned(rewards: Tensor, earned: Tensor, mask: Tensor, sequence_index: Tensor) -> Tensor:
    """Gives each trained token what it earned, and the last one of each sample also the rest of the reward, [N].

    Args:
        rewards: One per sequence, [S].
        earned: The part of the reward that each token earned, [N]. Parts of untrained tokens belong to the rest.
        mask: True = trained, [N].
        sequence_index: Ascending, [N].
    """
    require_same_shape(earned=earned, mask=mask)
    earned = torch.where(mask, earned, 0.0)
    rest = rewards.index_add(0, sequence_index, -earned)
    return rewards_at_the_end(rest, mask, sequence_index) + earned


def kl_penalised(rewards: Tensor, kl: Tensor, mask: Tensor, *, coef: float) -> Tensor:
    """Subtracts coef x kl from the reward of each trained token, [N]: the KL in the reward (arXiv:2203.02155).

    Use the estimate k1 here: summed over a response it is the response's log ratio, whose mean is the KL.
    """
    require_same_shape(rewards=rewards, kl=kl, mask=mask)
    require_bool_mask(mask)
    return torch.where(mask, rewards - coef * kl.detach(), 0.0)


@returns()
def gae(tokens: TokenRewards, *, gamma: Share = 1.0, lam: Share = 1.0) -> TokenReturns:
    """Estimates A_t = d_t + gamma lam A_t+1, d_t = r_t + gamma V_t+1 - V_t (GAE, arXiv:1506.02438, eq. 16).

    The returns are A + V.
    """
    if tokens.values is None:
        raise ValueError("gae needs the critic's values: give TokenRewards(values=...), one per token.")
    rewards, values, owners = (
        part.detach()[tokens.mask] for part in (tokens.rewards, tokens.values, tokens.sequence_index)
    )
    goes_on = _goes_on(owners)
    after = torch.zeros_like(values)
    after[:-1] = values[1:]
    last = torch.zeros_like(values) if tokens.final_values is None else tokens.final_values.detach().to(values)[owners]
    deltas = rewards + gamma * torch.where(goes_on, after, last) - values
    advantages = discounted_sums(deltas, goes_on.to(deltas.dtype) * (gamma * lam))
    return TokenReturns(
        advantages=_scattered(advantages, tokens.mask), returns=_scattered(advantages + values, tokens.mask)
    )


@returns(uses_critic=False)
def returns_to_go(tokens: TokenRewards, *, gamma: Share = 1.0) -> TokenReturns:
    """Returns each token's reward plus gamma times the next token's return; REINFORCE++ whitens the result."""
    rewards, owners = tokens.rewards.detach()[tokens.mask], tokens.sequence_index[tokens.mask]
    totals = _scattered(discounted_sums(rewards, _goes_on(owners).to(rewards.dtype) * gamma), tokens.mask)
    return TokenReturns(advantages=totals, returns=totals)


@returns(uses_critic=False)
def turn_returns(tokens: TokenRewards, *, gamma: Share = 1.0) -> TokenReturns:
    """Gives all tokens of a turn the turn's reward plus gamma times the return of the next turn.

    A turn's reward is the sum over its tokens; with a single turn it is the sample's reward.
    """
    if tokens.turn_index is None:
        raise ValueError("turn_returns needs TokenRewards(turn_index=...), the turn of each token.")
    rewards, owners, turns = (
        part.detach()[tokens.mask] for part in (tokens.rewards, tokens.sequence_index, tokens.turn_index)
    )
    goes_on = _goes_on(owners)
    is_same_turn = goes_on & (turns.diff(append=turns[-1:]) == 0)
    # Within a turn nothing is discounted, so that the sum at its first token is that of the whole turn.
    sums = discounted_sums(rewards, torch.where(is_same_turn, 1.0, goes_on.to(rewards.dtype) * gamma))
    starts = torch.ones_like(is_same_turn)
    starts[1:] = ~is_same_turn[:-1]
    totals = _scattered(sums[starts][starts.cumsum(0) - 1], tokens.mask)
    return TokenReturns(advantages=totals, returns=totals)


def discounted_sums(values: Tensor, decay: Tensor) -> Tensor:
    """Solves y_t = values_t + decay_t y_t+1, [N], in log2(N) steps over all tokens rather than N steps over one.

    Args:
        values: One per token, [N].
        decay: 0 at the last token of each sequence, [N], of the dtype of values. A bool times a float would be float32.
    """
    sums = values.clone()
    step = 1
    while step < len(sums):
        # After this, sums_t covers the next 2 step tokens, and decay_t is the product of their decays.
        sums = torch.cat([sums[:-step] + decay[:-step] * sums[step:], sums[-step:]])
        decay = torch.cat([decay[:-step] * decay[step:], torch.zeros_like(decay[-step:])])
        step *= 2
    return sums


def _goes_on(owners: Tensor) -> Tensor:
    """Returns whether the next token belongs to the same sequence, [N] bool."""
    goes_on = torch.zeros_like(owners, dtype=torch.bool)
    goes_on[:-1] = owners[1:] == owners[:-1]
    return goes_on


def _scattered(values: Tensor, mask: Tensor) -> Tensor:
    out = torch.zeros(mask.shape, dtype=values.dtype, device=values.device)
    out[mask] = values
    return out
