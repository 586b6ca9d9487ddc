"""Refuses options that only another strategy reads.

A config has the strategy's name alone, which may be that of a plug-in. So the class says what it reads: `own_options`
holds the names of its sections, and a class without it reads none of them.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

SECTIONS = ("deepspeed", "megatron")  # each is named as the strategy that reads it


def check_own_options(config: Any, kind: type[Any]) -> None:
    """Raises ValueError for options of a section that is not among the strategy's own_options.

    Args:
        config: The options of a run.
        kind: The class of the strategy that it gets.
    """
    for section in SECTIONS:
        given = [] if section in getattr(kind, "own_options", ()) else _given(section, getattr(config, section))
        if given:
            raise ValueError(
                f"{kind.__name__} (--strategy {config.strategy}) does not read {' and '.join(given)}. Leave the option "
                f"out, or use --strategy {section}. A class of your own reads --{section}.* if it inherits from that "
                f'strategy, or if its own_options has "{section}".'
            )


def _given(section: str, chosen: Any) -> list[str]:
    """Returns the options of a section that are not at their defaults, each with its default."""
    named = [(item.name, getattr(chosen, item.name), item.default) for item in fields(chosen)]
    return [f"--{section}.{name} {value} (default {default})" for name, value, default in named if value != default]
