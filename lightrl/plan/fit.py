"""Finds options that make a run fit: the single changes that help most, and a full choice (--fit)."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from lightrl.config import PPOConfig, RolloutConfig, RunConfig
from lightrl.models.lora import has_peft
from lightrl.plan.peaks import Machine, Models, Plan, plan_run
from lightrl.plan.spread import num_trainers, strategy_name

Changes = dict[str, Any]  # options by full name

SAFE_SHARE = 0.92  # share of the memory that --fit fills: allocators and libraries need the rest
_SHARES = (0.3, 0.2, 0.1)  # share for an engine that takes less
_LARGER_SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """Options that lower the memory of a run."""

    changes: Changes
    plan: Plan
    saved: float  # peak in bytes

    def flags(self) -> str:
        """Returns the options as command-line flags."""
        return flags_of(self.changes)


def flags_of(changes: Changes) -> str:
    """Returns options as command-line flags."""
    return " ".join(f"--{name} {value}" for name, value in changes.items())


def fits(plan: Plan, machine: Machine, share: float = 1.0) -> bool:
    """Returns whether no phase needs more than the device has; unknown memory is never too small."""
    if not machine.memory:
        return True
    return not lacks_cache(plan) and plan.peak.total <= share * machine.memory


def lacks_cache(plan: Plan) -> bool:
    """Returns whether the engine's cache holds less than one sequence, however much memory is free beside it."""
    return plan.engine is not None and plan.engine.cached_tokens < plan.batches.length


def remedies(config: RunConfig, models: Models, machine: Machine, plan: Plan) -> list[Remedy]:
    """Returns single changes that make the run fit, then those that lower the peak, sorted by what they save."""
    found = []
    for changes in _single_changes(config, models, machine, plan):
        smaller = changed(config, changes)
        other = plan_run(smaller, models.of(smaller) if "lora.rank" in changes else models, machine)
        saved = plan.peak.total - other.peak.total
        if saved > 0 or fits(other, machine):
            found.append(Remedy(changes=changes, plan=other, saved=saved))

    def rank(remedy: Remedy) -> tuple[float, float]:
        return (len(remedy.changes) if fits(remedy.plan, machine) else math.inf, -remedy.saved)

    return sorted(found, key=rank)


def choose(config: RunConfig, models: Models, machine: Machine) -> Remedy:
    """Returns the mildest changes that make the run fit, chosen to slow it down least.

    If none fits, returns those with the lowest peak.
    """
    first = plan_run(config, models, machine)
    found = []
    for start in _engines_to_try(config, machine):
        begun = changed(config, start)
        for changes in _ladder(begun, models, machine, plan_run(begun, models, machine)):
            other = plan_run(changed(begun, changes), models, machine)
            found.append(Remedy(changes=start | changes, plan=other, saved=first.peak.total - other.peak.total))
            if fits(other, machine, SAFE_SHARE):
                return found[-1]
    return min(found, key=lambda remedy: (lacks_cache(remedy.plan), remedy.plan.peak.total))


def _engines_to_try(config: RunConfig, machine: Machine) -> list[Changes]:
    """Returns the run's engine, followed by vllm if each rank of the native engine keeps all weights."""
    is_native = isinstance(config, RolloutConfig) and config.engine == "native" and machine.is_accelerator
    return [{}, {"engine": "vllm"}] if is_native else [{}]


def changed(config: RunConfig, changes: Changes) -> RunConfig:
    """Returns the config with some options changed."""
    result = copy.deepcopy(config)
    for name, value in changes.items():
        *sections, last = name.split(".")
        target: Any = result
        for section in sections:
            target = getattr(target, section)
        setattr(target, last, value)
    return result


def _single_changes(config: RunConfig, models: Models, machine: Machine, plan: Plan) -> Iterator[Changes]:
    yield from ({"max_tokens_per_microbatch": size} for size in _budgets(config, plan)[-1:])
    if not config.gradient_checkpointing:
        yield {"gradient_checkpointing": True}
    if config.dtype == "float32":
        yield {"dtype": "bfloat16"}
    yield from _spreads(config, machine)
    yield from _engines(config, models, machine, plan)
    if isinstance(config, RolloutConfig) and config.engine == "native" and machine.is_accelerator:
        yield {"engine": "vllm"}
    if isinstance(config, PPOConfig) and not config.critic.shared_backbone:
        yield {"critic.offload_waiting_optimizer": True}
    if not config.lora.is_on and config.tp_size == 1 and has_peft():  # adapters are counted in peft's layout
        yield {"lora.rank": 32}


def _ladder(config: RunConfig, models: Models, machine: Machine, plan: Plan) -> Iterator[Changes]:
    """Yields combinations of changes, mildest first: micro-batches, checkpointing, engine, type, more spreading.

    The type is only that of the computation; keeping weights and moments on the host costs more time.
    """
    budgets: list[Changes] = [{}, *({"max_tokens_per_microbatch": size} for size in _budgets(config, plan))]
    passes = budgets[:3] + [{**size, "gradient_checkpointing": True} for size in budgets]
    types: list[Changes] = [{}, {"dtype": "bfloat16"}] if config.dtype == "float32" else [{}]
    engines = [{}, *_engines(config, models, machine, plan)]
    for spread, rounded, engine, cheaper in product([{}, *_spreads(config, machine)], types, engines, passes):
        yield {**rounded, **spread, **engine, **cheaper}


def _budgets(config: RunConfig, plan: Plan) -> list[int]:
    """Returns smaller limits of tokens per micro-batch, largest first; each has room for a sequence."""
    if config.micro_batch_size:
        return []
    sizes = []
    size = min(config.max_tokens_per_microbatch, plan.batches.pack.num_tokens) // 2
    while size >= plan.batches.length:
        sizes.append(size)
        size //= 2
    shortest = plan.batches.length * plan.batches.answers
    return [*sizes, shortest] if shortest < config.max_tokens_per_microbatch else sizes


def _engines(config: RunConfig, models: Models, machine: Machine, plan: Plan) -> list[Changes]:
    if not isinstance(config, RolloutConfig):
        return []
    found: list[Changes] = []
    if config.engine in ("vllm", "sglang"):
        taken = config.engine_mem_fraction
        others = [share for share in _LARGER_SHARES if share > taken] if lacks_cache(plan) else []
        others += [share for share in _SHARES if share < taken]
        found += [{"engine_mem_fraction": share} for share in others]
    if not config.offload_while_generating:
        found += [{"offload_while_generating": True}]
        found += [{**change, "offload_while_generating": True} for change in found[:-1]]
    away: Changes = {} if config.offload_while_generating else {"offload_while_generating": True}
    found += [{"engine_tp_size": size, **away} for size in _tp_sizes(config, models, machine)]
    return found


def _tp_sizes(config: RolloutConfig, models: Models, machine: Machine) -> list[int]:
    """Returns the engine tp sizes above the run's that divide heads and ranks; the native engine has none."""
    heads, ranks = models.policy.hf_config.get_text_config().num_attention_heads, config.rollout_ranks or machine.ranks
    sizes = (2, 4, 8) if config.engine in ("vllm", "sglang") else ()
    return [size for size in sizes if size > config.engine_tp_size and heads % size == 0 and ranks % size == 0]


def _spreads(config: RunConfig, machine: Machine) -> list[Changes]:
    """Returns other ways to spread the model, cheapest first."""
    trainers = num_trainers(config, machine.ranks)
    name = strategy_name(config, trainers)
    if name == "deepspeed":
        stages: list[Changes] = [{"deepspeed.zero_stage": stage} for stage in range(config.deepspeed.zero_stage + 1, 4)]
        last = stages[-1] if stages else {}
        stages += [] if config.deepspeed.offload_optimizer else [{**last, "deepspeed.offload_optimizer": True}]
        return [*stages, {**last, "deepspeed.offload_optimizer": True, "deepspeed.offload_param": True}]
    if name == "megatron":
        return [] if config.megatron.distributed_optimizer else [{"megatron.distributed_optimizer": True}]
    if name in ("single", "ddp"):
        sharded: Changes = {"strategy": "fsdp"}
        return ([sharded] if trainers > 1 else []) + [{**sharded, "fsdp.cpu_offload": True}]
    whole: list[Changes] = [] if config.fsdp.reshard_after_forward else [{"fsdp.reshard_after_forward": True}]
    often: Changes = {} if config.fsdp.reduce_each_micro_batch else {"fsdp.reduce_each_micro_batch": True}
    return [
        *whole,
        *([often] if often else []),
        *([] if config.fsdp.cpu_offload else [{**often, "fsdp.cpu_offload": True}]),
    ]
