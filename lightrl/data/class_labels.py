"""Turns class labels, which `datasets` stores as numbers, into their names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lightrl.data.json_records import Record

_LISTS = ("List", "LargeList", "Sequence")


def labelled_in(features: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the features, as dictionaries or lists, that hold class labels."""
    return {name: feature for name, feature in features.items() if _holds_labels(feature)}


def features_of(metadata: Mapping[bytes, bytes] | None) -> dict[str, Any]:
    """Returns the features that `datasets` has written into a Parquet file; empty for a file of another program."""
    try:
        features = json.loads((metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
    except (ValueError, KeyError, TypeError):
        return {}
    return features if isinstance(features, dict) else {}


def with_names(record: Record, labelled: Mapping[str, Any]) -> Record:
    """Returns a record with the names of its labels; one without a label (-1) counts as left out."""
    named = {name: _named(record[name], feature) for name, feature in labelled.items() if name in record}
    return {**record, **named}


def _holds_labels(feature: Any) -> bool:
    if isinstance(feature, Mapping):
        return _is_label(feature) or any(map(_holds_labels, feature.values()))
    return isinstance(feature, list) and any(map(_holds_labels, feature))


def _is_label(feature: Mapping[str, Any]) -> bool:
    return feature.get("_type") == "ClassLabel" and isinstance(feature.get("names"), list)


def _named(value: Any, feature: Any) -> Any:
    if isinstance(feature, list):
        return _each_named(value, feature[0])
    if not isinstance(feature, Mapping):
        return value
    if _is_label(feature):
        names: Sequence[str] = feature["names"]
        return names[value] if isinstance(value, int) and 0 <= value < len(names) else None
    if feature.get("_type") in _LISTS:
        return _each_named(value, feature["feature"])
    if isinstance(value, Mapping):
        return {name: _named(item, feature.get(name)) for name, item in value.items()}
    return value


def _each_named(value: Any, feature: Any) -> Any:
    if isinstance(value, list):
        return [_named(item, feature) for item in value]
    if isinstance(value, Mapping):  # a Sequence of dictionaries is a dictionary of lists
        return {name: _each_named(items, feature[name]) for name, items in value.items()}
    return value
