"""Compares runs: which was better at the last step that all reached, by how much, and in which options they differ."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from lightrl.config import DPOConfig, GRPOConfig, PPOConfig, RMConfig, SFTConfig, as_dict
from lightrl.config.command_line import flatten
from lightrl.report.run_files import RunFiles

_METRICS = (("eval/reward", "eval/accuracy"), ("reward/mean", "accuracy", "loss"))  # the first of each that all have
_MOST_SHOWN = 6  # options
_TRAINED = {
    GRPOConfig: "a policy by rewards",
    PPOConfig: "a policy by rewards",
    SFTConfig: "a model by responses",
    RMConfig: "a reward model",
    DPOConfig: "a policy by pairs",
}


def compare(runs: Sequence[RunFiles]) -> list[str]:
    """Describes the differences between several runs in sentences; returns none for a single run."""
    if len(runs) < 2:
        return []
    trained = {run.name: _TRAINED[_kind_of(run)] for run in runs}
    if len(set(trained.values())) > 1:
        each = ", ".join(f"{name}: {what}" for name, what in trained.items())
        return [f"No metric ranks runs that train different things ({each}).", _difference(runs)]
    told = (next(filter(None, (_ranking(runs, metric) for metric in metrics)), "") for metrics in _METRICS)
    return [*filter(None, told), _difference(runs)]


def _difference(runs: Sequence[RunFiles]) -> str:
    rows = options_of(runs)["rows"]
    if not rows:
        return "All options are the same."
    shown = [f"{name} {', '.join(value or 'none' for value in values)}" for name, *values in rows[:_MOST_SHOWN]]
    more = f"; and {len(rows) - _MOST_SHOWN} more" if len(rows) > _MOST_SHOWN else ""
    return f"Options that differ, in the order {', '.join(run.name for run in runs)}: {'; '.join(shown)}{more}."


def _ranking(runs: Sequence[RunFiles], metric: str) -> str:
    """Ranks the runs by a metric around the last step that all reached; empty if a run lacks the metric."""
    curves = [run.values(metric) for run in runs]
    if not all(curves):
        return ""
    last = min(curve[-1][0] for curve in curves)
    ends = [_end(curve, last) for curve in curves]
    ranked = sorted(zip(ends, runs, strict=True), key=lambda pair: pair[0][0], reverse=metric != "loss")
    shown = ", ".join(f"{run.name} {mean:.3g}" for (mean, _), run in ranked)
    (best, noise), (second, other) = ranked[0][0], ranked[1][0]
    is_chance = abs(best - second) <= 2 * (noise**2 + other**2) ** 0.5
    chance = " The first two differ by no more than single steps vary." if is_chance else ""
    return f"{metric} up to step {last}, the last that all have: {shown}.{chance}"


def _end(curve: Sequence[tuple[int, float]], last: int) -> tuple[float, float]:
    """Returns the mean of the last tenth of a curve's values up to a step, and the standard error of that mean."""
    values = [value for step, value in curve if step <= last] or [curve[0][1]]
    values = values[-max(1, len(values) // 10) :]
    return statistics.fmean(values), statistics.pstdev(values) / len(values) ** 0.5


# ---- Options ---------------------------------------------------------------------------------------------------------


def options_of(runs: Sequence[RunFiles]) -> dict[str, Any]:
    """Returns the options that differ between the runs, or those of one run that differ from their defaults."""
    columns: list[Mapping[str, Any]] = [run.config for run in runs]
    heads = [run.name for run in runs]
    if len(runs) == 1:
        columns, heads = [_defaults(_kind_of(runs[0])), *columns], ["default", *heads]
    names = sorted({name for column in columns for name in column} - {"config", "output_dir"})
    rows = [[name, *(_shown(column.get(name)) for column in columns)] for name in names]
    return {"heads": heads, "rows": [row for row in rows if len(set(row[1:])) > 1]}


def _shown(value: object) -> str:
    """Returns a value as text, in which a number looks the same however YAML spelled it."""
    if isinstance(value, str):
        try:
            return f"{float(value):.15g}"
        except ValueError:
            return value
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:.15g}" if is_number else "" if value is None else str(value)


def _kind_of(run: RunFiles) -> type[Any]:
    """Returns the config class whose options match those of the run best."""
    options = {kind: _defaults(kind).keys() for kind in _TRAINED}
    return max(
        options, key=lambda kind: len(run.config.keys() & options[kind]) - len(options[kind] - run.config.keys())
    )


def _defaults(kind: type[Any]) -> dict[str, Any]:
    return dict(flatten(as_dict(kind())))
