"""From rewards per token to advantages per token, on packed sequences.

An estimator is `fn(tokens: TokenRewards, **parameters) -> TokenReturns`. Tokens where the mask is False (a tool's
output) are no actions of the policy: they are left out as if the sequence did not have them, and get 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightrl.algorithms.shapes import require_bool_mask, require_same_shape, require_sequence_index


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRewards:
    """The response tokens of whole sequences, laid end to end."""

    rewards: Tensor  # [N] for having produced the token; not read where the mask is False
    mask: Tensor  # [N] bool, True = produced by the policy
    sequence_index: Tensor  # [N] int64 in [0, num_sequences), ascending
    num_sequences: int
    values: Tensor | None = None  # [N] the critic's, of the state in which the token was chosen; gae needs it
    final_values: Tensor | None = None  # [num_sequences] of the state after the last token: 0 where it is terminal,
    # the critic's value where the response was only cut off. None is all terminal.
    turn_index: Tensor | None = None  # [N] int64, ascending within a sequence; turn_returns needs it

    def __post_init__(self) -> None:
        require_same_shape(rewards=self.rewards, mask=self.mask)
        require_bool_mask(self.mask)
        require_sequence_index(self.sequence_index, self.mask, self.num_sequences)
        if (self.sequence_index.diff() < 0).any():
            raise ValueError("sequence_index must ascend: the tokens of a sequence stand together, in their order.")
        for name, given in (("values", self.values), ("turn_index", self.turn_index)):
            if given is not None:
                require_same_shape(mask=self.mask, **{name: given})
        if self.final_values is not None and self.final_values.shape != (self.num_sequences,):
            raise ValueError(f"final_values has shape {list(self.final_values.shape)}: it must be [num_sequences].")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenReturns:
    """Neither carries a gradient; both are 0 where the mask is False."""

    advantages: Tensor  # [N]
    returns: Tensor  # [N] what a critic is trained towards


def gae(tokens: TokenRewards, *, gamma: float = 1.0, lam: float = 1.0) -> TokenReturns:
    """A_t = d_t + gamma lam A_t+1 with d_t = r_t + gamma V_t+1 - V_t (GAE, arXiv:1506.02438, eq. 16); returns A + V."""
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
    advantages = discounted_sums(deltas, goes_on * (gamma * lam))
    return TokenReturns(
        advantages=_scattered(advantages, tokens.mask), returns=_scattered(advantages + values, tokens.mask)
    )


def returns_to_go(tokens: TokenRewards, *, gamma: float = 1.0) -> TokenReturns:
    """Each token's advantage is its own reward plus gamma times what follows; REINFORCE++ whitens it afterwards."""
    rewards, owners = tokens.rewards.detach()[tokens.mask], tokens.sequence_index[tokens.mask]
    returns = _scattered(discounted_sums(rewards, _goes_on(owners) * gamma), tokens.mask)
    return TokenReturns(advantages=returns, returns=returns)


def turn_returns(tokens: TokenRewards, *, gamma: float = 1.0) -> TokenReturns:
    """All tokens of a turn get the turn's reward plus gamma times the return of the next turn.

    A turn's reward is the sum over its tokens. With one turn it is the reward of the sample.
    """
    if tokens.turn_index is None:
        raise ValueError("turn_returns needs TokenRewards(turn_index=...), the turn of each token.")
    rewards, owners, turns = (
        part.detach()[tokens.mask] for part in (tokens.rewards, tokens.sequence_index, tokens.turn_index)
    )
    goes_on = _goes_on(owners)
    is_same_turn = goes_on & (turns.diff(append=turns[-1:]) == 0)
    # Within a turn nothing is discounted, so that the sum at its first token is that of the whole turn.
    sums = discounted_sums(rewards, torch.where(is_same_turn, 1.0, goes_on * gamma))
    starts = torch.ones_like(is_same_turn)
    starts[1:] = ~is_same_turn[:-1]
    returns = _scattered(sums[starts][starts.cumsum(0) - 1], tokens.mask)
    return TokenReturns(advantages=returns, returns=returns)


def discounted_sums(values: Tensor, decay: Tensor) -> Tensor:
    """[N] y with y_t = values_t + decay_t y_t+1, in log2(N) steps over all of it rather than N steps over one token.

    Args:
        decay: [N] 0 at the last token of each sequence.
    """
    sums, decay = values.clone(), decay.to(values.dtype)
    step = 1
    while step < len(sums):
        # After this, sums_t covers the next 2 step tokens, and decay_t is the product of their decays.
        sums = torch.cat([sums[:-step] + decay[:-step] * sums[step:], sums[-step:]])
        decay = torch.cat([decay[:-step] * decay[step:], torch.zeros_like(decay[-step:])])
        step *= 2
    return sums


def _goes_on(owners: Tensor) -> Tensor:
    """[N] bool: the next token is of the same sequence."""
    goes_on = torch.zeros_like(owners, dtype=torch.bool)
    goes_on[:-1] = owners[1:] == owners[:-1]
    return goes_on


def _scattered(values: Tensor, mask: Tensor) -> Tensor:
    out = torch.zeros(mask.shape, dtype=values.dtype, device=values.device)
    out[mask] = values
    return out
