"""Parses records that a user wrote as JSON, and describes any mistake in one sentence."""

from __future__ import annotations

import json
from typing import Any

Record = dict[str, Any]
LocatedRecord = tuple[Record, str]  # the record, and its file and line for error messages


def parse_json(content: bytes, where: str, wanted: str) -> Any:
    """Returns the parsed value; raises a ValueError that says first where the mistake is and last what is wanted."""
    try:
        text = content.decode("utf-8-sig").rstrip("\r\n")  # the end of a cut line would be the start of the next one
        value = json.loads(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text ({error}). Save the file as UTF-8.") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not valid JSON ({_reason(error, text)}). {wanted}") from error
    if b"\\ud" in content.lower():  # an escape of half a character, which no file and no tokenizer accepts
        _refuse_halves(value, where)
    return value


def _reason(error: ValueError | RecursionError, text: str) -> str:
    """Describes the mistake; names its line only in a longer text, because callers name the line of a record."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if not isinstance(error, json.JSONDecodeError):
        return str(error)  # of a number with too many digits
    line = f"line {error.lineno} " if "\n" in text else ""
    return f"{error.msg}: {line}column {error.colno}"


def _refuse_halves(value: Any, where: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(
            f"{where}: it holds {half!a}, half of a pair of surrogates, which is no character. Write the pair or "
            "leave it out."
        ) from error


def require_object(value: Any, where: str) -> Record:
    """Returns a record; raises ValueError for any other value."""
    if not isinstance(value, dict):
        raise ValueError(
            f"{where}: a record is of type {type(value).__name__}. It must be a JSON object with a prompt or messages."
        )
    return value


def field_names(*records: Record) -> list[str]:
    """Returns the names of the fields, for an error; one that no record fills is marked, as a null counts for none."""
    filled = {name for record in records for name, value in record.items() if value is not None}
    return sorted(name if name in filled else f"{name} (null)" for name in set().union(*records))
