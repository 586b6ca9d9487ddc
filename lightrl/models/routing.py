"""The routers of a mixture of experts: where they are, which experts they choose, and how they weight these.

transformers names the class of a model's routers in `_can_record_outputs`. Each returns logits, weights and indices.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ROUTING_KEYWORD = "expert_routing"  # keyword of a decoder's forward, which its layers hand on
UNKNOWN = -1  # stands for an expert that nobody recorded, as for a response's last token, which no engine runs
_LAYER = re.compile(r"(.*?\blayers\.(\d+))\.")

Weigh = Callable[[Any, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Router:
    """One router of a model."""

    module: nn.Module
    layer_name: str  # of the decoder layer that contains it
    layer: int
    logits_at: int  # index of the logits in the module's output: 0, or 2 if the experts come first
    weigh: Weigh  # maps the module, logits [t, E] and experts [t, k] to weights [t, k]

    def logits(self, output: Sequence[Tensor]) -> Tensor:
        """Returns the logits in the module's output, [t, E]."""
        return output[self.logits_at]

    def experts(self, output: Sequence[Tensor]) -> Tensor:
        """Returns the experts in the module's output, [t, k]."""
        return output[2 - self.logits_at]

    def with_experts(self, output: Sequence[Tensor], experts: Tensor) -> tuple[Tensor, ...]:
        """Returns the output with the experts replaced by these, weighted by the module's own logits."""
        weights = self.weigh(self.module, self.logits(output), experts).to(output[1].dtype)
        parts = (self.logits(output), weights, experts)
        return parts if self.logits_at == 0 else parts[::-1]


def routers_of(model: nn.Module) -> list[Router]:
    """Returns the routers in the order of their layers; raises ValueError if there are none, or one of unknown kind."""
    kinds = _router_kinds(model)
    found = []
    for name, module in model.named_modules():
        kind = next((kind for kind in kinds if isinstance(module, kind[0])), None)
        place = _LAYER.match(f"{name}.")
        if kind is not None and place is not None:
            weigh = _rule(module)
            if weigh is None:
                raise _unknown_router(module)
            found.append(Router(module, place[1], int(place[2]), kind[1], weigh))
    if not found:
        raise ValueError(
            f"--routing.* needs a mixture of experts, and {_type_of(model)} has no router that transformers records. "
            "Leave the options out, or choose another model."
        )
    return found


def uses_sigmoid(routers: Sequence[Router]) -> bool:
    """Returns whether the probabilities of experts are sigmoids, as in DeepSeek-V3, and not a softmax."""
    return all(router.weigh is _sigmoid for router in routers)


@torch.no_grad()
def check_rules(routers: Sequence[Router]) -> None:
    """Raises ValueError unless each router's weights follow from its logits and experts, for a few random states."""
    for router in routers:
        weight = next(router.module.parameters())
        hidden = torch.randn(8, weight.shape[-1], generator=torch.Generator().manual_seed(0))
        try:
            output = router.module(*_inputs(router.module, hidden.to(weight.device, weight.dtype)))
            again = router.with_experts(output, router.experts(output))
        except (AttributeError, TypeError, IndexError, RuntimeError) as error:  # it takes or returns something else
            raise _unknown_router(router.module) from error
        if not torch.allclose(again[1].float(), output[1].float(), atol=1e-5, rtol=1e-4):
            raise _unknown_router(router.module)


def _inputs(module: nn.Module, hidden: Tensor) -> tuple[Tensor, ...]:
    """Returns example inputs for a router: hidden states, and zeros for biases of experts if its forward takes any."""
    num_inputs = len(inspect.signature(module.forward).parameters)
    biases = (hidden.new_zeros(int(getattr(module, "num_experts", 0)), dtype=torch.float32),) * (num_inputs - 1)
    is_batched = type(module).__name__.startswith("Afmoe")  # its forward splits [batch, tokens, size]
    return (hidden[None] if is_batched else hidden, *biases)


def _router_kinds(model: nn.Module) -> list[tuple[type, int]]:
    """Returns the classes of routers, and the index of the logits in their output."""
    kinds: dict[type, int] = {}
    for module in model.modules():
        recorded = getattr(module, "_can_record_outputs", None) or {}
        recorder = recorded.get("router_logits")
        if recorder is not None and hasattr(recorder, "target_class"):
            kinds[recorder.target_class] = int(recorder.index)
    return list(kinds.items())


def _type_of(model: nn.Module) -> str:
    return str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))


def _unknown_router(module: nn.Module) -> ValueError:
    return ValueError(
        f"lightrl does not know how {type(module).__name__} weighs the experts that it chooses, so another choice "
        "cannot be put in its place. Leave --routing.* out, or teach lightrl.models.routing its rule."
    )


# ---- How chosen experts are weighted -------------------------------------------------------------------------------


_SOFTMAX_OF_CHOSEN = ("Mixtral", "MiniMaxTopK", "GptOss", "GraniteMoe", "Qwen3_5Moe", "HunYuanMoE", "AriaText")
_SIGMOID = ("Afmoe", "HYV3", "Laguna", "MiniMaxM2")
_SCALES = ("routed_scaling_factor", "router_scaling_factor", "route_scale")  # names of one factor


def _rule(module: Any) -> Weigh | None:
    """Returns the weighting rule of a router; None if it has none of those known here."""
    name = type(module).__name__
    if name.startswith("Phimoe"):
        return _sparse_mixer
    if name.startswith(_SOFTMAX_OF_CHOSEN):
        return _softmax_of_chosen
    if name.startswith("Ernie4_5_Moe"):
        return _softmax_of_bounded_sum
    if hasattr(module, "e_score_correction_bias") or name.startswith(_SIGMOID):
        return _sigmoid
    if hasattr(module, "norm_topk_prob") or name.startswith("DeepseekV2"):
        return _softmax
    return None


def _softmax_of_chosen(module: Any, logits: Tensor, experts: Tensor) -> Tensor:
    return logits.float().gather(1, experts).softmax(-1)


def _softmax(module: Any, logits: Tensor, experts: Tensor) -> Tensor:
    weights = logits.float().softmax(-1).gather(1, experts)
    if getattr(module, "norm_topk_prob", False):
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * float(getattr(module, "routed_scaling_factor", 1.0))


def _sigmoid(module: Any, logits: Tensor, experts: Tensor) -> Tensor:
    weights = logits.float().sigmoid().gather(1, experts)
    if getattr(module, "norm_topk_prob", True):
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * next((float(getattr(module, name)) for name in _SCALES if hasattr(module, name)), 1.0)


def _softmax_of_bounded_sum(module: Any, logits: Tensor, experts: Tensor) -> Tensor:
    weights = logits.float().softmax(-1).gather(1, experts)
    return weights / weights.sum(-1, keepdim=True).clamp(min=module.norm_min)


def _sparse_mixer(module: Any, logits: Tensor, experts: Tensor) -> Tensor:
    """The rule of PhiMoE (arXiv:2409.12136): an expert's share among those near the best one that is still left."""
    left, weights = logits, []
    for expert in experts.split(1, dim=1):
        best = left.detach().amax(-1, keepdim=True)
        is_far = (best - logits) / logits.abs().clamp(min=best) > 2 * module.router_jitter_noise
        near = left.masked_fill(is_far.scatter(1, expert, False), float("-inf"))
        weights.append(near.softmax(-1).gather(1, expert))
        left = left.scatter(1, expert, float("-inf"))
    return torch.cat(weights, dim=1)
