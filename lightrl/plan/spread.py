"""The bytes that each strategy keeps of a model on a rank, and those that it adds temporarily."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightrl.config import DeepSpeedConfig, RunConfig
from lightrl.plan.models import FLOAT, Model, Weight
from lightrl.plan.rectangles import stage_bytes

# Elements that ZeRO-3 holds gathered before it frees a weight: the default of stage3_max_live_parameters and of
# stage3_max_reuse_distance, which runs do not change. A smaller model stays whole from its first block to its last.
_LIVE = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The bytes of one model on the fullest rank."""

    weights: float = 0
    master: float = 0  # the copy of the weights that ZeRO or Megatron steps
    optimizer: float = 0
    average: float = 0
    waiting: float = 0  # gradients of earlier micro-batches while the next one runs
    gradients: float = 0  # at the end of a backward
    own_pass: float = 0  # whole weights, and gradients in transit, during the forward and backward
    forward: float = 0  # whole weights during a forward without backward
    buffers: float = 0  # for gradients, kept even when there are none
    host: float = 0  # in host memory instead of on the device


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The number of ranks that train, and the numbers of ranks that share each part of a model."""

    world: int
    replicas: int
    tensors: int

    @property
    def of_rest(self) -> int:
        """The number of ranks that share what is outside of all blocks."""
        return self.world // self.replicas

    @property
    def of_block(self) -> int:
        """The number of ranks that share a block, or one rank's part of it."""
        return self.of_rest // self.tensors


def num_trainers(config: RunConfig, ranks: int) -> int:
    """Returns how many of the ranks train; with --rollout_ranks the others only generate."""
    return ranks - getattr(config, "rollout_ranks", 0)


def strategy_name(config: RunConfig, world: int) -> str:
    """Returns the strategy of a run; auto depends on the number of ranks that train."""
    return ("single" if world == 1 else "fsdp") if config.strategy == "auto" else config.strategy


def kept_of(model: Model, config: RunConfig, world: int, *, several: bool, stage: int | None = None) -> Kept:
    """Returns the bytes of a model on the fullest rank.

    Args:
        several: Whether an update has more than one micro-batch.
        stage: A stage of Megatron's pipeline; None means the one that keeps the most.
    """
    name = strategy_name(config, world)
    if name == "fsdp":
        return _sharded(model, config, world, several)
    if name == "deepspeed":
        return _zero(model, config, world, several)
    if name in ("single", "ddp"):
        return _whole(model, config, several)
    if name == "megatron":
        return _in_stages(model, config, world, several, stage)
    raise ValueError(
        f"--strategy {name} is not one of single, ddp, fsdp, deepspeed and megatron, whose memory the plan knows."
    )


def _in_stages(model: Model, config: RunConfig, world: int, several: bool, stage: int | None) -> Kept:
    found = stage_bytes(model, config, world, stage)
    return Kept(
        weights=found.weights + model.buffer_bytes,
        master=found.main,
        optimizer=found.states,
        average=found.trained if config.ema_decay and model.role == "policy" else 0,
        waiting=found.trained if several else 0,
        gradients=found.trained,
    )


# ---- Whole models ----------------------------------------------------------------------------------------------------


def _whole(model: Model, config: RunConfig, several: bool) -> Kept:
    trained = FLOAT * _numel(model.trained)
    return Kept(
        weights=FLOAT * _numel(model.weights) + model.buffer_bytes,
        optimizer=_states(model.trained, config, trained),
        average=trained if config.ema_decay and model.role == "policy" else 0,
        waiting=trained if several else 0,
        gradients=trained,
    )


def _states(weights: list[Weight], config: RunConfig, num_bytes: float) -> float:
    """Returns the bytes of AdamW's two moments; Muon has only one for the matrices of the blocks."""
    if config.optim.name != "muon":
        return 2 * num_bytes
    matrices = sum(weight.numel for weight in weights if weight.unit and len(weight.shape) == 2)
    return 2 * num_bytes - FLOAT * matrices


def _numel(weights: list[Weight] | tuple[Weight, ...]) -> float:
    return sum(weight.numel for weight in weights)


# ---- FSDP ------------------------------------------------------------------------------------------------------------


def _sharded(model: Model, config: RunConfig, world: int, several: bool) -> Kept:
    ranks = Ranks(world=world, replicas=config.fsdp.replicate_size, tensors=config.tp_size)
    shards = FLOAT * sum(_shard(weight, ranks) for weight in model.weights)
    trained = FLOAT * sum(_shard(weight, ranks) for weight in model.trained)
    size = 2 if config.dtype == "bfloat16" else FLOAT  # per element of a gathered weight
    whole = FLOAT * sum(_part(weight, ranks) for weight in model.trained)  # gradients before they are reduced
    units = _units(model.weights, ranks)
    root, blocks = units.pop(0, 0.0), sorted(units.values())
    gathered = size * (root + (blocks[-1] if blocks else 0.0))
    if not config.fsdp.reshard_after_forward:
        gathered = size * (root + sum(blocks))
    alone = world == 1 or ranks.of_rest == 1
    rounded = size * max(_units(model.trained, ranks).values(), default=0.0) if size < FLOAT else 0.0
    on_host = config.fsdp.cpu_offload
    states = _states(model.trained, config, trained)
    average = trained if config.ema_decay and model.role == "policy" else 0
    unreduced = trained if config.fsdp.reduce_each_micro_batch else whole + rounded
    kept = Kept(
        weights=shards + model.buffer_bytes,
        optimizer=states,
        average=average,
        waiting=unreduced if several else 0,
        gradients=trained,
        own_pass=0 if alone and size == FLOAT else gathered,
        forward=gathered,
    )
    if not on_host:
        return kept
    return Kept(
        weights=model.buffer_bytes,
        waiting=0 if config.fsdp.reduce_each_micro_batch else kept.waiting,
        own_pass=gathered,
        forward=gathered,
        host=shards + states + average + trained,
    )


def _part(weight: Weight, ranks: Ranks) -> float:
    """Returns the elements of a weight after tensor parallelism has cut it."""
    return weight.numel / ranks.tensors if weight.is_cut else weight.numel


def _shard(weight: Weight, ranks: Ranks) -> float:
    """Returns the elements of the first shards, the largest, since weights are cut by rows."""
    count = ranks.of_block if weight.unit else ranks.of_rest
    if not weight.shape:
        return 1
    rows = math.ceil(weight.shape[0] / count)
    return min(rows, weight.shape[0]) * _part(weight, ranks) / weight.shape[0]


def _units(weights: list[Weight] | tuple[Weight, ...], ranks: Ranks) -> dict[int, float]:
    """Returns the elements of each unit that is gathered together; 0 is the root."""
    units: dict[int, float] = {}
    for weight in weights:
        units[weight.unit] = units.get(weight.unit, 0.0) + _part(weight, ranks)
    return units


# ---- DeepSpeed -------------------------------------------------------------------------------------------------------


def _zero(model: Model, config: RunConfig, world: int, several: bool) -> Kept:
    chosen, whole = config.deepspeed, _whole(model, config, several)
    if chosen.zero_stage == 0:
        return whole
    trained = FLOAT * _numel(model.trained)
    part, bucket = trained / world, float(chosen.bucket_mb << 20) if trained else 0.0
    states, master = whole.optimizer / world, part
    weights, forward = whole.weights, 0.0
    if chosen.zero_stage == 3:
        weights, forward, master = _partitioned(model, chosen, world), _gathered(model), 0.0
    host = (states + master if chosen.offload_optimizer else 0.0) + (weights if chosen.offload_param else 0.0)
    gradients, buffers = (trained if chosen.zero_stage == 1 else part), 0.0
    if chosen.zero_stage == 3:
        gradients, buffers = 0.0, part
    return Kept(
        weights=model.buffer_bytes if chosen.offload_param else weights,
        master=0 if chosen.offload_optimizer else master,
        optimizer=0 if chosen.offload_optimizer else states,
        average=whole.average / (world if chosen.zero_stage == 3 else 1),
        waiting=gradients if several else 0,
        gradients=gradients,
        own_pass=forward + bucket,
        forward=forward,
        buffers=buffers,
        host=host,
    )


def _partitioned(model: Model, chosen: DeepSpeedConfig, world: int) -> float:
    """Returns the bytes of stage 3's shards; small weights are also kept whole."""
    shards = sum(math.ceil(weight.numel / world) for weight in model.weights)
    whole = sum(weight.numel for weight in model.weights if weight.numel < chosen.param_persistence_threshold)
    return FLOAT * (shards + whole) + model.buffer_bytes


def _gathered(model: Model) -> float:
    """Returns the bytes of the weights that stage 3 holds gathered at the same time."""
    units = _units(model.weights, Ranks(world=1, replicas=1, tensors=1))
    largest = max(units.values(), default=0.0)
    return FLOAT * min(_numel(model.weights), _LIVE + largest)
