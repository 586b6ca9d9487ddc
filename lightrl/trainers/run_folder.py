"""A run's folder: config.yaml, metrics.jsonl, samples.jsonl, tensorboard/, checkpoints/, final/, final_ema/."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from lightrl.checkpoint import CheckpointDirectory
from lightrl.config import RunConfig, changed_options, to_yaml
from lightrl.records import Experience


class RunFolder:
    """Only rank 0 writes; every rank knows the paths."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.checkpoints = root / "checkpoints"
        self.final = root / "final"
        self.final_ema = root / "final_ema"
        self._metrics = root / "metrics.jsonl"
        self._samples = root / "samples.jsonl"

    # ---- Opening -----------------------------------------------------------------------------------------------

    def check(self, config: RunConfig) -> None:
        """Refuses a folder that holds something else; changes nothing."""
        if self.root.exists() and not self.root.is_dir():
            raise ValueError(f"--output_dir {self.root} is a file. Name a folder.")
        if not self.root.exists() or not any(self.root.iterdir()):
            return
        saved = self.root / "config.yaml"
        if saved.exists() and not self._metrics.exists() and not self.checkpoints.exists():
            return  # that run ended before its first step
        if not saved.exists():
            raise ValueError(
                f"--output_dir {self.root} is not empty and is no run of lightrl (it has no config.yaml). "
                "Choose another folder."
            )
        if config.resume == "never":
            raise ValueError(
                f"--output_dir {self.root} already holds a run and --resume is never. Choose another folder, delete "
                "this one, or continue it with --resume auto."
            )
        different = changed_options(config, _read_config(saved))
        if different:
            listed = "; ".join(f"{name} was {old!r}, now {new!r}" for name, old, new in different[:6])
            raise ValueError(
                f"--output_dir {self.root} belongs to another run: {listed}. Choose another folder, or give the same "
                "options to continue that run."
            )

    def open(self, config: RunConfig, steps_done: int) -> None:
        """Saves the config; what an interrupted run logged after the checkpoint that is continued is dropped."""
        self.root.mkdir(parents=True, exist_ok=True)
        (self.root / "config.yaml").write_text(to_yaml(config))
        for path in (self._metrics, self._samples):
            if steps_done:
                _keep_steps(path, steps_done)
            elif path.exists():
                path.rename(_unused_name(path))  # a run that starts over leaves what the last one logged

    # ---- Writing -----------------------------------------------------------------------------------------------

    def append_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        _append(self._metrics, [{"step": step, **{name: _number(value) for name, value in metrics.items()}}])

    def append_samples(self, step: int, experience: Iterable[Experience]) -> None:
        _append(self._samples, [_sample_row(step, item) for item in experience])

    def metrics(self) -> list[dict[str, Any]]:
        """What has been logged so far."""
        return [json.loads(line) for line in self._metrics.read_text().splitlines()] if self._metrics.exists() else []


def new_run_path(kind: str) -> Path:
    """Makes a folder that no other run has, even one started in the same second."""
    name, number = f"{kind}-{datetime.now():%Y%m%d-%H%M%S}", 1
    while True:
        path = Path("runs") / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return path


def _read_config(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}. Choose another --output_dir.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it holds no options. Choose another --output_dir.")
    return content


def find_checkpoint(config: RunConfig, checkpoints: Path) -> Path | None:
    """The checkpoint that --resume asks for; None starts from the beginning."""
    if config.resume == "never":
        return None
    if config.resume == "auto":
        return CheckpointDirectory(checkpoints, keep=1).latest() if checkpoints.is_dir() else None
    path = Path(config.resume)
    if not path.is_dir():
        raise FileNotFoundError(
            f"--resume {path}: there is no such folder. Give auto, never, or a checkpoint's folder."
        )
    if path.name == "checkpoints" or (path / "checkpoints").is_dir():
        root = path if path.name == "checkpoints" else path / "checkpoints"
        newest = CheckpointDirectory(root, keep=1).latest()
        if newest is None:
            raise FileNotFoundError(f"--resume {path}: there is no complete checkpoint in {root}.")
        return newest
    if not path.name.removeprefix("step-").isdigit():
        raise ValueError(f"--resume {path} is no checkpoint: give a run's folder or one of its checkpoints/step-... .")
    return CheckpointDirectory(path.parent, keep=1).path(int(path.name.removeprefix("step-")))


def _keep_steps(path: Path, steps_done: int) -> None:
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # the line that a kill cut short
        if row["step"] <= steps_done:
            kept.append(line)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(f"{line}\n" for line in kept))
    temporary.replace(path)


def _unused_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_name(f"{path.stem}.old-{number}{path.suffix}")).exists():
        number += 1
    return candidate


def _append(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _number(value: float) -> float | int | None:
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no NaN
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) > 1e6 else value


def _sample_row(step: int, item: Experience) -> dict[str, Any]:
    sample = item.sample
    return {
        "step": step,
        "position": sample.position,
        "sample": sample.sample_index,
        "prompt": sample.prompt.text,
        "response": sample.text,
        "answer": sample.prompt.answer,
        "reward": item.reward,
        "shaping": item.shaping,
        "advantage": item.advantage,
        "finish_reason": sample.finish_reason,
        "version": sample.versions[-1] if sample.versions else None,
    }
