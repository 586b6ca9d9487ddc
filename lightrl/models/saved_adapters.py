"""Adapters saved by peft that an engine applies in addition to those that a run trains (--lora.others).

They are checked on a model without memory for weights, into which peft puts the adapters that their files describe. So
the layers, ranks and scales are those that peft would use.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn

from lightrl.models.lora import (
    ADAPTER,
    WEIGHTS_FILE,
    Adapter,
    adapters_of,
    beyond_factors,
    check_layers,
    check_weights_file,
    file_name,
    read_config,
    trained_parameters,
)


@dataclass(frozen=True, slots=True)
class SavedAdapter:
    """The factors of an adapter, whole and in float32, by the name of the layer to which each pair belongs."""

    factors: Mapping[str, tuple[Tensor, Tensor]]  # [rank, inputs] and [outputs, rank], the latter scaled

    @property
    def rank(self) -> int:
        """The largest rank of any layer."""
        return max(down.shape[0] for down, _ in self.factors.values())


def layers_of_saved(folders: Mapping[str, str], model: nn.Module) -> dict[str, list[str]]:
    """Returns the layers of each adapter without reading weights; raises ValueError for one that does not fit.

    model: The architecture, on the meta device and without adapters.
    """
    described = {name: _described(name, folder, model) for name, folder in folders.items()}
    return {name: [weight.removesuffix(".weight") for weight in found] for name, found in described.items()}


def read_saved_adapters(folders: Mapping[str, str], model: nn.Module) -> dict[str, SavedAdapter]:
    """Reads the given adapters, by name; model is as for layers_of_saved()."""
    return {name: _read(name, folder, model) for name, folder in folders.items()}


def described_ranks(name: str, folder: str, model: nn.Module) -> dict[str, int]:
    """Returns an adapter's rank in each layer, from adapter_config.json alone; raises ValueError if it does not fit."""
    option = _option(name, folder)
    host = _injected(read_config(folder, option, files=("adapter_config.json",)), option, model)
    adapters = adapters_of(host)
    return {weight.removesuffix(".weight"): adapter.down.shape[0] for weight, adapter in adapters.items()}


def _read(name: str, folder: str, model: nn.Module) -> SavedAdapter:
    found: dict[str, tuple[Tensor, Tensor]] = {}
    described = _described(name, folder, model)
    with safe_open(Path(folder) / WEIGHTS_FILE, "pt") as file:
        for weight, adapter in described.items():
            layer = weight.removesuffix(".weight")
            down, up = (file.get_tensor(file_name(f"{layer}.lora_{part}.{ADAPTER}.weight")).float() for part in "AB")
            if not (down.isfinite().all() and up.isfinite().all()):
                raise ValueError(f"{_option(name, folder)}: the adapter of {layer} has values that are no numbers.")
            found[layer] = (down, up * adapter.scale)
    return SavedAdapter(found)


def _described(name: str, folder: str, model: nn.Module) -> dict[str, Adapter]:
    """Returns the adapters in a folder, without values, by the weight to which each is added, if they fit the model."""
    option = _option(name, folder)
    host = _injected(read_config(folder, option), option, model)
    check_weights_file(Path(folder), option, {file_name(name): item for name, item in trained_parameters(host)})
    return adapters_of(host)


def _injected(config: Any, option: str, model: nn.Module) -> nn.Module:
    """Returns a copy of the model with the adapters that a config describes, without values."""
    from peft import inject_adapter_in_model

    if config.modules_to_save:
        raise beyond_factors(option, ["modules_to_save"])
    host = copy.deepcopy(model)
    for parameter in host.parameters():
        parameter.requires_grad_(False)
    try:
        inject_adapter_in_model(config, host, ADAPTER, low_cpu_mem_usage=True)
    except ValueError as error:  # no module has such a name
        raise ValueError(f"{option} does not fit the model: {error}") from error
    check_layers(host, option)
    return host


def _option(name: str, folder: str) -> str:
    return f"--lora.others {name}={folder}"
