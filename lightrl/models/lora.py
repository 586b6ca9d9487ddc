"""LoRA (arXiv:2106.09685) with peft: small adapters inside a model that train instead of its weights.

Engines and exports get the weights with the adapters merged, under their plain names.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lightrl.config import LoraConfig
from lightrl.seeding import mix_seed

ADAPTER = "default"  # peft's name for the only adapter of a model, part of parameter names
PEFT_PREFIX = "base_model.model."  # before every name in an adapter's file
WEIGHTS_FILE = "adapter_model.safetensors"
_KEEPS_WEIGHTS = ("gaussian", "eva", "orthogonal")  # values of init_lora_weights that leave adapted weights as they are
# Features besides factors of linear layers that a config may request, and that neither trainer nor engines have.
_MORE_THAN_FACTORS = (
    "alora_invocation_tokens",
    "arrow_config",
    "layer_replication",
    "megatron_config",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
)
_MOST_NAMED = 3
_STREAM = 11  # separates the random draw of adapters from all others of the same seed


@dataclass(frozen=True, slots=True)
class Adapter:
    """The term that is added to one weight: scale * up @ down."""

    down: nn.Parameter  # [rank, inputs]
    up: nn.Parameter  # [outputs, rank]
    scale: float
    is_transposed: bool  # the weight is [inputs, outputs]

    def delta(self, down: Tensor, up: Tensor) -> Tensor:
        """Returns the term in the shape of the weight; both factors must be whole tensors."""
        product = up @ down * self.scale
        return product.T if self.is_transposed else product


# ---- Adding ------------------------------------------------------------------------------------------------------


def add_adapters(model: nn.Module, options: LoraConfig, *, seed: int, trained: Sequence[str] = ()) -> None:
    """Adds adapters to the model in place; from then on only they and the modules in `trained` require grad.

    A model on the meta device gets adapters there. Nothing changes if the options turn LoRA off.

    Args:
        model: as transformers made it, without the wrapper. Parameters of the wrapper, such as a value head, train.
        seed: seed of new adapters, which do not depend on earlier draws.
        trained: modules of the model that train as a whole, such as ("score",).
    """
    if not options.is_on:
        return
    require_peft(options)
    from peft import inject_adapter_in_model

    linear = _inner_linear_layers(model)
    if options.path:
        config = read_config(options.path, f"--lora.path {options.path}")
    else:
        config = _new_config(options, model, linear)
    config.task_type = "CAUSAL_LM" if getattr(model, "can_generate", bool)() else None
    config.base_model_name_or_path = getattr(model, "name_or_path", None) or None
    config.modules_to_save = None  # peft would keep a second copy of each
    own, config.exclude_modules = config.exclude_modules, _excluded(config.exclude_modules, trained)
    is_meta = next(model.parameters()).is_meta
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(mix_seed(seed, _STREAM))
        try:
            inject_adapter_in_model(config, model, ADAPTER, low_cpu_mem_usage=is_meta)
        except ValueError as error:  # no module has such a name
            if options.path:
                raise ValueError(f"--lora.path {options.path} does not fit the model: {error}") from error
            raise ValueError(
                f"--lora.target_modules {' '.join(options.target_modules)}: {error} It has, for example, "
                f"{', '.join(sorted({name.rpartition('.')[2] for name in linear}))}."
            ) from error
    check_layers(model, f"--lora.path {options.path}" if options.path else "--lora.target_modules")
    config.exclude_modules, config.modules_to_save = own, list(trained) or None
    for name in trained:
        model.get_submodule(name).requires_grad_(True)
    if options.path and not is_meta:
        _load_weights(model, Path(options.path))


def _excluded(own: Any, trained: Sequence[str]) -> Any:
    """Returns peft's exclude_modules for the layers that an adapter leaves out, and for modules that train as a whole.

    own: names, a regular expression for whole names, or None.
    """
    if isinstance(own, str):
        return "|".join([f"(?:{own})", *(rf"(?:.*\.)?{re.escape(name)}" for name in trained)])
    return [*(own or ()), *trained] or None


def options_for_companion(options: LoraConfig, adapted: nn.Module) -> LoraConfig:
    """Returns the LoRA options for a second model that trains along with an adapted one.

    The adapters of --lora.path do not fit it, so it gets new ones of the same rank.
    """
    host = host_of(adapted)
    if not options.path or host is None:
        return options
    config: Any = host.peft_config[ADAPTER]  # type: ignore[index]
    return LoraConfig(rank=config.r, alpha=config.lora_alpha, use_rslora=config.use_rslora)


def has_peft() -> bool:
    """Returns whether peft is installed."""
    return importlib.util.find_spec("peft") is not None


def require_peft(options: LoraConfig) -> None:
    """Raises an ImportError that names the package to install if the options need peft and it is missing."""
    if options.is_on and not has_peft():
        raise ImportError('--lora.rank and --lora.path need peft. Install it: pip install "lightrl[lora]"')


def _new_config(options: LoraConfig, model: nn.Module, linear: list[str]) -> Any:
    from peft import LoraConfig as PeftConfig

    is_default, targets = options.target_modules == ("all-linear",), list(options.target_modules)
    settings: dict[str, Any] = {
        "r": options.rank,
        "lora_alpha": options.alpha or 2 * options.rank,
        # peft's own all-linear includes the experts of a mixture: they are one tensor, which cannot be merged here.
        "target_modules": linear if is_default else targets,
        "use_rslora": options.use_rslora,
    }
    config = PeftConfig(**settings)
    if is_default:
        _leave_out_what_peft_takes_for_experts(config, model)
    return config


def _leave_out_what_peft_takes_for_experts(config: Any, model: nn.Module) -> None:
    """Takes layers called gate_proj, up_proj or down_proj out of the targets, if peft knows the model by its experts.

    peft replaces these names, in any layer, by the tensors that hold all experts since transformers 5, when it adds an
    adapter and when it loads one. So neither dense layers nor shared experts of such a model can have one:
    https://github.com/huggingface/peft/blob/v0.21.2/src/peft/utils/transformers_weight_conversion.py
    """
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # an older peft, which replaces nothing
        return
    renamed = copy.deepcopy(config)
    convert_peft_config_for_transformers(renamed, model, None)
    config.target_modules = renamed.target_modules


def read_config(path: str, option: str, *, files: Sequence[str] = ("adapter_config.json", WEIGHTS_FILE)) -> Any:
    """Reads an adapter's peft config; raises FileNotFoundError or ValueError, with the option first in the message."""
    from peft import LoraConfig as PeftConfig

    for name in files:
        if not (Path(path) / name).is_file():
            has_one = (Path(path) / "adapter" / name).is_file()  # as final/ of a run has
            remedy = f" Its folder adapter/ is one: {Path(path) / 'adapter'}." if has_one else ""
            raise FileNotFoundError(f"{option} is no adapter that peft saved: it has no {name}.{remedy}")
    try:
        config = PeftConfig.from_pretrained(path)
    except Exception as error:  # peft turns the entries of the file into arguments, and lets any of them fail
        raise ValueError(f"{option}: its adapter_config.json cannot be read: {error}") from error
    if config.peft_type != "LORA":
        raise ValueError(f"{option} is an adapter of type {config.peft_type}; only LORA is known.")
    if config.use_dora or config.bias != "none" or config.lora_bias:
        raise ValueError(f"{option} uses DoRA or trains biases, which cannot be merged here. Use plain LoRA.")
    if asked := [field for field in _MORE_THAN_FACTORS if getattr(config, field, None)]:
        raise beyond_factors(option, asked)
    drawn = config.init_lora_weights
    if isinstance(drawn, str) and drawn not in _KEEPS_WEIGHTS:
        raise ValueError(
            f"{option} began with init_lora_weights {drawn}, which changed the weights beside it: they would be no "
            "reference, and an engine has the plain ones. Save it with path_initial_model_for_weight_conversion of "
            "peft's save_pretrained(), which makes it an adapter of the plain weights."
        )
    config.inference_mode, config.lora_dropout, config.init_lora_weights = False, 0.0, True
    return config


def beyond_factors(option: str, asked: Sequence[str]) -> ValueError:
    """Returns the error about an adapter that is more than factors."""
    return ValueError(
        f"{option} asks for {', '.join(asked)}, which is not applied here. Save it as plain LoRA: factors beside "
        "linear layers, and nothing else."
    )


def _inner_linear_layers(model: nn.Module) -> list[str]:
    """Returns the names of all linear layers that can have an adapter: not the head, nor what is read elsewhere too."""
    head, read = _head_of(model), {*_read_by_their_block(model), *_tied(model)}
    linear = [(name, module) for name, module in model.named_modules() if _is_linear(module)]
    return [name for name, module in linear if module is not head and name not in read]


def _tied(model: nn.Module) -> set[str]:
    """Returns the layers that share a weight, which cannot hold the adapters of several layers merged (Zamba 2)."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name.removesuffix(".base_layer"))
    return {name for names in owners.values() if len(names) > 1 for name in names}


def _is_linear(layer: nn.Module) -> bool:
    """Returns whether a layer gives a product of its input; routers that subclass nn.Linear give more."""
    if not isinstance(layer, nn.Linear) or type(layer).forward is nn.Linear.forward:
        return isinstance(layer, nn.Linear | Conv1D)
    try:
        with torch.no_grad(), torch.random.fork_rng():
            found = layer(layer.weight.new_zeros(1, layer.in_features))
    except Exception:  # it takes other inputs
        return False
    return isinstance(found, Tensor) and found.shape == (1, layer.out_features)


def _read_by_their_block(model: nn.Module) -> Iterator[str]:
    """Yields the layers whose weights a block of Mamba reads as tensors, past any adapter, at least in its kernels."""
    for name, block in model.named_modules():
        if all(isinstance(getattr(block, part, None), nn.Parameter) for part in ("A_log", "D")):
            source = "".join(_source(kind) for kind in type(block).__mro__)
            yield from (f"{name}.{child}" for child, _ in block.named_children() if f"self.{child}.weight" in source)


def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # it has no file, or is a class of C
        return ""


def _head_of(model: Any) -> nn.Module | None:
    head: nn.Module | None = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return head


def check_layers(model: nn.Module, option: str) -> None:
    """Raises ValueError for a layer that cannot be merged, or whose weight is also read outside it."""
    from peft.tuners.lora import Linear

    head, read, tied = _head_of(model), set(_read_by_their_block(model)), _tied(model)
    for name, layer in lora_layers(model):
        if name in read:
            raise ValueError(
                f"{option} names {name}, and an adapter of it would do nothing: kernels of Mamba read its weight past "
                "the adapter. Leave this layer out."
            )
        if not isinstance(layer, Linear) or layer is head or not _is_linear(layer.base_layer):
            raise ValueError(
                f"{option} names {name}, and only linear layers inside the model can have an adapter: "
                "embeddings and the output head are read as plain weights, and experts may share one tensor."
            )
        if name in tied:
            raise ValueError(
                f"{option} names {name}, whose weight belongs to several layers: merged, it would hold one adapter of "
                "them. Leave this layer out."
            )


def _load_weights(model: nn.Module, folder: Path) -> None:
    parameters = {file_name(name): parameter for name, parameter in trained_parameters(model)}
    check_weights_file(folder, f"--lora.path {folder}", parameters)
    saved = load_file(folder / WEIGHTS_FILE)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(saved[name])


def check_weights_file(folder: Path, option: str, parameters: Mapping[str, Tensor]) -> None:
    """Raises ValueError unless an adapter's file has exactly these tensors, by their names in it."""
    wanted = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    try:
        with safe_open(folder / WEIGHTS_FILE, "pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in list(file.keys())}
    except SafetensorError as error:
        raise ValueError(f"{option}: its {WEIGHTS_FILE} cannot be read: {error}") from error
    unlike = [name for name in sorted(wanted.keys() & found.keys()) if found[name] != wanted[name]]
    faults = {
        "missing": sorted(wanted.keys() - found.keys()),
        "unknown": sorted(found.keys() - wanted.keys()),
        "misshapen": [f"{name} {found[name]} instead of {wanted[name]}" for name in unlike],
    }
    if any(faults.values()):
        described = "; ".join(f"{fault} {_first(names)}" for fault, names in faults.items() if names)
        raise ValueError(f"{option} does not fit the model: {described}.")


def _first(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _MOST_NAMED} more" if len(listed) > _MOST_NAMED else ""
    return ", ".join(listed[:_MOST_NAMED]) + more


# ---- Inspecting --------------------------------------------------------------------------------------------------


def lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the layers into which peft has put adapters, without importing peft.

    The attributes are those of peft's LoraLayer. This function and adapters_of() read them because peft offers no
    iterator over adapters with their scale:
    https://github.com/huggingface/peft/blob/v0.21.2/src/peft/tuners/lora/layer.py
    """
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            yield name, module


def host_of(model: nn.Module) -> nn.Module | None:
    """Returns the module that add_adapters() was given, which is the model or a part of it; None without adapters."""
    return next((module for module in model.modules() if hasattr(module, "peft_config")), None)


def largest_rank(model: nn.Module) -> int:
    """Returns an upper bound for the rank of the model's adapters, however the parameters are sharded."""
    host: Any = host_of(model)
    config = host.peft_config[ADAPTER]
    return int(max([config.r, *config.rank_pattern.values()]))


def adapters_of(model: nn.Module) -> dict[str, Adapter]:
    """Returns the adapters, keyed by the plain name of the weight to which each is added."""
    adapters = {}
    for name, layer in lora_layers(model):
        if list(layer.lora_A) != [ADAPTER] or layer.merged or any(layer.lora_bias.values()) or layer.lora_variant:
            raise ValueError(f"{name} is not a plain LoRA layer with one adapter called {ADAPTER!r}, not merged.")
        adapters[f"{name}.weight"] = adapter_of(layer)
    return adapters


def adapter_of(layer: Any) -> Adapter:
    """Returns the adapter of a layer, with its parameters as they are now."""
    down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    return Adapter(down, up, float(layer.scaling[ADAPTER]), bool(layer.fan_in_fan_out))


def plain_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Returns (plain name, parameter) of everything except the adapters; tied parameters appear once."""
    named = model.named_parameters()
    return [(name.replace(".base_layer.", "."), item) for name, item in named if not is_adapter(name)]


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Returns (name, parameter), sorted by name, of adapters, and of modules that train as a whole.

    They count even where --optim.lr_scales has frozen some, because nobody else has their values.
    """
    config: Any = getattr(model, "peft_config", {}).get(ADAPTER)
    whole = tuple(f"{module}." for module in getattr(config, "modules_to_save", None) or ())
    named = model.named_parameters()
    return sorted(
        (name, item) for name, item in named if item.requires_grad or is_adapter(name) or name.startswith(whole)
    )


def is_adapter(name: str) -> bool:
    """Returns whether this is the name of an adapter's parameter."""
    return ".lora_A." in name or ".lora_B." in name


def file_name(name: str) -> str:
    """Returns a parameter's name in an adapter's file."""
    return PEFT_PREFIX + (name.replace(f".{ADAPTER}.", ".") if is_adapter(name) else name)


# ---- Using -------------------------------------------------------------------------------------------------------


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Runs the body with the model as it was before it had adapters; does nothing for a model without adapters."""
    layers = [layer for _, layer in lora_layers(model)]
    try:
        for layer in layers:
            # Not enable_adapters(): it would also change requires_grad, on which back ends depend. The private flag can
            # go once peft has a switch that leaves requires_grad alone; 0.21.2 has none:
            # https://github.com/huggingface/peft/blob/v0.21.2/src/peft/tuners/tuners_utils.py
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


class WithoutAdapters(nn.Module):
    """The model as it was before it had adapters: a reference that takes no memory of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model without its adapters."""
        with without_adapters(self.model):
            return self.model(*args, **kwargs)


def save_adapter(model: Any, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Writes the folder that PeftModel.from_pretrained loads.

    Args:
        model: the module that add_adapters() was given: host_of().
        tensors: whole tensors, by the names of trained_parameters().
    """
    folder.mkdir(parents=True, exist_ok=True)
    model.peft_config[ADAPTER].save_pretrained(folder)
    save_file({file_name(name): item.contiguous() for name, item in tensors.items()}, folder / WEIGHTS_FILE)
