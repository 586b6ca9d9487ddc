"""Runs packs on models that cannot take a whole one: each sequence runs alone, in the mixers or in the whole decoder.

A recurrent layer (Mamba, linear attention, a short convolution) carries a state along the row, so sequences laid end to
end would mix. If everything else in a model can run on the pack, only these mixers take one sequence at a time. If the
attention cannot be replaced either, the whole decoder does so: exact for every causal model, but slower.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightrl.models.packed_attention import (
    ATTENTION_NAME,
    CURRENT_LAYOUT,
    LAYER_TYPES,
    LAYOUT_KEYWORD,
    PackedLayout,
    SplitLayout,
)
from lightrl.models.routing import ROUTING_KEYWORD

logger = logging.getLogger(__name__)

_STATEFUL_TYPES = LAYER_TYPES | {"linear_attention", "conv", "hybrid", "moe", "mlp"}
# Marks a module whose parts run a different number of times on each rank: it must be sharded as one block.
RUNS_APART = "lightrl_runs_apart"
_CHECKPOINT = "_gradient_checkpointing_func"


def run_per_sequence(model: PreTrainedModel) -> None:
    """Makes a decoder that cannot take a whole pack run the sequences separately wherever they would mix."""
    if model.get_decoder() is model and isinstance(getattr(model, "model", None), PreTrainedModel):
        # Llama 4 names its decoder with a prefix that only its class with images has.
        model.get_decoder = MethodType(_inner_model, model)
    decoder: Any = model.get_decoder()
    config = decoder.config
    layer_types = set(getattr(config, "layer_types", None) or ())
    has_no_attention = bool(layer_types) and layer_types <= {"linear_attention", "conv", "moe", "mlp"}
    packs_rest = config._attn_implementation == ATTENTION_NAME or has_no_attention
    is_known = bool(layer_types - LAYER_TYPES) and layer_types <= _STATEFUL_TYPES and config.model_type != "zaya"
    mixers = _mixers(decoder) if packs_rest and (is_known or config.model_type == "recurrent_gemma") else []
    for mixer in mixers:
        mixer.forward = MethodType(_mix_apart, mixer)
        mixer.__dict__[RUNS_APART] = True
    # Bound methods, so that a copy of the model runs its own layers.
    decoder.forward = MethodType(_carry_layout if mixers else _run_apart, decoder)
    if not mixers:
        decoder.set_attn_implementation("eager")
        decoder.__dict__[RUNS_APART] = True
        leave_weights_alone(decoder)
    _say_once(config.model_type, bool(mixers))


def leave_weights_alone(decoder: Any) -> None:
    """Keeps RWKV from halving its weights in place in evaluation mode, which no sync or checkpoint expects."""
    if not getattr(decoder.config, "rescale_every", 0):
        return
    was_training = decoder.training
    decoder.train()._rescale_layers()  # undoes the halving
    decoder.train(was_training)
    decoder.config.rescale_every = 0


def _inner_model(model: Any, /) -> Any:
    return model.model


def _mixers(decoder: nn.Module) -> list[Any]:
    """Returns the modules that carry a state along the row; all of them begin with a short convolution."""
    return [module for module in decoder.modules() if any(isinstance(part, nn.Conv1d) for part in module.children())]


@lru_cache
def _say_once(model_type: str, by_mixer: bool) -> None:
    if os.environ.get("RANK", "0") == "0":
        what = "its recurrent layers run" if by_mixer else "the model runs"
        logger.warning("%s cannot run whole packs: %s each sequence alone: exact, slower.", model_type, what)


# ---- The mixers alone --------------------------------------------------------------------------------------------


def _carry_layout(decoder: Any, /, *args: Any, **inputs: Any) -> Any:
    """Runs a decoder so that its mixers know the boundaries of the pack, even when a layer is recomputed."""
    forward = type(decoder).forward
    if CURRENT_LAYOUT.get() is None:
        return forward(decoder, *args, **inputs)
    for module in decoder.modules():
        recompute = module.__dict__.get(_CHECKPOINT)
        if recompute is not None and not hasattr(recompute, "carries_layout"):
            setattr(module, _CHECKPOINT, _carrying_layout(recompute))
    return forward(decoder, **_accepted(forward, inputs))


def _carrying_layout(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps transformers' checkpointing function, because it reruns layers in the backward, outside of any pack."""

    @wraps(checkpoint)
    def run(layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        layout = CURRENT_LAYOUT.get()

        def with_layout(*args: Any, **kwargs: Any) -> Any:
            token = CURRENT_LAYOUT.set(layout)
            try:
                return layer(*args, **kwargs)
            finally:
                CURRENT_LAYOUT.reset(token)

        return checkpoint(with_layout, *args, **kwargs)

    run.carries_layout = True  # type: ignore[attr-defined]
    return run


def _mix_apart(mixer: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Runs a mixer on each sequence of the pack separately; outside of a pack it runs unchanged."""
    forward, layout = type(mixer).forward, CURRENT_LAYOUT.get()
    for name in (LAYOUT_KEYWORD, ROUTING_KEYWORD):  # meant for attention and for the layer's router
        kwargs.pop(name, None)
    if layout is None:
        return forward(mixer, *args, **kwargs)
    bound = inspect.signature(forward).bind(mixer, *args, **kwargs)
    given = {**bound.arguments, **bound.arguments.pop("kwargs", {})}
    del given[next(iter(given))]
    outputs = [forward(mixer, **part) for part in _sequences(given, layout)]
    if isinstance(outputs[0], Tensor):
        return _joined(outputs)
    return (_joined([output[0] for output in outputs]), *outputs[-1][1:])


# ---- The whole decoder -------------------------------------------------------------------------------------------


def _run_apart(decoder: Any, /, *args: Any, **inputs: Any) -> Any:
    """Runs a decoder on each sequence of the pack separately; outside of a pack it runs unchanged."""
    forward, layout = type(decoder).forward, CURRENT_LAYOUT.get()
    if layout is None:
        return forward(decoder, *args, **inputs)
    inputs.pop(LAYOUT_KEYWORD, None)
    parts = _sequences(_accepted(forward, inputs), layout)
    return (_joined([forward(decoder, **part)[0] for part in parts]),)


def _accepted(forward: Callable[..., Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the inputs that a decoder accepts; recurrent models do not accept positions."""
    parameters = inspect.signature(forward).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(inputs)
    return {name: value for name, value in inputs.items() if name in parameters}


# ---- Cutting and joining -----------------------------------------------------------------------------------------


def _sequences(inputs: Mapping[str, Any], layout: PackedLayout) -> Iterator[dict[str, Any]]:
    """Yields the inputs of each run of sequences of equal length, which are the rows of one batch."""
    if isinstance(layout, SplitLayout):
        raise ValueError("--sp_size splits sequences over ranks, and this model runs whole ones. Leave it at 1.")
    num_tokens = [count * length for count, length in layout.runs]
    # split, not slices: its backward is one concatenation.
    cut = {
        name: value.split(num_tokens, dim=1)
        for name, value in inputs.items()
        if isinstance(value, Tensor) and value.shape[:2] == (1, layout.num_tokens)
    }
    whole = {name: value for name, value in inputs.items() if name not in cut}
    if any(isinstance(value, Tensor) and value.dim() > 1 for value in whole.values()):
        raise ValueError("A recurrent layer was given a mask, but a pack has none.")
    for index, (count, length) in enumerate(layout.runs):
        rows = {name: parts[index].view(count, length, *parts[index].shape[2:]) for name, parts in cut.items()}
        yield whole | rows


def _joined(outputs: list[Tensor]) -> Tensor:
    return torch.cat([output.reshape(1, -1, *output.shape[2:]) for output in outputs], dim=1)
