"""Reads YAML that a user wrote, and describes a mistake in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError

_MAX_BYTES = 1 << 20  # of a file of options; the reader takes a minute for ten times as much


class _Loader(yaml.SafeLoader):
    """Reads plain values, a date as a text, and refuses a name given twice, of which YAML would keep the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Checks a mapping before `<<` merges another into it, whose names its own may replace."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                line, name = key.start_mark.line + 1, (key.tag, key.value)
                if name in lines:
                    where = f"line {line}" if line == lines[name] else f"lines {lines[name]} and {line}"
                    raise ValueError(f"it gives {key.value!r} twice, in {where}. Keep one.")
                lines[name] = line
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Brings in what `<<` names: a mapping's own names win, then those of the first mapping of a list.

        PyYAML 6.0.4 compares names by identity and lets others win; this can go when it compares what they say.
        https://github.com/yaml/pyyaml/blob/6.0.4/lib/yaml/constructor.py
        """
        merged: dict[Any, tuple[yaml.Node, yaml.Node]] = {}
        own: dict[Any, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            if key.tag != "tag:yaml.org,2002:merge":
                own[_name_of(key)] = (key, value)
                continue
            for source in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                if not isinstance(source, yaml.MappingNode):
                    raise ConstructorError(None, None, "<< names a mapping, or a list of them", source.start_mark)
                self.flatten_mapping(source)
                for pair in source.value:
                    merged.setdefault(_name_of(pair[0]), pair)
        node.value = list({**merged, **own}.values())

    def construct_yaml_int(self, node: Any) -> Any:
        """Reads 010 as ten and 1:30 as a text, as YAML 1.2 does, and not as an octal number and as 90."""
        digits = node.value.replace("_", "")
        if ":" in digits:
            return str(node.value)
        return int(digits) if digits.lstrip("+-").isdigit() else super().construct_yaml_int(node)

    def construct_yaml_float(self, node: Any) -> Any:
        """Reads 1:30.5 as a text, too."""
        return str(node.value) if ":" in node.value else super().construct_yaml_float(node)


_DATE = "tag:yaml.org,2002:timestamp"  # no option is a date, and a name such as 2026-99-99 would be refused
_Loader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0] != _DATE]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)


class _AsWritten(_Loader):
    """Reads every plain value but null as a text, so that `No`, 12:30 and 1.10 stay what they are."""


_AsWritten.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0] in ("tag:yaml.org,2002:null", "tag:yaml.org,2002:merge")]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _name_of(key: yaml.Node) -> Any:
    return (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key)


def parse_yaml(text: str, label: str, *, as_written: bool = False) -> Any:
    """Returns the value of a text; raises ValueError that begins with the label.

    as_written: leaves numbers, dates and truth values in it the texts that they are written as.
    """
    try:
        return yaml.load(text, _AsWritten if as_written else _Loader)  # which are safe ones
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # such as 5,000 digits
        raise ValueError(f"{label} is not valid YAML: {_reason(error, text)}") from error
    except RecursionError as error:
        raise ValueError(f"{label} is not valid YAML: its brackets are nested too deeply.") from error


def _reason(error: Exception, text: str) -> str:
    """Describes the mistake and its position; the line is left out for a text that has only one."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    num_lines, mark = text.rstrip().count("\n") + 1, error.problem_mark
    if mark.line >= num_lines and error.context_mark is not None:  # what has no end is named by its beginning
        mark = error.context_mark
    line = f"line {mark.line + 1} " if num_lines > 1 else ""
    said = ", ".join(filter(None, (error.context, error.problem)))
    return f"{' '.join(said.split())}: {line}column {mark.column + 1}"


def read_yaml(path: Path, label: str, *, as_written: bool = False) -> Any:
    """Returns the value of a file of options, as parse_yaml() does."""
    size = path.stat().st_size
    if size > _MAX_BYTES:
        raise ValueError(f"{label} has {size:,} bytes: a file of options has at most {_MAX_BYTES:,}.")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{label} is not valid YAML: it is not UTF-8 text ({error}).") from error
    return parse_yaml(text, label, as_written=as_written)
