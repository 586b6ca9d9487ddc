"""Chat templates of files, variables of templates (--data.chat_template_args), and a date that some templates write."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightrl.config.paths import why_unreadable
from lightrl.data.json_records import LocatedRecord

logger = logging.getLogger(__name__)

_TODAY = "strftime_now"  # transformers' function that writes the date into a template
_DATE = "date_string"  # variable by which many templates, such as those of Llama 3, take another date
_MESSAGES = re.compile(r"""\s*\[\s*\{[^{}]*["']role["']\s*:""")
_OWN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})  # set by rendering itself


def set_template_file(renderer: Any, path: str) -> None:
    """Gives a tokenizer or processor the chat template of a file in place of its own; saving it saves the template."""
    import jinja2  # noqa: PLC0415  (transformers imports it for templates alone)

    problem = why_unreadable(path)
    text = "" if problem else Path(path).read_text(encoding="utf-8", errors="replace")
    if not text.strip():
        raise ValueError(f"--data.chat_template_file {path}: {problem or 'it is empty'}.")
    renderer.chat_template = text
    try:
        renderer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"--data.chat_template_file {path}, line {error.lineno}: this is no Jinja template: {error.message}"
        ) from None
    except Exception as error:  # it may refuse this conversation; the error about a record of the data names that
        logger.debug("The chat template refuses an empty question: %s", error)


def set_template_arguments(renderer: Any, arguments: Mapping[str, Any]) -> None:
    """Makes apply_chat_template() of a tokenizer or processor pass these variables to the template.

    Raises ValueError for a variable that the template does not read, because it would have no effect.
    """
    text = _text_of(renderer)
    if not text:
        raise ValueError("--data.chat_template_args was given, and the model's tokenizer has no chat template.")
    for name in arguments:
        if name in _OWN or not re.search(rf"\b{re.escape(name)}\b", text):
            raise ValueError(
                f"--data.chat_template_args {name}=...: the model's chat template reads no variable {name!r} of yours. "
                f"It has {_variables(text)}."
            )
    renderer.apply_chat_template = partial(renderer.apply_chat_template, **arguments)


def uses_template(chat_template: str, records: Sequence[LocatedRecord]) -> bool:
    """Returns whether a chat template writes the texts of a data set, judged by its first record.

    Messages are always rendered; --data.chat_template decides about strings alone.
    """
    first = records[0][0] if records else {}
    parts = [value[0] for value in first.values() if isinstance(value, list) and value]
    return chat_template != "never" or any(isinstance(part, Mapping) and "role" in part for part in parts)


def warn_of_date(renderer: Any, arguments: Mapping[str, Any]) -> None:
    """Warns of a template that writes today's date: a run that continues tomorrow would have other prompts."""
    text = _text_of(renderer)
    if _TODAY not in text or _DATE in arguments:
        return
    remedy = f" Fix it by --data.chat_template_args {_DATE}='26 Jul 2024'." if _DATE in text else ""
    logger.warning(
        "The chat template writes today's date into the prompts: the numbers of this run depend on the day, and change "
        "if it is continued on another.%s",
        remedy,
    )


def warn_of_written_messages(records: Sequence[LocatedRecord], field: str) -> None:
    """Warns if the first record holds its messages as a text, which a template would render as one message of the user.

    A table in text, such as a .csv file, cannot hold a list.
    """
    first, where = records[0] if records else ({}, "")
    name, text = next(((name, first[name]) for name in (field, "messages") if first.get(name)), ("", ""))
    if isinstance(text, str) and _MESSAGES.match(text):
        logger.warning(
            "%s: %r is the text of a list of messages, and becomes one message of the user, with all its brackets. "
            "Write a list instead, which .jsonl and .parquet files can hold.",
            *(where, name),
        )


def _text_of(renderer: Any) -> str:
    template = renderer.chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else str(template or "")


def _variables(text: str) -> str:
    """Returns the variables that a template tests by "x is defined", as most templates do for optional ones."""
    names = sorted(set(re.findall(r"\b([a-z_]\w*) is (?:not )?defined", text)) - _OWN)
    return f"{', '.join(names)} among its optional ones" if names else "no optional ones"
