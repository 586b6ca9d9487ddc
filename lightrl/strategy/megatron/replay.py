"""Makes the routers of a stage use the experts that the engine chose; see lightrl.models.routing_replay."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightrl.models.routing import UNKNOWN
from lightrl.records import PackedBatch, RoutingScores
from lightrl.strategy.megatron.packing import Pack
from lightrl.strategy.megatron.ranks import Ranks


class _Choice:
    """Tells megatron-core's router which experts a token takes, with the one method of its RouterReplay."""

    def __init__(self) -> None:
        self.replayed: Tensor | None = None  # [t, k], for the current pass
        self.differs: Tensor | None = None  # [t] bool: the router would have chosen other experts

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Returns the scores of each token's experts and the experts themselves, both [t, k]."""
        own_scores, own = choose(scores, topk, num_groups, group_topk)
        if self.replayed is None:
            return own_scores, own
        is_known = self.replayed[:, :1] != UNKNOWN
        used = torch.where(is_known, self.replayed.to(own.dtype), own)
        self.differs = (own.sort(-1).values != used.sort(-1).values).any(-1)
        return scores.gather(1, used), used


class StageReplay:
    """Gives each layer of a stage its part of a pack's experts, even when the layer is recomputed."""

    def __init__(self, layers: nn.ModuleList, ranks: Ranks) -> None:
        self._ranks = ranks
        self._choices = [_Choice() for _ in layers]
        for layer, choice in zip(layers, self._choices, strict=True):
            part: Any = layer
            part.mlp.router.router_replay = choice
            part.register_forward_pre_hook(partial(_hand_over, choice), with_kwargs=True)

    def own_experts(self, batch: PackedBatch, pack: Pack) -> Tensor | None:
        """Returns the experts of the tokens that this rank's routers see, [t, layers, k]; unknown for padding."""
        if batch.routing is None:
            return None
        is_padding = torch.ones_like(pack.source, dtype=torch.bool)
        is_padding[pack.where[pack.where >= 0]] = False
        experts = batch.routing[pack.source].masked_fill(is_padding[:, None, None], UNKNOWN)
        ranks = self._ranks
        return experts.chunk(ranks.sizes.tp)[ranks.place.tp] if ranks.sequence_parallel else experts

    def scores(self, pack: Pack) -> RoutingScores:
        """Returns what this stage's routers did with this rank's tokens in the last forward."""
        differs = [] if pack.experts is None else [_known(choice.differs) for choice in self._choices]
        return RoutingScores(
            logits=(),
            experts=(),
            is_sigmoid=False,
            num_layers=len(self._choices),
            num_routed=0 if pack.experts is None else int((pack.experts[:, 0, 0] != UNKNOWN).sum()),
            num_tokens_differ=int(torch.stack(differs).any(0).sum()) if differs else 0,
            num_choices_differ=sum(int(part.sum()) for part in differs),
        )


def _hand_over(choice: _Choice, layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
    experts = kwargs["packed_seq_params"].pack.experts
    choice.replayed = None if experts is None else experts[:, layer.layer_number - 1]


def _known(differs: Tensor | None) -> Tensor:
    assert differs is not None, "the layer's router has not run"
    return differs
