"""Tells when the data or the code that a run names is no longer what it was when the run began."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightrl.config import RolloutConfig, RunConfig
from lightrl.data.mixture import files_of, parts_of
from lightrl.data.prompts import HELD_OUT

logger = logging.getLogger(__name__)

_NAME = "inputs.json"
_WHOLE = 64 << 20  # bytes of a file that is read wholly; of a larger one as much, in blocks from all over it
_BLOCKS = 64
_OBJECT = re.compile(r"([\w./-]+):[A-Za-z_]\w*")  # module:function, also inside name=[module:one, module:two]


def note_inputs(root: Path, config: RunConfig, *, continues: bool) -> None:
    """Writes the hashes of the files that the options name; warns of those that changed since a run began.

    The run goes on: what changed may be a mended line. But its numbers are no longer those of one undisturbed run.
    """
    path = root / _NAME
    found = {str(file): hash_of(file) for file in sorted({*_data_files(config), *_code_files(config)})}
    if continues:
        _warn_of_changes(_read(path), found)
    path.write_text(json.dumps(found, indent=1) + "\n")


def _warn_of_changes(before: Mapping[str, Any], now: Mapping[str, str]) -> None:
    changed = [name for name, value in now.items() if before.get(name, value) != value]
    if changed:
        logger.warning(
            "%s changed since this run began. It goes on, and its steps from here on are not those that the files of "
            "then would have given. To begin anew, choose another --output_dir.",
            ", ".join(changed),
        )


def hash_of(path: Path) -> str:
    """Returns a hash of the size and the content of a file; of a very large one, of 64 MiB from all over it."""
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        if size <= _WHOLE:
            digest.update(file.read())
        else:
            for block in range(_BLOCKS):
                file.seek(block * (size - _WHOLE // _BLOCKS) // (_BLOCKS - 1))
                digest.update(file.read(_WHOLE // _BLOCKS))
    return digest.hexdigest()


def _data_files(config: RunConfig) -> Iterator[Path]:
    for source in (config.train_data, config.eval_data):
        for part in parts_of(source) if source not in ("", *HELD_OUT) else []:
            yield from (file for file in files_of(part.name) or [Path(part.name)] if file.is_file())


def _code_files(config: RunConfig) -> Iterator[Path]:
    """Yields the files of the strategy, the rewards and the workflow that are not lightrl's own."""
    names = [config.strategy]
    if isinstance(config, RolloutConfig):
        names += [*config.reward, config.rollout.workflow, *config.rollout.workflow_args]
    for name in names:
        files = (_file_of(module) for module in _OBJECT.findall(name))
        yield from (file for file in files if file is not None)


def _file_of(module: str) -> Path | None:
    """Returns the file of a module, or of a path to one; None if there is none that can be read."""
    if module.endswith(".py"):
        return Path(module) if Path(module).is_file() else None
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # an argument that only looks like a name
        return None
    return Path(spec.origin) if spec is not None and spec.origin and Path(spec.origin).is_file() else None


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):  # a run of a version that wrote none
        return {}
    return content if isinstance(content, dict) else {}
