"""check_loss: what it finds in losses that look right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lightrl.algorithms.losses import PolicyTokens, TokenLoss, token_loss
from lightrl.algorithms.sequence_losses import gspo
from lightrl.testing import check_loss


def of_batch_mean(tokens: PolicyTokens) -> TokenLoss:
    """Subtracts a mean that depends on the micro-batch."""
    advantages = tokens.masked_advantages - tokens.masked_advantages[tokens.mask].mean()
    return token_loss(-tokens.log_ratio.exp() * advantages, tokens.log_ratio, ~tokens.mask, tokens.mask)


def of_neighbours(tokens: PolicyTokens) -> TokenLoss:
    """Adds up a running sum, which goes on from one sequence into the next."""
    return token_loss(-tokens.log_ratio.cumsum(0), tokens.log_ratio, ~tokens.mask, tokens.mask)


def of_untrained(tokens: PolicyTokens) -> TokenLoss:
    """Multiplies NaN by 0: the value is right, the gradient is not."""
    ratio = torch.exp(tokens.logprobs - tokens.old_logprobs)
    return token_loss(-ratio * tokens.masked_advantages, tokens.log_ratio, ~tokens.mask, tokens.mask)


def test_a_sound_loss_passes_with_parameters() -> None:
    check_loss(gspo, clip_low=0.1, clip_high=0.2)
    with pytest.raises(TypeError, match="clip"):
        check_loss(gspo, clip=0.1)


@pytest.mark.parametrize("loss", [of_batch_mean, of_neighbours, of_untrained])
def test_a_loss_that_depends_on_the_split_is_found(loss: Callable[..., TokenLoss]) -> None:
    with pytest.raises(AssertionError, match=f"The loss {loss.__name__} under token_mean is .* for the micro-batches"):
        check_loss(loss)
