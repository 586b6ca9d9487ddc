"""Routing replay (R3, arXiv:2510.11370): the trainer's forward uses the experts that the engine chose for each token.

Trainer and engine round differently, so now and then a router chooses another expert, and the token's probability
jumps. Here the choice comes from the engine, and only the weights of the chosen experts come from the trainer's router,
which gets a gradient through them. It is attached to a policy on request; a pack without routing runs as usual.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from lightrl.models.per_sequence import RUNS_APART
from lightrl.models.policy import Policy
from lightrl.models.routing import ROUTING_KEYWORD, UNKNOWN, check_rules, routers_of, uses_sigmoid
from lightrl.records import PackedBatch, RoutingScores, TokenScores

_MIXERS = ("attn", "attention", "mamba")  # in the names of what mixes tokens in a layer


class RoutingReplay:
    """Hooks on a policy and its routers; the policy's scores then also report what the routers did."""

    def __init__(self, policy: Policy, *, keeps_logits: bool) -> None:
        """Attaches to the policy before it is sharded; raises ValueError if it is not a mixture of experts.

        With keeps_logits the scores contain the logits of the routers, for their losses.
        """
        self._routers = routers_of(policy.hf)
        if RUNS_APART in vars(policy.hf.get_decoder()):
            raise _runs_apart(policy.hf.config.model_type)
        self._is_sigmoid = uses_sigmoid(self._routers)
        self._keeps_logits = keeps_logits
        if not next(self._routers[0].module.parameters()).is_meta:
            check_rules(self._routers)
        self._batch: PackedBatch | None = None  # the pack in the policy's current forward; None in a recomputation
        self._replayed: dict[int, Tensor] = {}  # by router: the experts [t, k] for the layer that runs now
        self._logits: list[Tensor] = []  # [t, E] of each router, in the current forward
        self._experts: list[Tensor] = []  # [t, k], the experts that were used
        self._differs: list[Tensor] = []  # [t] bool, whether the trainer would have chosen other experts
        self._hooks: list[RemovableHandle] = []
        self.follow(policy)
        self._hooks.append(policy.hf.get_decoder().register_forward_pre_hook(self._hand_on, with_kwargs=True))
        for index, router in enumerate(self._routers):
            attention = _attention_of(policy.hf.get_submodule(router.layer_name))
            self._hooks.append(attention.register_forward_pre_hook(partial(self._receive, index), with_kwargs=True))
            self._hooks.append(router.module.register_forward_hook(partial(self._route, index)))

    def follow(self, policy: Policy) -> None:
        """Switches to another policy that has taken over the same model."""
        self._policy = policy
        self._hooks.append(policy.register_forward_pre_hook(self._begin))
        self._hooks.append(policy.register_forward_hook(self._end))

    def remove(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()

    # ---- In the order of a forward -----------------------------------------------------------------------------

    def _begin(self, policy: nn.Module, args: tuple[PackedBatch]) -> None:
        self._batch = args[0]
        self._logits, self._experts, self._differs = [], [], []

    def _hand_on(self, decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Passes the routing to the decoder as a keyword, so that a checkpointed layer is recomputed with its own."""
        if self._batch is None or self._batch.routing is None:
            return None
        return args, {**kwargs, ROUTING_KEYWORD: _own_part(self._batch.routing, self._policy)}

    def _receive(self, index: int, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        routing = kwargs.pop(ROUTING_KEYWORD, None)
        self._replayed.pop(index, None)
        if routing is not None:
            self._replayed[index] = routing[:, index]
        return args, kwargs

    def _route(self, index: int, module: nn.Module, args: Any, output: Any) -> Any:
        router, replayed = self._routers[index], self._replayed.pop(index, None)
        own = used = router.experts(output)
        if replayed is not None:
            is_known = replayed[:, :1] != UNKNOWN
            used = torch.where(is_known, replayed.to(own.dtype), own)
            output = router.with_experts(output, used)
        if self._batch is not None:
            if self._keeps_logits and torch.is_grad_enabled():
                self._logits.append(router.logits(output))
                self._experts.append(used)
            if replayed is not None:
                self._differs.append((own.sort(-1).values != used.sort(-1).values).any(-1))
        return output

    def _end(self, policy: nn.Module, args: Any, scores: TokenScores) -> TokenScores:
        assert self._batch is not None
        batch, self._batch = self._batch, None
        if batch.routing is not None and len(self._differs) != len(self._routers):
            raise _not_handed_on(self._policy, len(self._differs), len(self._routers))
        routing = RoutingScores(
            logits=tuple(self._logits),
            experts=tuple(self._experts),
            is_sigmoid=self._is_sigmoid,
            num_layers=len(self._routers),
            num_routed=0
            if batch.routing is None
            else int((_own_part(batch.routing, self._policy)[:, 0, 0] >= 0).sum()),
            num_tokens_differ=int(torch.stack(self._differs).any(0).sum()) if self._differs else 0,
            num_choices_differ=sum(int(part.sum()) for part in self._differs),
        )
        self._logits, self._experts, self._differs = [], [], []
        return replace(scores, routing=routing)


def attach_replay(policy: Policy, *, keeps_logits: bool) -> None:
    """Makes a policy use the recorded experts of packs that have them, and report on its routers.

    If another policy had the model before, its hooks are reused.
    """
    decoder: Any = policy.hf.get_decoder()
    if hasattr(decoder, "routing_replay"):
        decoder.routing_replay.follow(policy)
    else:
        decoder.routing_replay = RoutingReplay(policy, keeps_logits=keeps_logits)


def detach_replay(model: nn.Module) -> bool:
    """Removes the replay from a policy whose layers something else computes; returns whether it had one."""
    decoder: Any = model.hf.get_decoder() if isinstance(model, Policy) else None
    if not hasattr(decoder, "routing_replay"):
        return False
    decoder.routing_replay.remove()
    del decoder.routing_replay
    return True


def _attention_of(layer: nn.Module) -> nn.Module:
    """Returns the module that runs in each recomputation of a layer, before its router, with the layer's keywords.

    The layer itself does not work: since transformers 5.24 its own hooks run only once, outside of the recomputation.
    https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/modeling_layers.py
    """
    for name, child in layer.named_children():
        if any(mixer in name for mixer in _MIXERS) and "norm" not in name:
            return child
    raise ValueError(
        f"--routing.* does not know what in {type(layer).__name__} runs before the router: it looks for names with "
        f"{', '.join(_MIXERS)}. Leave the options out, or choose another model."
    )


def _runs_apart(model_type: str) -> ValueError:
    return ValueError(
        f"--routing.* needs whole packs, but models of type {model_type} run each sequence alone. Leave the options "
        "out, or choose another model."
    )


def _not_handed_on(policy: Policy, count: int, num_routers: int) -> ValueError:
    return ValueError(
        f"--routing.replay: {count} of {num_routers} routers got the experts of the pack, because layers of model type "
        f"{policy.hf.config.model_type!r} do not hand keywords on. Leave the option out, or choose another model."
    )


def _own_part(routing: Tensor, policy: Policy) -> Tensor:
    """Returns the routing of this rank's tokens, if ranks split a pack; see split_tokens()."""
    group = policy.sequence_group
    if group is None:
        return routing
    routing = F.pad(routing, (0, 0, 0, 0, 0, -len(routing) % group.size), value=UNKNOWN)
    return routing.chunk(group.size)[group.rank]


# ---- Router losses ---------------------------------------------------------------------------------------------------


def balance_loss(scores: RoutingScores, cu_seqlens: tuple[int, ...]) -> Tensor:
    """Returns the load-balancing loss of each sequence, [S], a mean over the layers; 1 is perfect balance.

    If f is the share of a sequence's choices that fell on an expert, and P the expert's mean probability, a layer's
    loss is E * sum of f * P over its E experts (arXiv:2101.03961, per sequence as in arXiv:2412.19437). Per sequence it
    does not depend on how a step is cut into micro-batches.
    """
    layers = []
    for logits, experts in zip(scores.logits, scores.experts, strict=True):
        probabilities = _probabilities(logits, scores.is_sigmoid)
        num_experts = logits.shape[1]
        chosen = F.one_hot(experts, num_experts).sum(1).to(probabilities.dtype) / experts.shape[1]
        share, mean = (_sequence_means(part, cu_seqlens) for part in (chosen, probabilities))
        layers.append(num_experts * (share * mean).sum(-1))
    return torch.stack(layers).mean(0)


def z_loss(scores: RoutingScores, cu_seqlens: tuple[int, ...]) -> Tensor:
    """Returns the mean of logsumexp(logits)^2 over a sequence's tokens, [S], and over the layers (arXiv:2202.08906)."""
    layers = [_sequence_means(logits.float().logsumexp(-1).square()[:, None], cu_seqlens) for logits in scores.logits]
    return torch.stack(layers).mean(0)[:, 0]


def _probabilities(logits: Tensor, is_sigmoid: bool) -> Tensor:
    if not is_sigmoid:
        return logits.float().softmax(-1)
    scores = logits.float().sigmoid()
    return scores / scores.sum(-1, keepdim=True)


def _sequence_means(values: Tensor, cu_seqlens: tuple[int, ...]) -> Tensor:
    """Returns the mean of [t, n] over each sequence, [S, n]."""
    lengths = [end - start for start, end in pairwise(cu_seqlens)]
    return torch.stack([part.mean(0) for part in values.split(lengths)])
