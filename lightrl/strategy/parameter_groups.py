"""Which parameters are decayed, stepped by Muon, or learn at a rate of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Size, Tensor, nn

from lightrl.config import OptimConfig, lr_scales
from lightrl.strategy.critic_warmup import HEAD_NAMES


def parameter_groups(
    model: nn.Module,
    optim: OptimConfig,
    *,
    lr: float,
    weight_decay: float,
    shape_of: Callable[[Tensor], Size],  # of the whole parameter
) -> list[dict[str, Any]]:
    """Every trainable parameter in one group; those at the plain rate come first, since the first rate is reported."""
    embeddings, in_blocks = _embeddings(model), _in_blocks(model)
    scales = lr_scales(optim)
    groups: dict[tuple[bool, float, bool, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        pattern = next((pattern for pattern in scales if _fits(pattern, name)), None)
        if not parameter.requires_grad:
            continue
        num_dims, is_embedding = len(shape_of(parameter)), id(parameter) in embeddings
        is_muon = optim.name == "muon" and num_dims == 2 and id(parameter) in in_blocks and not is_embedding
        is_decayed = num_dims >= 2 and (optim.decay_embeddings or not is_embedding)
        scale = scales[pattern] if pattern is not None else 1.0
        settings = {"weight_decay": weight_decay if is_decayed else 0.0, "lr": lr * scale, "lr_scale": scale}
        if optim.name == "muon":
            settings["is_muon"] = is_muon
        key = (scale != 1.0, scale, is_muon, not is_decayed)
        groups.setdefault(key, {"params": [], **settings})["params"].append(parameter)
    return [groups[key] for key in sorted(groups)]


def check_lr_scales(models: Sequence[nn.Module | None], optim: OptimConfig) -> None:
    """Refuses a pattern that fits nothing that trains; a value head may come later, with a critic prepared alone."""
    names = [f"{head}.weight" for head in HEAD_NAMES]
    named = [pair for model in models if model is not None for pair in model.named_parameters()]
    names += [name for name, parameter in named if parameter.requires_grad]
    unused = [pattern for pattern in lr_scales(optim) if not any(_fits(pattern, name) for name in names)]
    if unused:
        raise ValueError(
            f"--optim.lr_scales: no parameter that trains has {' or '.join(unused)} in its name. Names are such as "
            f"{names[-1]}; a tied output layer has that of the embedding."
        )


def _fits(pattern: str, name: str) -> bool:
    return fnmatchcase(name, f"*{pattern}*")


def _embeddings(model: nn.Module) -> set[int]:
    """Of tokens and positions, and the layer that turns hidden states into logits."""
    found = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        get_output = getattr(module, "get_output_embeddings", None)
        output = get_output() if callable(get_output) else None
        found |= {id(parameter) for parameter in output.parameters()} if isinstance(output, nn.Module) else set()
    return found


def _in_blocks(model: nn.Module) -> set[int]:
    """Of the repeated layers: not embeddings, heads and what stands between a vision tower and the language model."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return {id(parameter) for module in lists for parameter in module.parameters()}
