"""Parameters that the options treat in special ways: other rates, Muon, embeddings without decay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import Size, Tensor, nn

from lightrl.config import OptimConfig, lr_scales

# Parameters that hold several vectors, or one in the shape of a matrix: decay rates and skips of Mamba, biases of
# experts, norms per head (Cohere), shares of the token before (RWKV, [1, 1, hidden]).
VECTORS = ("A_log", ".D", "bias", "norm.weight", "time_mix_key", "time_mix_value", "time_mix_receptance")  # name ends
HEAD_NAMES = ("value_head", "v_head", "critic_head", "score")  # modules that are a value head


class Kind(NamedTuple):
    """How an optimizer treats a parameter; the fields are also settings of the parameter's group.

    Groups at the plain rate come first, because the first rate is the one that is reported.
    """

    is_scaled: bool = False
    lr_scale: float = 1.0
    is_muon: bool = False
    is_undecayed: bool = False


def special_kinds(model: nn.Module, optim: OptimConfig, shape_of: Callable[[Tensor], Size]) -> dict[nn.Parameter, Kind]:
    """Returns the kind of every trainable parameter under options that do not treat all matrices alike."""
    embeddings = _embeddings(model) if optim.name == "muon" or not optim.decay_embeddings else set()
    in_blocks = _in_blocks(model) if optim.name == "muon" else set()
    kinds = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            num_dims = 1 if name.endswith(VECTORS) else len(shape_of(parameter))
            is_embedding = id(parameter) in embeddings
            is_muon = num_dims == 2 and id(parameter) in in_blocks and not is_embedding
            is_decayed = num_dims >= 2 and (optim.decay_embeddings or not is_embedding)
            scale = _scale_of(name, optim) if optim.lr_scales else 1.0
            kinds[parameter] = Kind(scale != 1.0, scale, is_muon, not is_decayed)
    return kinds


def _scale_of(name: str, optim: OptimConfig) -> float:
    return next((scale for pattern, scale in lr_scales(optim).items() if _fits(pattern, name)), 1.0)


def apply_lr_scales(models: Sequence[nn.Module | None], optim: OptimConfig, *, must_match: bool) -> None:
    """Freezes parameters whose factor is 0; parameter_groups() applies other factors. Call it before placing a model.

    must_match: refuse a pattern that matches no trained parameter. A critic's value head may come later.
    """
    named = [pair for model in models if model is not None for pair in model.named_parameters()]
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    names = [f"{head}.weight" for head in HEAD_NAMES] + [name for name, _ in trained]
    unused = [pattern for pattern in lr_scales(optim) if not any(_fits(pattern, name) for name in names)]
    if must_match and unused:
        raise ValueError(
            f"--optim.lr_scales: no parameter that trains has {' or '.join(unused)} in its name. Names are such as "
            f"{names[-1]}; a tied output layer has that of the embedding."
        )
    for name, parameter in trained:
        if _scale_of(name, optim) == 0:
            parameter.requires_grad_(False)
    if trained and not any(parameter.requires_grad for _, parameter in trained):
        raise ValueError(f"--optim.lr_scales {' '.join(optim.lr_scales)} leaves no parameter to train.")


def _fits(pattern: str, name: str) -> bool:
    return fnmatchcase(name, f"*{pattern}*")


def _embeddings(model: nn.Module) -> set[int]:
    """Returns the ids of the parameters that embed tokens and positions, or turn hidden states into logits."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        get_output = getattr(module, "get_output_embeddings", None)
        output = get_output() if callable(get_output) else None
        embeddings |= {id(parameter) for parameter in output.parameters()} if isinstance(output, nn.Module) else set()
    return embeddings


def _in_blocks(model: nn.Module) -> set[int]:
    """Returns the ids of the parameters in repeated layers: no embeddings, heads, or projectors of a vision tower."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return {id(parameter) for module in lists for parameter in module.parameters()}
