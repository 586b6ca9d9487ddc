"""The bytes that a rank of --strategy megatron keeps of a model: rectangles of its stage's tensors."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from lightrl.config import RunConfig
from lightrl.models.reward_model import HEAD_NAME
from lightrl.plan.models import FLOAT, Model, Weight
from lightrl.strategy.megatron import deepseek
from lightrl.strategy.megatron.checks import check_config, check_options
from lightrl.strategy.megatron.parts import (
    EXPERT_COLUMNS,
    EXPERT_ROWS,
    ROWS,
    WHOLE,
    Place,
    Sizes,
    padded_rows,
    part_of,
    sizes_of,
    slot_of,
)

_HALF = 2  # bytes
_IN_DECODER = re.compile(r"layers\.\d+\..*|embed_tokens\.weight|(?<![a-z_])norm\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """The bytes of a stage."""

    weights: float  # the weights that compute
    main: float  # float32 copies that the optimizer steps if the weights compute in bfloat16
    trained: float  # in float32
    states: float  # AdamW's two moments


def stage_bytes(model: Model, config: RunConfig, world: int, stage: int | None = None) -> StageBytes:
    """Returns the bytes of a stage's first rank, by default the largest stage's; ValueError for refused layouts."""
    check_options(config)
    sizes = sizes_of(config)
    text = model.hf_config.get_text_config()
    check_config(text, sizes, sequence_parallel=config.megatron.sequence_parallel)
    deepseek.check_options(text, config)
    if stage is not None:
        return _of_stage(model, sizes, stage, world, config)
    stages = [_of_stage(model, sizes, number, world, config) for number in range(sizes.pp)]
    return max(stages, key=lambda stage: stage.weights + stage.main + stage.trained + stage.states)


def _of_stage(model: Model, sizes: Sizes, stage: int, world: int, config: RunConfig) -> StageBytes:
    place = Place(pp=stage)
    replicas = {
        False: max(1, world // (sizes.tp * sizes.pp)),  # ranks that split sequences count too
        True: max(1, world // (sizes.ep * sizes.etp * sizes.pp)),
    }
    loads = {is_expert: [0] * count for is_expert, count in replicas.items()}
    weights = rounded = trained = 0
    for weight in sorted(model.weights, key=lambda weight: weight.name):
        cut = _cut(weight, model, sizes, place)
        if cut is None:
            continue
        numel = _numel(weight, cut, sizes, place)
        weights += numel
        rounded += 0 if config.dtype == "float32" or _is_head(weight.name) else numel
        if weight.is_trained:
            trained += numel
            load = loads[cut in (EXPERT_ROWS, EXPERT_COLUMNS)]
            load[load.index(min(load))] += numel  # in the order in which the strategy assigns them
    stepped = sum(max(load) for load in loads.values()) if config.megatron.distributed_optimizer else trained
    return StageBytes(
        weights=FLOAT * (weights - rounded) + _HALF * rounded,
        main=FLOAT * rounded if model.trained else 0,
        trained=FLOAT * trained,
        states=2 * FLOAT * stepped,
    )


def _is_head(name: str) -> bool:
    """Returns whether a weight belongs to a head with one output, which computes in float32."""
    return name.startswith("value_head.") or name.endswith(f".{HEAD_NAME}.weight")


def _cut(weight: Weight, model: Model, sizes: Sizes, place: Place) -> str | None:
    """Returns how a weight is cut on a stage, or None if it lies on another stage."""
    found = _IN_DECODER.search(weight.name)
    if found is None:  # the output head, or a head with one output
        is_output = weight.name.endswith("lm_head.weight")
        return (ROWS if is_output else WHOLE) if place.pp == sizes.pp - 1 else None
    layers = model.num_layers
    slot = slot_of(found.group(), sizes, place, num_layers=layers, is_tied=is_tied(model))
    return None if slot is None else slot.cut


def is_tied(model: Model) -> bool:
    """Returns whether the output head shares the weights of the embedding."""
    names = [weight.name for weight in model.weights]
    has_head = any(name.endswith(("lm_head.weight", ".score.weight")) for name in names)
    return not has_head and model.role != "critic"


def _numel(weight: Weight, cut: str, sizes: Sizes, place: Place) -> int:
    shape = weight.shape
    if cut == ROWS:
        shape = (padded_rows(shape[0], sizes.tp), *shape[1:])
    return math.prod(part_of(shape, cut, sizes, place).shape)
