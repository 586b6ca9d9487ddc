"""The curves of a report, as Bokeh documents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bokeh.embed import json_item
from bokeh.models import ColumnDataSource, FactorRange, HoverTool, Range1d
from bokeh.palettes import Category10, Category20
from bokeh.plotting import figure

from lightrl.report.run_files import RunFiles

_WIDTH, _HEIGHT = 460, 250
_TOOLS = "pan,box_zoom,wheel_zoom,reset,save"
_SMALL_LEGEND = {"label_text_font_size": "8pt", "background_fill_alpha": 0.6}
_MAX_SPANS = 4000  # in the timeline


class Chart(NamedTuple):
    """A drawing with its caption."""

    title: str
    caption: str
    item: Any  # what Bokeh draws


class Section(NamedTuple):
    """Charts under one heading, which are drawn when the reader opens the section."""

    title: str
    note: str
    is_open: bool
    charts: list[Chart]


_CORE: Mapping[str, Mapping[str, str]] = {
    "Reward": {
        "reward/mean": "mean reward of the step's samples",
        "episode/failed_share": "share of the step's episodes that failed; reward/mean leaves them out",
        "eval/accuracy": "held-out prompts: share of samples with a reward of 1 or more",
        "eval/reward": "held-out prompts: mean reward",
        "reward/equal_groups": "share of groups whose samples all got the same reward (with gdpo, each reward "
        "separately); they teach nothing",
    },
    "Policy": {
        "entropy": "mean entropy at the response tokens, in nats; near 0 nothing is explored",
        "kl": "KL per token to the starting model; 0 without --algorithm.kl_coef",
        "clip_fraction": "share of tokens whose gradient the clip removed",
        "grad_norm": "norm of the gradient before clipping",
        "loss": "loss of the step's updates; of a policy gradient it need not fall",
        "lr": "learning rate",
    },
    "Engine against trainer": {
        "mismatch/mean_abs": "mean difference of a token's logprob; about 1e-6 in float32",
        "mismatch/max_abs": "its maximum",
    },
    "Lengths": {
        "tokens/response_mean": "mean length of a response in tokens",
        "tokens/truncated": "share of responses cut off at --max_new_tokens",
    },
    "Time": {
        "time/step": "seconds of a step on rank 0",
        "tokens/per_second": "tokens of all ranks in a second",
    },
}


def curves(runs: Sequence[RunFiles], points: int) -> list[Section]:
    """Returns a chart for each metric: the most telling ones in the open sections, all others in the last section.

    Args:
        points: Largest number of points in a curve.
    """
    names = {name for run in runs for name in run.metric_names if run.values(name)}
    sections: list[Section] = []
    shown: set[str] = set()
    for title, captions in _core(names).items():
        charts = [_curve(name, caption, runs, points) for name, caption in captions.items() if name in names]
        shown |= captions.keys()
        if title == "Time":
            charts += [_phases(run, points) for run in runs]
            charts += [chart for run in runs if (chart := _timeline(run)) is not None]
        if charts:
            sections.append(Section(title, "", title in ("Reward", "Policy"), charts))
    rest = [_curve(name, "", runs, points) for name in sorted(names - shown)]
    return [*sections, Section("All other metrics", "docs/metrics.md explains each.", False, rest)]


def _core(names: set[str]) -> dict[str, dict[str, str]]:
    """Returns the metrics of the open charts; if rewards are summed, each one comes next to their mean."""
    core = {title: dict(captions) for title, captions in _CORE.items()}
    taken = {"reward/mean", "reward/equal_groups", "reward/failures", "reward/no_verdict"}
    components = sorted(name for name in names if name.startswith("reward/") and name not in taken)
    if len(components) > 1:
        core["Reward"] |= dict.fromkeys(components, "a reward of the sum, before its weight")
    return core


def _figure(title: str, **arguments: Any) -> Any:
    plot = figure(
        title=title,
        width=arguments.pop("width", _WIDTH),
        height=arguments.pop("height", _HEIGHT),
        tools=_TOOLS,
        active_drag="box_zoom",
        **arguments,
    )
    plot.toolbar.update(autohide=True, logo=None)
    return plot


def _curve(name: str, caption: str, runs: Sequence[RunFiles], points: int) -> Chart:
    plot = _figure(name, x_axis_label="step")
    values: set[float] = set()
    for run, color in zip(runs, _colors(len(runs)), strict=True):
        pairs = thinned(run.values(name), points)
        if not pairs:
            continue
        source = ColumnDataSource(
            {"step": [step for step, _ in pairs], "value": [_rounded(value) for _, value in pairs]}
        )
        label = {"legend_label": run.name} if len(runs) > 1 else {}
        line = plot.line("step", "value", source=source, color=color, line_width=1.5, **label)
        values.update(value for _, value in pairs)
        if len(pairs) < 40:
            plot.scatter("step", "value", source=source, color=color, size=4, **label)
        told = [("run", run.name), ("step", "@step"), (name, "@value{0.0000[00]}")]
        plot.add_tools(HoverTool(renderers=[line], tooltips=told[len(runs) < 2 :], mode="vline"))
    if len(values) == 1:  # otherwise the axis would extend from -1 to 1
        (value,) = values
        plot.update(y_range=Range1d(value - 0.1 * abs(value or 1), value + 0.1 * abs(value or 1)))
    if len(runs) > 1:
        plot.legend[0].update(click_policy="hide", **_SMALL_LEGEND)
    return Chart(name, caption, json_item(plot))


def _colors(count: int) -> list[str]:
    palette = Category10[10] if count <= 10 else Category20[20]
    return [palette[index % len(palette)] for index in range(count)]


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def thinned(pairs: Sequence[tuple[int, float]], count: int) -> list[tuple[int, float]]:
    """Returns about `count` of the points: the lowest and the highest in each of count / 2 stretches."""
    if len(pairs) <= count:
        return list(pairs)
    size = -(-2 * len(pairs) // count)
    kept = []
    for start in range(0, len(pairs), size):
        part = pairs[start : start + size]
        ends = {min(part, key=lambda pair: pair[1]), max(part, key=lambda pair: pair[1])}
        kept += sorted(ends)
    return kept


# ---- Where the time goes ---------------------------------------------------------------------------------------------


def _phases(run: RunFiles, points: int) -> Chart:
    """Draws the seconds of each phase on rank 0, stacked; if there are many steps, as means over stretches of steps."""
    rows = [row for row in run.metrics if row.get("time/step")]
    parts = sorted({name for row in rows for name in row if name.startswith("time/")} - {"time/step"})
    inside = [name for name in parts if name not in ("time/eval", "time/checkpoint", "time/best")]
    size = max(1, -(-len(rows) // max(1, points // 4)))
    stretches = [rows[start : start + size] for start in range(0, len(rows), size)]
    columns: dict[str, list[float]] = {"step": [float(part[0]["step"]) for part in stretches]}
    for name in parts:
        columns[name.removeprefix("time/")] = [_mean(part, name) for part in stretches]
    columns["other"] = [
        max(0.0, _rounded(_mean(part, "time/step") - sum(_mean(part, name) for name in inside))) for part in stretches
    ]
    labels = [name for name in columns if name != "step"]
    plot = _figure(f"seconds of each phase: {run.name}", x_axis_label="step", width=2 * _WIDTH)
    plot.vbar_stack(
        labels,
        x="step",
        width=0.9 * size,
        source=ColumnDataSource(columns),
        color=_colors(len(labels)),
        legend_label=labels,
        line_width=0,
    )
    plot.legend[0].update(**_SMALL_LEGEND)
    plot.add_tools(HoverTool(tooltips=[("step", "@step"), *((label, f"@{{{label}}}{{0.000}} s") for label in labels)]))
    return Chart("phases", "on rank 0; --profile timeline records every rank", json_item(plot))


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return _rounded(sum(row.get(name) or 0.0 for row in rows) / len(rows))


def _timeline(run: RunFiles) -> Chart | None:
    """Draws the phases of each rank on a common time axis, for the last steps that were recorded."""
    events = sorted(run.timeline, key=lambda event: event["ts"])[-_MAX_SPANS:]
    if not events:
        return None
    start = events[0]["ts"]
    lanes = sorted({_lane(event) for event in events}, reverse=True)
    names = sorted({event["name"] for event in events})
    color_of = dict(zip(names, _colors(len(names)), strict=True))
    source = ColumnDataSource(
        {
            "lane": [_lane(event) for event in events],
            "left": [round((event["ts"] - start) / 1e6, 5) for event in events],
            "right": [round((event["ts"] + event["dur"] - start) / 1e6, 5) for event in events],
            "name": [event["name"] for event in events],
            "color": [color_of[event["name"]] for event in events],
        }
    )
    plot = _figure(
        f"phases of each rank: {run.name}",
        x_axis_label="seconds",
        y_range=FactorRange(factors=lanes),
        width=2 * _WIDTH,
        height=110 + 30 * len(lanes),
    )
    bars = plot.hbar(y="lane", left="left", right="right", height=0.8, color="color", fill_alpha=0.75, source=source)
    told = [("phase", "@name"), ("rank", "@lane"), ("from", "@left{0.000} s"), ("to", "@right{0.000} s")]
    plot.add_tools(HoverTool(renderers=[bars], tooltips=told))
    note = f" The last {_MAX_SPANS} spans." if len(run.timeline) > len(events) else ""
    return Chart("timeline", f"profile/timeline.json, which ui.perfetto.dev opens too.{note}", json_item(plot))


def _lane(event: Mapping[str, Any]) -> str:
    return f"rank {event['pid']}{'' if event.get('cat') == 'step' else ' ' + str(event.get('cat'))}"


def drawn(sections: Sequence[Section]) -> Iterator[Chart]:
    """Yields the charts of all sections in order."""
    for section in sections:
        yield from section.charts
