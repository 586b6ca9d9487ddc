"""Reads YAML that a user wrote, with one sentence for whatever is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_MAX_BYTES = 1 << 20  # of a file of options; the reader takes a minute for ten times as much


def parse_yaml(text: str, label: str) -> Any:
    """Returns the value of a text; raises ValueError that begins with the label."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # such as the date 2020-99-99, or 5,000 digits
        raise ValueError(f"{label} is not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ValueError(f"{label} is not valid YAML: its brackets are nested too deeply.") from error


def read_yaml(path: Path, label: str) -> Any:
    """Returns the value of a file of options."""
    size = path.stat().st_size
    if size > _MAX_BYTES:
        raise ValueError(f"{label} has {size:,} bytes: a file of options has at most {_MAX_BYTES:,}.")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{label} is not valid YAML: it is no text in UTF-8 ({error}).") from error
    return parse_yaml(text, label)
