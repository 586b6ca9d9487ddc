"""Writes the README.md of an exported model: its origin, its recipe, its metrics and the hash of its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

import lightrl
from lightrl.config import BUILTIN_MODEL
from lightrl.config.command_line import flatten
from lightrl.config.options import as_dict
from lightrl.strategy.saving.state_files import HASH_FILE
from lightrl.trainers.earlier_run import read_rows
from lightrl.trainers.loggers.attach import public_options
from lightrl.wording import counted

_SHOWN = ("eval/", "reward/mean", "loss", "accuracy", "margin", "kl", "entropy", "mismatch/max_abs")
_OF_THE_MACHINE = ("output_dir", "resume", "config", "hub.", "log.", "export.", "distributed.", "checkpoint.")


def write_card(folder: Path, root: Path, config: Any, *, step: int) -> None:
    """Writes the card of the model in a folder.

    Args:
        root: the folder of the run that made it.
        step: the step after which the model was saved.
    """
    stored = folder / HASH_FILE
    weights = stored.read_text().split()[0] if stored.is_file() else "not recorded"
    text = "\n".join(_card(config, _metrics_of(root, step), step, weights))
    (folder / "README.md").write_text(f"{text}\n", encoding="utf-8")


def _card(config: Any, metrics: Mapping[str, float], step: int, weights: str) -> Iterator[str]:
    head: dict[str, Any] = {"library_name": "transformers", "tags": ["lightrl", "reinforcement-learning"]}
    is_public = config.model != BUILTIN_MODEL and not Path(config.model).exists()
    head |= {"base_model": config.model} if is_public else {}
    yield f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n"
    kind = type(config).__name__.removesuffix("Config")
    of = f" of `{config.model}`" if is_public else ""
    yield f"# {kind} training{of}\n"
    yield f"Trained by lightrl {lightrl.__version__} for {counted(step, 'step')}.\n"
    yield "## Metrics\n"
    yield "The last ones known when the model was saved; lightrl's docs/metrics.md explains each.\n"
    yield "| Metric | Value |\n|---|---|"
    yield from (f"| `{name}` | {value:.4g} |" for name, value in metrics.items())
    yield "\n## Recipe\n"
    yield "Options that differ from the defaults, as `--config` reads them:\n"
    yield f"```yaml\n{yaml.safe_dump(changed_options(config), sort_keys=False)}```\n"
    yield "## Weights\n"
    yield f"`lightrl hash` of this folder prints `{weights}`."


def changed_options(config: Any) -> dict[str, Any]:
    """Returns the options that define the run and differ from their defaults, without secrets."""
    defaults = dict(flatten(as_dict(type(config)())))
    return {
        name: value
        for name, value in public_options(config).items()
        if value != defaults.get(name) and not name.startswith(_OF_THE_MACHINE)
    }


def _metrics_of(root: Path, step: int) -> dict[str, float]:
    """Returns the newest value of each metric that a reader wants to know."""
    found: dict[str, float] = {}
    for row in read_rows(root / "metrics.jsonl"):
        if row["step"] <= step:
            found |= {name: value for name, value in row.items() if _is_shown(name) and value is not None}
    return dict(sorted(found.items()))


def _is_shown(name: str) -> bool:
    return any(name.startswith(part) if part.endswith("/") else name == part for part in _SHOWN)
