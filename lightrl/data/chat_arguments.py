"""Gives a chat template the variables of --data.chat_template_args, wherever a conversation is rendered."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

_OWN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})  # set by rendering itself


def set_template_arguments(renderer: Any, arguments: Mapping[str, Any]) -> None:
    """Makes apply_chat_template() of a tokenizer or processor pass these variables to the template.

    Raises ValueError for a variable that the template does not read, because it would have no effect.
    """
    template = renderer.chat_template
    if not template:
        raise ValueError("--data.chat_template_args was given, and the model's tokenizer has no chat template.")
    text = "\n".join(template.values()) if isinstance(template, dict) else str(template)
    for name in arguments:
        if name in _OWN or not re.search(rf"\b{re.escape(name)}\b", text):
            raise ValueError(
                f"--data.chat_template_args {name}=...: the model's chat template reads no variable {name!r} of yours. "
                f"It has {_variables(text)}."
            )
    renderer.apply_chat_template = partial(renderer.apply_chat_template, **arguments)


def _variables(text: str) -> str:
    """Returns the variables that a template tests by "x is defined", as most templates do for optional ones."""
    names = sorted(set(re.findall(r"\b([a-z_]\w*) is (?:not )?defined", text)) - _OWN)
    return f"{', '.join(names)} among its optional ones" if names else "no optional ones"
