"""A plan as text: a table of phases, the batch arithmetic, and remedies if the run does not fit."""

from __future__ import annotations

import json
from collections.abc import Sequence

from lightrl.plan.fit import SAFE_SHARE, Remedy, fits, lacks_cache
from lightrl.plan.peaks import Machine, Phase, Plan

_NAMED = 3  # number of remedies that are shown
_LEAST = 0.005  # a part below this share of the peak is not shown separately


def table(plan: Plan, machine: Machine, title: str) -> str:
    """Returns the plan, phase by phase."""
    lines = [title, plan.batches.describe(), *filter(None, [plan.prompts])]
    lines += [f"about {plan.flops:.3g} FLOPs a step over all ranks", ""]
    for phase in plan.phases:
        mark = "  <- peak" if phase is plan.peak else ""
        lines.append(f"{phase.name:22}{size_text(phase.total):>10}  {_parts(phase)}{mark}")
    lines.append("")
    if plan.host:
        lines.append(f"in host memory: {size_text(plan.host)} for each rank")
    if plan.engine is not None and machine.memory:
        lines.append(f"the engine of a rank caches {plan.engine.cached_tokens:,.0f} tokens")
    return "\n".join(lines)


def verdict(plan: Plan, machine: Machine, *, is_enough: bool, found: Sequence[Remedy]) -> str:
    """Returns the last lines: whether the run fits and, if not, the options that help most."""
    peak = f"peak: {size_text(plan.peak.total)} in the phase {plan.peak.name!r}"
    if not machine.memory:
        return f"{peak}; give lightrl plan --device_memory, such as 24GB, to see whether that fits"
    if is_enough:
        return f"{peak}: fits in {size_text(machine.memory)}, {_to_spare(plan, machine)}"
    if plan.peak.total > machine.memory:
        lines = [f"{peak}: DOES NOT FIT in {size_text(machine.memory)}"]
    else:
        lines = [f"{peak}: DOES NOT FIT, though {size_text(machine.memory)} are more"]
    if lacks_cache(plan):
        lines.append(
            f"the engine's share of the memory (--engine_mem_fraction) holds its weights and less than a sequence of "
            f"{plan.batches.length} tokens"
        )
    lines += ["what helps most:"] if found else ["no single option makes it smaller: use more ranks"]
    lines += [_told(remedy, machine) for remedy in found[:_NAMED]]
    if found and not fits(found[0].plan, machine):
        lines.append("No single option is enough; --fit True looks for several that are.")
    return "\n".join(lines)


def _to_spare(plan: Plan, machine: Machine) -> str:
    spare = f"with {size_text(machine.memory - plan.peak.total)} to spare for libraries and fragments"
    if plan.peak.total <= SAFE_SHARE * machine.memory:
        return spare
    safe = size_text(SAFE_SHARE * machine.memory)
    return f"{spare}, which is LITTLE: --fit True looks for a peak below {safe}"


def _told(remedy: Remedy, machine: Machine) -> str:
    peak, over = remedy.plan.peak, remedy.plan.peak.total - machine.memory
    after = "then it fits" if fits(remedy.plan, machine) else f"still {size_text(over)} too much"
    after = "still no room for the engine's cache" if over <= 0 and lacks_cache(remedy.plan) else after
    saved = f"saves {size_text(remedy.saved)}, " if remedy.saved > 0 else ""
    return f"  {remedy.flags():48} {saved}peak {size_text(peak.total)} in {peak.name!r}: {after}"


def as_json(plan: Plan, *, is_enough: bool, found: Sequence[Remedy], chosen: str = "") -> str:
    """Returns the plan for programs; all sizes are in bytes. `chosen` is what --fit found."""
    content = {
        "phases": [{"name": phase.name, "bytes": round(phase.total), "parts": phase.parts} for phase in plan.phases],
        "peak": {"name": plan.peak.name, "bytes": round(plan.peak.total)},
        "host_bytes": round(plan.host),
        "flops": plan.flops,
        "batches": plan.batches.describe(),
        "prompts": plan.prompts,
        "fits": is_enough,
        "chosen": chosen,
        "remedies": [{"flags": remedy.flags(), "saves_bytes": round(remedy.saved)} for remedy in found[:_NAMED]],
    }
    return json.dumps(content, indent=2)


def _parts(phase: Phase) -> str:
    least = _LEAST * phase.total
    shown = sorted(((size, name) for name, size in phase.parts.items() if size > least), reverse=True)
    return ", ".join(f"{name} {size_text(size)}" for size, name in shown)


def size_text(num_bytes: float) -> str:
    """Returns bytes in decimal units, the way devices are sold."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 1e3:.0f} KB"
