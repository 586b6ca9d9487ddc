"""Reads a data set (from disk, from the hub, or built in), and renders and tokenises its records as Prompts."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from lightrl.builtin.task import BUILTIN_TASKS, HELD_OUT
from lightrl.data.json_records import LocatedRecord, Record, field_names
from lightrl.data.media_fields import MediaFields, with_media
from lightrl.data.mixture import files_of, parts_of
from lightrl.data.reasoning_tasks import PREFIX, reasoning_records
from lightrl.data.record_files import ACCEPTED_SOURCES, load_from_disk, load_from_hub
from lightrl.data.streamed import Streamed, chain, make_each, select
from lightrl.models.chat_text import render, tools_of, warn_of_lost_messages, with_readable_calls
from lightrl.records import Prompt, inner_value

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_MANY_CHARACTERS = 100_000  # prompts that are longer are checked before they are tokenised
_MOST_TOKENS_SHOWN = 200  # of a tokenizer that cannot read a text
ChatTemplateUse = Literal["auto", "always", "never"]


def held_out_of(source: str) -> str:
    """Returns the name of the held-out problems of a built-in task, or of a sum of tasks; empty if there are none."""
    names = [source] if source in HELD_OUT else [part.name for part in parts_of(source)]
    return " + ".join(HELD_OUT[name] for name in names if name in HELD_OUT)


def load_records(source: str, *, stream: bool = False) -> Sequence[LocatedRecord]:
    """Reads all records of a data set, or of a sum of several, whose records then name their data set in `source`.

    Args:
        source: whatever --train_data and --eval_data accept.
        stream: whether to leave the records in their files and to read each one only when it is used.
    """
    return _load_sum(source, stream) if "+" in source or "*" in source else _load_one(source, stream)


def _load_sum(source: str, stream: bool) -> Sequence[LocatedRecord]:
    parts = parts_of(source)
    if len(parts) == 1:
        return parts[0].take(_load_one(parts[0].name, stream))
    loaded = [(part.name, part.take(_load_one(part.name, stream))) for part in parts]
    return chain([make_each(records, _NameSource(name)) for name, records in loaded])


@dataclass(frozen=True, slots=True)
class _NameSource:
    """Adds the name of its data set to a record, unless the record has one already that is not null."""

    source: str

    def __call__(self, _: int, located: LocatedRecord) -> LocatedRecord:
        record, where = located
        return {**record, "source": record.get("source") or self.source}, where


def _load_one(source: str, stream: bool) -> Sequence[LocatedRecord]:
    builtin = BUILTIN_TASKS.get(source)
    records = _located(builtin(), source) if builtin else _load_elsewhere(source, stream)
    if not records:
        raise ValueError(f"The data set {source} is empty: it must have at least one record.")
    return records


def _located(records: list[Record], source: str) -> list[LocatedRecord]:
    """Returns the records, each with the number of its row, for error messages."""
    return [(record, f"{source}: row {row}") for row, record in enumerate(records, start=1)]


def _load_elsewhere(source: str, stream: bool) -> Sequence[LocatedRecord]:
    if not source.strip():
        raise ValueError(f"The name of the data set is empty. A data set is {ACCEPTED_SOURCES}.")
    if source.startswith("builtin:"):
        names = ", ".join(name.removeprefix("builtin:") for name in BUILTIN_TASKS)
        raise ValueError(f"Unknown built-in task {source.removeprefix('builtin:')!r}. Choose one of {names}.")
    if source.startswith(PREFIX):
        return _located(reasoning_records(source), source)
    if source.startswith("hf:"):
        return load_from_hub(source, stream)
    if files := files_of(source):
        return chain([load_from_disk(file, stream) for file in files])
    return load_from_disk(Path(source), stream)


def build_prompts(
    records: Sequence[LocatedRecord],
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_field: str = "prompt",
    answer_field: str = "answer",
    max_prompt_tokens: int,
    chat_template: ChatTemplateUse = "auto",
    media: MediaFields | None = None,
    vocab_size: int = sys.maxsize,
) -> Sequence[Prompt]:
    """Renders and tokenises the records; the error for a record that cannot be used names its file and line.

    Streamed records give streamed prompts: each one is rendered, tokenised and checked only when it is used.

    Args:
        prompt_field: holds a string or a list of messages; a record without it may have `messages`.
        max_prompt_tokens: the room that the new tokens leave in the model's context.
        chat_template: whether a string becomes one user message; "auto": if there is a template. A list of messages is
            always rendered with the template.
        media: the images and videos to read; None reads none.
        vocab_size: the number of the model's tokens; a tokenizer may have more.
    """
    if not records or chat_template not in get_args(ChatTemplateUse):
        raise _cannot_build(records, chat_template)
    renderer: Any = media.processor.processor if media and media.processor else tokenizer
    renders = chat_template == "always" or (chat_template == "auto" and bool(renderer.chat_template))

    def build(index: int, located: LocatedRecord) -> Prompt:
        record, where = located
        field, value = _find_prompt(record, where, prompt_field)
        user = [{"role": "user", "content": value}]
        messages = user if isinstance(value, str) else _require_messages(value, where, field, renderer is not tokenizer)
        text = _render(renderer, media, messages, record, where, field) if renders or messages is not user else value
        if len(text) > _MANY_CHARACTERS:
            _refuse_too_long(text, where, max_prompt_tokens, tokenizer)
        token_ids = tokenize(text, tokenizer, where, is_raw=text is value)
        if not token_ids or max(token_ids) >= vocab_size:
            raise unknown_tokens(token_ids, tokenizer, vocab_size, f"{where}: {field!r}")
        prompt = Prompt(
            index=index,
            text=text,
            token_ids=tuple(token_ids),
            messages=tuple(messages),
            answer=inner_value(record, answer_field) if "." in answer_field else record.get(answer_field),
            fields={name: other for name, other in record.items() if name not in (field, answer_field)},
        )
        if media is not None and (media.processor or {media.image_field, media.video_field} & record.keys()):
            prompt = with_media(prompt, record, field, where, media)
        if prompt.num_tokens > max_prompt_tokens:
            raise _too_long(prompt, where, max_prompt_tokens)
        return prompt

    return make_each(records, build) if isinstance(records, Streamed) else [build(*item) for item in enumerate(records)]


def _cannot_build(records: Sequence[LocatedRecord] | None, chat_template: str) -> ValueError:
    if records is None:
        return ValueError("with_tools() of the workflow returned None. It must return the records.")
    if not records:
        return ValueError("There are no records to build prompts from: the data set is empty.")
    return ValueError(f"chat_template is {chat_template!r}: choose one of {', '.join(get_args(ChatTemplateUse))}.")


def require_field(records: Sequence[LocatedRecord], field: str, option: str) -> None:
    """Raises ValueError if no record has the field that an option names."""
    if all(inner_value(record, field) is None for record, _ in records):
        found = ", ".join(field_names(*(record for record, _ in records)))
        raise ValueError(f"No record has the field {field!r} ({option}). They have {found}.")


class PromptTooLongError(ValueError):
    """Raised for a prompt that leaves no room for a response; the message names its file and line."""


def build_fitting_prompts(
    records: Sequence[LocatedRecord], tokenizer: PreTrainedTokenizerBase, **settings: Any
) -> Sequence[Prompt]:
    """Builds prompts as build_prompts() does, but leaves out records that are too long, and reports their number."""
    fitting = [index for index, located in enumerate(records) if _fits(located, tokenizer, settings)]
    if not fitting:
        raise ValueError(f"All {len(records)} prompts are too long: none is left. Use a model with a longer context.")
    if len(fitting) < len(records) and os.environ.get("RANK", "0") == "0":
        logger.warning(
            "%s of %s prompts are too long and left out, such as that of %s.",
            *(len(records) - len(fitting), len(records)),
            records[next(index for index, kept in enumerate([*fitting, -1]) if index != kept)][1],
        )
    return build_prompts(select(records, fitting), tokenizer, **settings)


def _fits(located: LocatedRecord, tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any]) -> bool:
    try:
        build_prompts([located], tokenizer, **settings)
    except PromptTooLongError:
        return False
    return True


def _too_long(prompt: Prompt, where: str, max_prompt_tokens: int) -> PromptTooLongError:
    return PromptTooLongError(
        f"{where}: the prompt has {prompt.num_tokens} tokens, and there is room for {max_prompt_tokens}. "
        "Shorten it, lower --max_new_tokens, use a model with a longer context, or leave such lines out by "
        "--data.too_long skip."
    )


def _find_prompt(record: Record, where: str, prompt_field: str) -> tuple[str, Any]:
    # In columnar formats every record has every field, with None where it was left out.
    field = prompt_field if record.get(prompt_field) is not None else "messages"
    value = record.get(field)
    if value is None or (isinstance(value, str) and not value.strip()):
        raise _no_prompt(record, where, prompt_field, field)
    return field, value


def _no_prompt(record: Record, where: str, prompt_field: str, found: str) -> ValueError:
    if record.get(found) is not None:
        return ValueError(f"{where}: {found!r} is empty. It must hold text.")
    return ValueError(
        f"{where}: the record has neither {prompt_field!r} nor 'messages', only {field_names(record)}. Name the field "
        "that holds the prompt by --data.prompt_field."
    )


def _render(
    renderer: Any, media: MediaFields | None, messages: list[Record], record: Record, where: str, field: str
) -> str:
    """Renders messages with the chat template of a tokenizer, or of a vision-language model's processor."""
    if not renderer.chat_template:
        raise ValueError(
            f"{where}: {field!r} is to be rendered by a chat template, and the tokenizer has none. Use a model that "
            "has one, or give the prompt as a string with --data.chat_template never."
        )
    if media is not None and media.processor:
        messages = media.in_parts(messages, record, field)
    try:
        text = render(renderer, messages, tools_of(record, where), add_generation_prompt=True)
    except Exception as error:  # a template raises what it likes, for roles that do not alternate for example
        raise ValueError(f"{where}: the tokenizer's chat template refuses {field!r}: {error}") from error
    warn_of_lost_messages(messages, text, where)
    return text


def tokenize(text: str, tokenizer: PreTrainedTokenizerBase, where: str, *, is_raw: bool) -> list[int]:
    """Returns the token ids of a text; raises ValueError for a text that the tokenizer has no tokens for."""
    try:
        return tokenize_raw(text, tokenizer) if is_raw else list(tokenizer(text, add_special_tokens=False)["input_ids"])
    except Exception as error:  # tokenizers raises nothing more specific
        raise _unreadable(text, tokenizer, where, error) from None


def unknown_tokens(
    token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, vocab_size: int, where: str
) -> ValueError:
    """Returns the error about a text without tokens, or with one that the tokenizer has and the model has not."""
    if not token_ids:
        return ValueError(f"{where} has no tokens. It must hold text that the tokenizer knows.")
    token = max(token_ids)
    return ValueError(
        f"{where} has the token {tokenizer.convert_ids_to_tokens(token)!r} of id {token}, and the model's ids end at "
        f"{vocab_size - 1} (vocab_size in its config.json). Use the tokenizer that belongs to the model, enlarge the "
        "model with resize_token_embeddings(), or change the text."
    )


def _unreadable(text: str, tokenizer: PreTrainedTokenizerBase, where: str, error: Exception) -> ValueError:
    known = tokenizer.get_vocab()
    hint = f"; it knows only {' '.join(sorted(known))}" if len(known) <= _MOST_TOKENS_SHOWN else ""
    return ValueError(f"{where}: the tokenizer cannot read the text {shorten(text)!r} ({error}{hint}).")


def shorten(text: str) -> str:
    """Shortens a long text for an error message."""
    return text if len(text) <= 80 else f"{text[:80]}..."


def _refuse_too_long(text: str, where: str, max_prompt_tokens: int, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError for a text that is too long whatever its tokens; finding these would take minutes."""
    longest = max(map(len, tokenizer.get_vocab()), default=1)
    if len(text) > max(max_prompt_tokens, 0) * longest:
        raise PromptTooLongError(
            f"{where}: the prompt has {len(text):,} characters, and there is room for {max_prompt_tokens} tokens. "
            "Shorten it, use a model with a longer context, or leave such lines out by --data.too_long skip."
        )


def tokenize_raw(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokenises a text that no chat template rendered, so that the model can continue it."""
    has_bos = bool(tokenizer.bos_token) and text.startswith(str(tokenizer.bos_token))
    token_ids = list(tokenizer(text, add_special_tokens=not has_bos)["input_ids"])
    # If the tokenizer ended the text with EOS, the model would have to answer after the end.
    adds_eos = bool(tokenizer.eos_token) and not text.endswith(str(tokenizer.eos_token))
    if adds_eos and token_ids and token_ids[-1] == tokenizer.eos_token_id:
        token_ids.pop()
    return token_ids


def _require_messages(value: Any, where: str, field: str, takes_parts: bool) -> list[Record]:
    """Returns the messages of a prompt without their null fields, which columnar formats add."""
    if not isinstance(value, list):
        raise ValueError(
            f"{where}: {field!r} is of type {type(value).__name__}. It must be a string, or a list of messages, "
            'each {"role": ..., "content": ...}.'
        )
    if not value:
        raise ValueError(f"{where}: {field!r} is an empty list. It must hold at least one message.")
    messages = [
        require_message(message, f"{where}: {field}[{index}]", takes_parts) for index, message in enumerate(value)
    ]
    if messages[-1]["role"] == "assistant":
        raise ValueError(
            f"{where}: the last message is the assistant's, so there is nothing left to answer. Leave it out, and give "
            "its text as the answer. To have the policy continue it, give the prompt as the text that "
            "tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True) returns, with "
            "--data.chat_template never."
        )
    return messages


def require_message(message: Any, where: str, takes_parts: bool) -> Record:
    """Returns a message whose content is a string or, for a vision-language model, perhaps a list of parts."""
    if isinstance(message, dict) and isinstance(message.get("role"), str):
        given = with_readable_calls({key: value for key, value in message.items() if value is not None})
        content = given.get("content", "" if given.get("tool_calls") else None)  # a turn may only call tools
        if isinstance(content, str):
            return {**given, "content": content}
        if isinstance(content, list):
            parts = [_require_part(part, where) for part in content]
            return {**given, "content": parts if takes_parts else _joined(parts, where)}
    raise ValueError(f'{where} is {message!r}. A message must be {{"role": string, "content": string}}.')


def _joined(parts: Sequence[Record], where: str) -> str:
    """Returns the text of a message whose content must be a string in the end."""
    if any(part["type"] != "text" for part in parts):
        raise ValueError(f"{where} has an image or a video in its content, where only text is taken.")
    return "".join(part["text"] for part in parts)


def _require_part(part: Any, where: str) -> Record:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("image", "video", "image_url", "video_url"):
        return {"type": kind.removesuffix("_url")}  # with_media() finds the file to show
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    raise ValueError(
        f'{where}: the part {part!r} must be {{"type": "text", "text": string}}, {{"type": "image"}} or '
        '{"type": "video"}.'
    )
