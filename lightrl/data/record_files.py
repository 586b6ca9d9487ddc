"""Reads the records of a data set from files, from a directory or from the hub."""

from __future__ import annotations

import csv
import gzip
import io
import logging
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from lightrl.builtin.task import BUILTIN_TASKS
from lightrl.config.paths import why_unreadable
from lightrl.data.class_labels import features_of, labelled_in, with_names
from lightrl.data.json_records import LocatedRecord, Record, parse_json, require_object
from lightrl.data.streamed import Streamed, stream_lines
from lightrl.models.hub import why_unreachable

logger = logging.getLogger(__name__)

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_LINES = (".jsonl", ".ndjson", ".json")
_COMPRESSED = (".gz", ".zst")  # behind the ending of a text file
_LONGEST_VALUE = 2**31 - 1  # characters
ACCEPTED_SOURCES = (
    "a .jsonl, .ndjson, .json, .parquet, .csv or .tsv file, one such as .jsonl.gz or .csv.zst, "
    "a pattern such as 'part-*.jsonl', "
    "a directory with a Hugging Face data set, hf:OWNER/NAME[/CONFIG][:SPLIT], "
    "reasoning_gym:TASK[?name=value&...], or " + " or ".join(BUILTIN_TASKS) + "; or several of these with + between "
    "them, each with *N behind it if its records are to be taken N times in an epoch, and *0.5 for half of them"
)


def load_from_disk(path: Path, stream: bool) -> Sequence[LocatedRecord]:
    """Reads a file, whose ending says what it holds, or a directory with a data set of `datasets`."""
    if os.path.isdir(path):
        return _load_directory(path, stream)
    if problem := why_unreadable(path):
        raise FileNotFoundError(f"There is no data set {path.absolute()}: {problem}. A data set is {ACCEPTED_SOURCES}.")
    kind = Path(path.stem).suffix if path.suffix in _COMPRESSED else path.suffix
    if path.suffix == ".parquet":
        return _stream_parquet(path) if stream else _load_parquet(path)
    if kind not in (*_LINES, *_DELIMITERS):
        raise ValueError(f"{path} ends in {path.suffix!r}. A data set is {ACCEPTED_SOURCES}.")
    is_array = kind == ".json" and _begins_array(path)
    if stream:
        _require_parts(path, kind, is_array)
        return stream_lines(path, _parse_line)
    if kind in _DELIMITERS:
        return _load_table(path, kind)
    return _load_json_array(path) if is_array else _load_json_lines(path)


def _require_parts(path: Path, kind: str, is_array: bool) -> None:
    """Raises ValueError for a file whose lines --data.stream cannot find again."""
    if is_array or kind in _DELIMITERS:
        found = "one JSON array" if is_array else "a table in text"
        raise ValueError(f"{path} is {found}, which --data.stream cannot read in parts: write one JSON object a line.")
    if path.suffix in _COMPRESSED:
        raise ValueError(f"{path} is compressed, and --data.stream cannot read that in parts: unpack it.")


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Opens a file, which is unpacked as it is read; raises ValueError if it cannot be."""
    try:
        if path.suffix == ".zst":
            with _open_zstandard(path) as file:
                yield file
        else:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
                yield cast("BinaryIO", file)
    except (EOFError, zlib.error, OSError) as error:
        if path.suffix not in _COMPRESSED:
            raise
        raise ValueError(f"{path}: not a whole compressed file ({error}).") from error


def _open_zstandard(path: Path) -> BinaryIO:
    try:
        import pyarrow
    except ImportError as error:
        raise ImportError(f'Reading {path} needs pyarrow: pip install "lightrl[datasets]".') from error
    return cast("BinaryIO", io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd")))


def _begins_array(path: Path) -> bool:
    with _opened(path) as file:
        return file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def _load_json_lines(path: Path) -> Sequence[LocatedRecord]:
    with _opened(path) as lines:
        return [_parse_line(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]


def _parse_line(line: bytes, where: str) -> LocatedRecord:
    return require_object(parse_json(line, where, "Each line must be one JSON object."), where), where


def _load_json_array(path: Path) -> list[LocatedRecord]:
    with _opened(path) as file:
        values = parse_json(file.read(), str(path), "It must be an array of objects.")
    return _locate((require_object(value, f"{path}: row {row}") for row, value in enumerate(values, start=1)), path)


def _load_table(path: Path, kind: str) -> list[LocatedRecord]:
    """Reads a table whose first row names the fields; a value is text, and an empty one counts as left out."""
    csv.field_size_limit(_LONGEST_VALUE)  # 131,072 characters otherwise, fewer than a long prompt has
    try:
        with _opened(path) as file:
            text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
            rows = [row for row in csv.reader(text, delimiter=_DELIMITERS[kind], strict=True) if row]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error}). Save the file as UTF-8.") from error
    except csv.Error as error:
        raise ValueError(f"{path}: not a valid table ({error}). Check the quotes around its values.") from error
    return _locate_cells(rows[0], rows[1:], path, kind) if rows else []


def _locate_cells(names: list[str], rows: list[list[str]], path: Path, kind: str) -> list[LocatedRecord]:
    if not all(names) or len(set(names)) < len(names):
        raise ValueError(f"{path}: the first row must name each field once, and it is {names}.")
    wanted = _DELIMITERS[kind]
    if len(names) == 1 and set(names[0]) & set(";|,\t") - {wanted}:
        logger.warning("%s has one field, %r: those of a %s file are separated by %r.", path, names[0], kind, wanted)
    for number, row in enumerate(rows, start=1):
        if len(row) != len(names):
            raise ValueError(f"{path}: row {number} has {len(row)} values for {len(names)} fields.")
    return _locate((dict(zip(names, (cell or None for cell in row), strict=True)) for row in rows), path)


def _load_parquet(path: Path) -> list[LocatedRecord]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(f'Reading {path} needs pyarrow: pip install "lightrl[datasets]".') from error
    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: not a valid Parquet file ({error}).") from error
    labelled = labelled_in(features_of(table.schema.metadata))
    return _locate((with_names(row, labelled) for row in table.to_pylist()), path)


def _stream_parquet(path: Path) -> Sequence[LocatedRecord]:
    datasets = _import_datasets(f"{path} with --data.stream")
    try:
        loaded = datasets.load_dataset("parquet", data_files=str(path), split="train")  # memory that maps a file
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"{path}: not a valid Parquet file ({error}).") from error
    return _locate_rows(loaded, path, stream=True)


def _load_directory(path: Path, stream: bool) -> Sequence[LocatedRecord]:
    datasets = _import_datasets(str(path))
    is_saved = any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))  # by save_to_disk
    try:
        loaded = datasets.load_from_disk(str(path)) if is_saved else datasets.load_dataset(str(path))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"The directory {path} holds no data set that datasets can read: {_ended(error)}") from error
    return _locate_rows(_train_split(loaded, path), path, stream)


def load_from_hub(source: str, stream: bool) -> Sequence[LocatedRecord]:
    """Reads the data set that hf:OWNER/NAME[/CONFIG][:SPLIT] names."""
    name, _, split = source.removeprefix("hf:").partition(":")
    owner_and_name, config = name, None
    if name.count("/") == 2:
        owner_and_name, _, config = name.rpartition("/")
    if not name or name.count("/") > 2:
        raise ValueError(f"{source} names no data set: it must be hf:OWNER/NAME[/CONFIG][:SPLIT].")
    datasets = _import_datasets(source)
    was_offline = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = was_offline or bool(why_unreachable())  # it would try for 23 s before its cache
    try:
        return _locate_rows(datasets.load_dataset(owner_and_name, config, split=split or "train"), source, stream)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"Cannot load {source}: {_ended(error)} The form is hf:OWNER/NAME[/CONFIG][:SPLIT], and SPLIT is train if "
            "left out."
        ) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = was_offline


def _ended(error: Exception) -> str:
    """Returns the error as a sentence, with its cause: datasets says by itself only that it failed."""
    parts = [str(part).strip() for part in (error, error.__cause__) if part is not None]
    return f"{': '.join(' '.join(part.split()).removesuffix('.') for part in parts if part)}."


def _import_datasets(source: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f'Reading {source} needs datasets: pip install "lightrl[datasets]".') from error
    return datasets


def _train_split(loaded: Any, path: Path) -> Any:
    """Returns the data set itself, or from a dictionary of splits the one named train, or else the only one."""
    splits = loaded if isinstance(loaded, dict) else {"train": loaded}
    if "train" not in splits and len(splits) != 1:
        raise ValueError(
            f"{path} has the splits {', '.join(splits)} and none is train: give the directory of one split."
        )
    return splits["train"] if "train" in splits else next(iter(splits.values()))


def _locate_rows(rows: Any, source: str | Path, stream: bool) -> Sequence[LocatedRecord]:
    """Returns the rows of a `datasets` data set, which stay in its files if they are streamed."""
    rows = rows.with_format(None)  # it may be saved with a format that gives tensors or leaves columns out
    row = partial(_row_with_files, rows.with_format("arrow")) if _has_images(rows.features) else partial(_row, rows)
    labelled = labelled_in(rows.features.to_dict())

    def read(index: int) -> Record:
        return with_names(row(index), labelled) if labelled else row(index)

    if not stream:
        return _locate(map(read, range(len(rows))), source)
    return Streamed(len(rows), lambda index: (read(index), f"{source}: row {index + 1}"))


def _row(rows: Any, index: int) -> Record:
    return dict(rows[index])


def _row_with_files(tables: Any, index: int) -> Record:
    """Returns a row with the bytes of its image files, which `datasets` would decode."""
    row: Record = tables[index].to_pylist()[0]
    return row


def _has_images(feature: Any) -> bool:
    import datasets

    if isinstance(feature, Mapping):
        return any(map(_has_images, feature.values()))
    if isinstance(feature, list):  # of one feature
        return any(map(_has_images, feature))
    return isinstance(feature, datasets.Image) or _has_images(getattr(feature, "feature", {}))


def _locate(records: Iterable[Mapping[str, Any]], source: str | Path) -> list[LocatedRecord]:
    return [(dict(record), f"{source}: row {row}") for row, record in enumerate(records, start=1)]
