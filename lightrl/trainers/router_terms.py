"""Terms and metrics that a mixture of experts adds to the policy's loss; built only if --routing.* asks for them."""

from __future__ import annotations

from dataclasses import replace

import torch

from lightrl.algorithms.losses import TokenLoss
from lightrl.config import RoutingConfig
from lightrl.metrics import Statistics
from lightrl.models.routing_replay import balance_loss, z_loss
from lightrl.records import RoutingScores
from lightrl.trainers.loss_terms import LossTerm, MicroBatch


class RouterTerm(LossTerm):
    """Reports how often trainer and engine would choose other experts, and adds the losses of the routers.

    A token's term gets the loss of its sequence, so that every aggregation averages it like the policy loss.
    """

    def __init__(self, config: RoutingConfig) -> None:
        self._config = config

    def apply(self, loss: TokenLoss, micro: MicroBatch) -> TokenLoss:
        """Adds coefficient x the sequence's loss to the term of each trained token."""
        routing = micro.scores.routing
        assert routing is not None, "the policy has no RoutingReplay"
        if self._config.replay:
            _report_replay(routing, micro.statistics)
        terms, mask = loss.terms, micro.tokens.mask
        coefs = {"balance": self._config.balance_coef, "z": self._config.z_coef}
        for name, coef in coefs.items():
            if coef:
                of_sequence = (balance_loss if name == "balance" else z_loss)(routing, micro.batch.cu_seqlens)
                values = torch.where(mask, of_sequence[micro.tokens.sequence_index], 0.0)
                micro.statistics.mean(f"routing/{name}_loss", float(values.detach().sum()), int(mask.sum()))
                terms = terms + coef * values
        return replace(loss, terms=terms)


def _report_replay(routing: RoutingScores, statistics: Statistics) -> None:
    count = routing.num_routed
    statistics.mean("routing/tokens_differ", routing.num_tokens_differ, count)
    statistics.mean("routing/choices_differ", routing.num_choices_differ, count * routing.num_layers)
