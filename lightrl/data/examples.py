"""Builds Examples from records: renders and tokenises the answers of a data set, and masks what is not trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from lightrl.data.json_records import LocatedRecord, Record, field_names
from lightrl.data.media_fields import MediaFields, with_media
from lightrl.data.prompts import ChatTemplateUse, require_message, shorten, tokenize_raw
from lightrl.data.streamed import make_each, select
from lightrl.models.chat_text import (
    called_names,
    render,
    tools_of,
    warn_of_lost_answer,
    warn_of_lost_messages,
    warn_of_thoughts,
)
from lightrl.records import Answer, Example, Prompt, inner_value

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[Record]
# Of a message, for OpenAI, axolotl, ms-swift, verl and slime: 0 or false leaves it out.
_WEIGHTS = ("weight", "train", "training", "trainable", "loss", "loss_mask", "step_loss_mask")
_MAX_CHARACTERS = 5_000_000  # of an example; that is over a million tokens, which take minutes to compute


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleFields:
    """The fields of a record that hold the parts of an example."""

    prompt: str = "prompt"
    response: str = "response"
    chosen: str = "chosen"
    rejected: str = "rejected"
    margin: str = ""  # read no margins


class ExampleBuilder:
    """Turns records into examples for one tokenizer; the error for an unusable record names its file and line.

    Args:
        tokenizer: renders messages with its chat template.
        fields: the names of the fields.
        chat_template: whether a prompt that is a string becomes one user message; "auto": if the tokenizer has a
            template. Messages are always rendered with the template.
        train_on: "all" trains every assistant turn of a conversation, "last" only the last one.
        media: the images and videos to show with a prompt; None refuses those of the usual fields.
        is_scored: whether a conversation is to be scored instead. It then ends as its template writes it, which is what
            programs give a reward model: not always with an end token, and perhaps with a line break after it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        fields: ExampleFields,
        *,
        chat_template: ChatTemplateUse = "auto",
        train_on: Literal["all", "last"] = "all",
        is_scored: bool = False,
        media: MediaFields | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._media = media or MediaFields()
        self._renderer: Any = self._media.processor.processor if self._media.processor else tokenizer
        self._fields = fields
        self._train_on = train_on
        self._is_scored = is_scored
        self._renders_strings = chat_template == "always" or (
            chat_template == "auto" and bool(self._renderer.chat_template)
        )
        self._special_ids = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}

    # ---- Records -----------------------------------------------------------------------------------------------

    def responses(self, records: Sequence[LocatedRecord]) -> Sequence[Example]:
        """Returns an example for each record: the response to its prompt, or the assistant's turns in its messages."""
        return make_each(records, partial(_built, self._response))

    def pairs(self, records: Sequence[LocatedRecord]) -> Sequence[Example]:
        """Returns an example for each record: its chosen and its rejected answer."""
        return make_each(records, partial(_built, self._pair))

    def _response(self, index: int, located: LocatedRecord) -> Example:
        record, where = located
        return Example(index=index, where=where, answers=(self._only_answer(record, where),))

    def _only_answer(self, record: Record, where: str) -> Answer:
        fields = self._fields
        if record.get(fields.response) is not None:
            return self._answer(record, where, fields.response, self._train_on)
        if record.get("messages") is not None:
            messages = self._messages(record["messages"], where, "messages")
            return self._conversation(messages, record, "messages", where, self._train_on)
        raise ValueError(
            f"{where}: the record has neither {fields.response!r} nor 'messages', only {field_names(record)}. Name the "
            "field that holds the response by --data.response_field."
        )

    def _pair(self, index: int, located: LocatedRecord) -> Example:
        record, where = located
        fields = self._fields
        for option in ("chosen", "rejected"):
            if record.get(getattr(fields, option)) is None:
                raise ValueError(
                    f"{where}: the record has no {getattr(fields, option)!r}, only {field_names(record)}. Name the "
                    f"field by --data.{option}_field."
                )
        chosen = self._answer(record, where, fields.chosen, "last")
        rejected = self._answer(record, where, fields.rejected, "last")
        return Example(
            index=index,
            where=where,
            answers=(chosen, rejected),
            margin=_margin(inner_value(record, fields.margin), where),
        )

    def _answer(self, record: Record, where: str, field: str, train_on: Literal["all", "last"]) -> Answer:
        """Encodes a field that holds a string, the messages that follow the prompt, or a whole conversation."""
        value, prompt = record[field], record.get(self._fields.prompt)
        if isinstance(value, list):
            answer = self._messages(value, where, field)
            if answer[0]["role"] != "assistant":
                return self._conversation(answer, record, field, where, train_on)
        elif isinstance(value, str):
            if not value.strip():
                raise ValueError(f"{where}: {field!r} is empty: an answer must hold text.")
            answer = [{"role": "assistant", "content": value}]
        else:
            raise ValueError(f"{where}: {field!r} is of type {type(value).__name__}. It must be a string or messages.")
        if prompt is None:
            raise ValueError(
                f"{where}: {field!r} is an answer, and the record has no {self._fields.prompt!r}, only "
                f"{field_names(record)}. Name the field that holds the prompt by --data.prompt_field."
            )
        if isinstance(prompt, str) and not self._renders_strings and isinstance(value, str):
            plain = self._encode([prompt, value], where, lambda text: tokenize_raw(text, self._tokenizer))
            return self._shown(plain, record, self._fields.prompt, where)
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        messages = self._messages(prompt, where, self._fields.prompt) + answer
        return self._conversation(messages, record, self._fields.prompt, where, train_on)

    def _messages(self, value: Any, where: str, field: str) -> Messages:
        if not isinstance(value, list) or not value:
            raise ValueError(f'{where}: {field!r} must be a list of messages, each {{"role": ..., "content": ...}}.')
        return [self._message(message, f"{where}: {field}[{index}]") for index, message in enumerate(value)]

    def _message(self, given: Any, where: str) -> Record:
        """Returns a message; only those of others than the assistant may show images."""
        is_answer = isinstance(given, dict) and given.get("role") == "assistant"
        return require_message(given, where, takes_parts=self._media.processor is not None and not is_answer)

    def _shown(self, answer: Answer, record: Record, field: str, where: str) -> Answer:
        """Adds the images and videos of the record, which must all stand before the first trained token."""
        processor = self._media.processor
        if processor and not {processor.image_token_id, processor.video_token_id}.isdisjoint(answer.response_ids):
            raise ValueError(
                f"{where}: an image or a video stands after the first answer that is trained on, where none can be "
                "shown. Use --data.train_on last, or leave the answers before it out."
            )
        prompt = Prompt(index=0, text="", token_ids=answer.prompt_ids)
        prompt = with_media(prompt, record, field, where, self._media)
        return replace(answer, images=prompt.images, videos=prompt.videos, num_media_tokens=prompt.num_media_tokens)

    # ---- Text to tokens ----------------------------------------------------------------------------------------

    def _conversation(
        self, messages: Messages, record: Record, field: str, where: str, train_on: Literal["all", "last"]
    ) -> Answer:
        """Cuts the rendered text at the beginning and end of each trained turn; drops the text after the last turn."""
        if not self._renderer.chat_template:
            raise ValueError(
                f"{where}: messages are rendered by a chat template, and the tokenizer has none. Use a model that has "
                "one, or give prompt and response as strings."
            )
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise ValueError(f"{where}: no message is the assistant's, so there is nothing to learn.")
        if train_on == "all":
            turns = [turn for turn in turns if all(messages[turn].get(name) != 0 for name in _WEIGHTS)]
        if not turns:
            raise ValueError(f"{where}: every message of the assistant has the weight 0, so there is nothing to learn.")
        if not all(messages[turn]["content"].strip() or messages[turn].get("tool_calls") for turn in turns):
            raise ValueError(f"{where}: an answer is empty. It must hold text.")
        tools = tools_of(record, where)
        if self._media.processor:
            messages = self._media.in_parts(messages, record, field)
            _refuse_media_behind(messages[turns[-1] + 1 :], where)
        text = self._render(messages[: turns[-1] + 1], tools, where)
        warn_of_lost_messages(messages[: turns[-1]], text, where)
        parts: list[str] = []
        done = 0
        for turn in turns if train_on == "all" else turns[-1:]:
            before = self._render(messages[:turn], tools, where, add_generation_prompt=True)
            # What follows the end of the turn, such as a line break, comes from the template and not from the model.
            after = self._render(messages[: turn + 1], tools, where).rstrip()
            if not after.startswith(before):
                raise _begins_otherwise(turn, before.removeprefix(self._render(messages[:turn], tools, where)), where)
            if not text.startswith(after):
                after = self._without_second_end(after)
            if not text.startswith(after):
                raise ValueError(
                    f"{where}: the chat template renders the assistant's turn {turn} otherwise when more follows, so "
                    "the text to train on is unknown. Use --data.train_on last."
                )
            _require_calls(messages[turn], after[len(before) :], turn, where)
            warn_of_thoughts(messages[turn], after[len(before) :], where)
            warn_of_lost_answer(messages[turn], after[len(before) :], where)
            parts += [text[done : len(before)], after[len(before) :]]
            done = len(after)
        if self._is_scored:
            parts[-1] += text[done:]
        return self._shown(self._encode(parts, where, self._tokenize, has_end=self._is_scored), record, field, where)

    def _without_second_end(self, text: str) -> str:
        """Returns a text without the second end token that Phi's templates write after a whole conversation.

        The only end token of a last turn stays: gpt-oss's template ends that turn with another token than earlier ones.
        """
        shorter = text.removesuffix(self._tokenizer.eos_token or "").rstrip()
        return shorter if self._special_ids.intersection(self._tokenize(shorter)[-1:]) else text

    def _render(self, messages: Messages, tools: list[Record], where: str, **settings: Any) -> str:
        try:
            return render(self._renderer, messages, tools, **settings)
        except Exception as error:  # a template raises what it likes, for roles that do not alternate for example
            raise ValueError(f"{where}: the tokenizer's chat template refuses the messages: {error}") from error

    def _tokenize(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _encode(
        self, parts: list[str], where: str, tokenize: Callable[[str], list[int]], *, has_end: bool = False
    ) -> Answer:
        """Tokenises parts, every second of which is trained; adds an end token unless they have their end already."""
        if sum(map(len, parts)) > _MAX_CHARACTERS:
            raise _TooManyCharactersError(parts, where)
        try:
            pieces = self._tokens_of_parts(parts, tokenize, as_one=has_end)
        except Exception as error:  # tokenizers raises nothing more specific
            raise _no_tokens(parts, where, error) from error
        end = self._tokenizer.eos_token_id
        for turn, following in zip(pieces[1::2], pieces[2::2], strict=False):
            # In templates such as GLM's, the token that begins the next turn is the one that ends this one.
            if turn and turn[-1] not in self._special_ids and self._special_ids.intersection(following[:1]):
                turn.append(following.pop(0))
        if not has_end and end is not None and (not pieces[-1] or pieces[-1][-1] not in self._special_ids | {end}):
            pieces[-1].append(end)
        if not pieces[0]:
            raise ValueError(f"{where}: the prompt has no tokens, and a response needs something before it.")
        mask = [index % 2 == 0 for index, piece in enumerate(pieces[1:]) for _ in piece]
        return Answer(
            prompt_ids=tuple(pieces[0]),
            response_ids=tuple(token for piece in pieces[1:] for token in piece),
            loss_mask=tuple(mask),
        )

    def _tokens_of_parts(
        self, parts: list[str], tokenize: Callable[[str], list[int]], *, as_one: bool
    ) -> list[list[int]]:
        """Cuts the tokens of the whole text; if a token crosses a cut, tokenises each part alone, as a model would.

        as_one: keeps the tokens of the whole text in any case, as a reward model reads them.
        """
        whole = tokenize("".join(parts))
        pieces, text, done = [], "", 0
        for part in parts[:-1]:
            text += part
            so_far = tokenize(text)
            if whole[: len(so_far)] != so_far and not as_one:
                return [tokenize(parts[0]), *(self._tokenize(other) for other in parts[1:])]
            pieces.append(whole[done : len(so_far)])
            done = len(so_far)
        return [*pieces, whole[done:]]


def _refuse_media_behind(messages: Messages, where: str) -> None:
    """Raises ValueError if messages after the last answer, which are not read, show an image or a video."""
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    if any(part["type"] != "text" for part in parts):
        raise ValueError(
            f"{where}: an image or a video stands after the last answer, where nothing is trained. Leave it out."
        )


def _begins_otherwise(turn: int, generation_prompt: str, where: str) -> ValueError:
    return ValueError(
        f"{where}: the chat template does not begin the assistant's turn {turn} with its own generation prompt "
        f"{generation_prompt!r}, so the text to train on is unknown. Change the template, or give prompt and answer as "
        "strings with --data.chat_template never."
    )


def _require_calls(message: Record, rendered: str, turn: int, where: str) -> None:
    """Raises ValueError if the text of a turn lacks one of its tool calls: the model would learn to end there."""
    left_out = [name for name in called_names(message) if name not in rendered]
    if left_out:
        raise ValueError(
            f"{where}: the chat template leaves out the call of {left_out[0]!r} in the assistant's turn {turn}. Use a "
            "model whose template writes tool calls, or write them into the content."
        )


class _TooManyCharactersError(Exception):
    """The text of an example would take minutes to tokenise."""

    def __init__(self, parts: Sequence[str], where: str) -> None:
        super().__init__(
            f"{where}: prompt and answer have {sum(map(len, parts)):,} characters, and there is room for "
            f"{_MAX_CHARACTERS:,}. Shorten it, or leave such lines out by --data.too_long skip."
        )


def _built(build: Callable[[int, LocatedRecord], Example], index: int, located: LocatedRecord) -> Example:
    """Returns the example; one with too many characters has no answers, and keep_fitting() decides about it."""
    try:
        return build(index, located)
    except _TooManyCharactersError as error:
        return Example(index=index, where=located[1], answers=(), too_long=str(error))


def _no_tokens(parts: Sequence[str], where: str, error: Exception) -> ValueError:
    return ValueError(f"{where}: the tokenizer cannot read the text {shorten(''.join(parts))!r} ({error}).")


def keep_fitting(
    examples: Sequence[Example], *, max_tokens: int, too_long: Literal["error", "skip"]
) -> tuple[Sequence[Example], int]:
    """Returns the examples whose answers all have at most max_tokens, and the number of examples left out."""
    fitting = []
    for index, example in enumerate(examples):
        longest = max((answer.num_tokens for answer in example.answers), default=0)
        if not example.too_long and longest <= max_tokens:
            fitting.append(index)
        elif too_long == "error":
            raise ValueError(
                example.too_long
                or f"{example.where}: prompt and answer have {longest} tokens, and there is room for {max_tokens}. "
                "Shorten it, raise --data.max_tokens if the model's context allows, or leave such lines out by "
                "--data.too_long skip."
            )
    if examples and not fitting:
        raise ValueError(f"All {len(examples)} examples have more than {max_tokens} tokens: none is left.")
    kept = examples if len(fitting) == len(examples) else select(examples, fitting)
    return kept, len(examples) - len(fitting)


def _margin(value: Any, where: str) -> float:
    try:
        margin = 0.0 if value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        margin = math.nan
    if not math.isfinite(margin):
        raise ValueError(f"{where}: the margin is {value!r}. It must be a finite number.")
    return margin
