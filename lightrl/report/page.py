"""Makes the single file of a report: texts with Jinja, and drawings and samples as compressed data for the page.

A model's output enters the page only as data, which the page shows as text: it never becomes HTML.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, NamedTuple

from bokeh.resources import Resources
from jinja2 import Environment

from lightrl.report.charts import Section, curves, drawn
from lightrl.report.comparison import compare, options_of
from lightrl.report.diagnosis import diagnose, summary
from lightrl.report.run_files import Row, RunFiles
from lightrl.report.suspicion import suspicions
from lightrl.trainers.best import best_folder, described, record_of

LIMIT = 2_000_000  # bytes of the file
_LONGEST_TEXT = 20_000  # characters of a prompt or a response that are kept
_MOST_RAW = 20_000_000  # characters of samples that are worth compressing
_TEXTS = 100_000  # bytes of the page besides library, drawings and samples
_ALWAYS = 50  # largest number of samples of a run that are chosen for their suspicion
_IDENTITY = ("step", "position", "sample", "status", "finish_reason", "version", "oldest_version")
_SHOWN = (*_IDENTITY, "prompt", "response", "answer", "reward", "shaping", "advantage", "rewards", "tokens", "turns")


class _Sizes(NamedTuple):
    """How much of the runs the page shows."""

    points: int  # per curve
    samples: int  # per run


def build_page(runs: Sequence[RunFiles]) -> str:
    """Returns the HTML page, which is as complete as its size limit allows."""
    library = _packed("\n".join(Resources(mode="inline", components=["bokeh"]).js_raw))
    points, sections, charts = _charts(runs, LIMIT - len(library) - _TEXTS)
    rated = [_rated(run, index) for index, run in enumerate(runs)]
    count, samples = _samples(rated, LIMIT - len(library) - len(charts) - _TEXTS)
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page: str = environment.from_string(_own("page.html")).render(
        title=", ".join(run.name for run in runs),
        runs=[_described(run) for run in runs],
        sections=_numbered(sections),
        options=options_of(runs),
        comparison=compare(runs),
        notes=_left_out(runs, rated, _Sizes(points, count)),
        has_tokens=any(item.get("tokens") for items in rated for item in items),
        nonce=hashlib.sha256((charts + samples).encode()).hexdigest()[:32],
        style=_own("page.css"),
        script=_own("page.js"),
        library=library,
        charts=charts,
        samples=samples,
    )
    if len(page.encode()) > LIMIT:
        raise ValueError(f"{len(runs)} runs do not fit into a page of {LIMIT / 1e6:g} MB. Name fewer.")
    return page


def _charts(runs: Sequence[RunFiles], room: int) -> tuple[int, list[Section], str]:
    """Returns the number of points per curve, the sections, and the drawings, which may take half of the room."""
    points = 2000
    while True:
        sections = curves(runs, points)
        packed = _packed(json.dumps([chart.item for chart in drawn(sections)]))
        if len(packed) <= room / 2 or points <= 50:
            return points, sections, packed
        points = max(50, int(points * min(0.8, room / 2 / len(packed))))


def _samples(rated: Sequence[Sequence[Row]], room: int) -> tuple[int, str]:
    """Returns the number of samples to show per run, and the samples."""
    count = max(map(len, rated), default=0)
    raw = sum(sum(map(len, _texts(item))) for items in rated for item in items)
    count = min(count, max(1, int(count * _MOST_RAW / max(raw, 1))))
    while True:
        packed = _packed(json.dumps([item for items in rated for item in _chosen(items, count)]))
        if len(packed) <= room or count <= 1:
            return count, packed
        count = max(1, int(count * min(0.9, 0.95 * room / len(packed))))


def _described(run: RunFiles) -> dict[str, Any]:
    best = record_of(best_folder(run.root))
    told = summary(run) | ({"best/": described(best)} if best else {})
    return {"name": run.name, "root": str(run.root), "summary": told, "findings": diagnose(run)}


def _own(name: str) -> str:
    return (files("lightrl.report") / name).read_text()


def _packed(text: str) -> str:
    """Encodes a text as base64 of gzip, so that none of its characters can end the HTML element that holds it."""
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def _numbered(sections: Sequence[Section]) -> list[dict[str, Any]]:
    """Returns the sections with the index of each chart in the data."""
    number, found = 0, []
    for section in sections:
        charts = [{"number": number + place, "caption": chart.caption} for place, chart in enumerate(section.charts)]
        found.append(section._asdict() | {"charts": charts})
        number += len(charts)
    return found


# ---- Samples ---------------------------------------------------------------------------------------------------------


def _rated(run: RunFiles, index: int) -> list[dict[str, Any]]:
    """Returns the samples of a run, shortened and with their suspicion."""
    found = []
    for item, suspicion in zip(run.samples, suspicions(run.samples), strict=True):
        row = {name: item[name] for name in _SHOWN if item.get(name) is not None}
        row |= {name: shortened(item.get(name)) for name in ("prompt", "response")}
        if row.get("turns"):
            row["turns"] = _shortened_turns(row["turns"])
        found.append(row | {"run": index, "suspicion": suspicion.score, "reasons": list(suspicion.reasons)})
    return found


def shortened(text: object) -> str:
    """Returns the start of a text, and states how much was left out."""
    whole = str(text or "")
    left = len(whole) - _LONGEST_TEXT
    return f"{whole[:_LONGEST_TEXT]} [... {left} more characters]" if left > 0 else whole


def _shortened_turns(turns: Sequence[Row]) -> list[Row]:
    """Returns the first turns, as long as a text may be, and a last one that states how much was left out."""
    kept: list[Row] = []
    room = _LONGEST_TEXT
    for turn in turns:
        text = str(turn["text"])
        if room > 0:
            kept.append({**turn, "text": text[:room]})
        room -= len(text)
    return kept if room >= 0 else [*kept, {"text": f"[... {-room} more characters]"}]


def _texts(item: Row) -> list[str]:
    """Returns the texts of a sample: its prompt, its response, and its turns as one text."""
    turns = "".join(str(turn["text"]) for turn in item.get("turns") or ())
    return [str(item.get("prompt") or ""), str(item.get("response") or ""), turns]


def _chosen(items: Sequence[Row], count: int) -> list[Row]:
    """Returns `count` samples: the most suspicious ones, and others spread over the run."""
    if len(items) <= count:
        return list(items)
    ranked = sorted(range(len(items)), key=lambda index: -items[index]["suspicion"])
    kept = {index for index in ranked[: min(_ALWAYS, -(-count // 2))] if items[index]["suspicion"]}
    others = [index for index in range(len(items)) if index not in kept]
    room = max(0, count - len(kept))
    kept |= {others[index * len(others) // room] for index in range(room)}
    return [items[index] for index in sorted(kept)]


def _left_out(runs: Sequence[RunFiles], rated: Sequence[Sequence[Row]], sizes: _Sizes) -> list[str]:
    """Returns a sentence for each thing that the page leaves out."""
    notes = []
    for run, items in zip(runs, rated, strict=True):
        if len(items) > sizes.samples:
            notes.append(
                f"{run.name}: {sizes.samples} of {len(items)} logged samples are shown, the most suspicious and others "
                "spread over the run, so that the page stays below 2 MB. samples.jsonl has all."
            )
        longest = max((len(values) for name in run.metric_names if (values := run.values(name))), default=0)
        if longest > sizes.points:
            notes.append(
                f"{run.name}: a curve of {longest} steps is drawn with about {sizes.points} points, the lowest and the "
                "highest of each stretch. metrics.jsonl has all."
            )
        if any(len(text) > _LONGEST_TEXT for item in run.samples for text in _texts(item)):
            notes.append(f"{run.name}: texts are cut off after {_LONGEST_TEXT} characters.")
    return notes
