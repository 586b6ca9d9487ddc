"""Finds the images and videos that a record names, and adds their paths to its prompt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from lightrl.data.held_images import as_files
from lightrl.data.json_records import Record
from lightrl.data.media import absolute_paths, image_size, in_parts, media_folder, video_size
from lightrl.models.multimodal import FAMILIES, MediaProcessor
from lightrl.records import Prompt

Kind = Literal["image", "video"]
KINDS: tuple[Kind, Kind] = ("image", "video")
_NOTHING: tuple[object, ...] = (None, "", [])


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaFields:
    """The fields of a record that name images and videos, and the processor of the model that takes them."""

    image_field: str = "images"  # empty reads none
    video_field: str = "videos"
    processor: MediaProcessor | None = None  # None: the model takes no media, so media in the data are an error

    def named(self, record: Record, prompt_field: str, kind: Kind) -> tuple[str, Any]:
        """Returns the field in which a record names media of a kind, and its value; None as value if it names none.

        Many data sets have `image` for `images`, or the images in the parts of their messages: both are read where the
        field has its usual name and holds nothing.
        """
        field = self.image_field if kind == "image" else self.video_field
        if record.get(field) not in _NOTHING or field != f"{kind}s":
            return field, record.get(field) if field else None
        if record.get(kind) not in _NOTHING:
            return kind, record[kind]
        return prompt_field, list(held_by_parts(record[prompt_field], kind)) or None

    def in_parts(self, messages: list[Record], record: Record, prompt_field: str) -> list[Record]:
        """Returns messages as parts where their texts name the places of the record's images by <image>.

        Images in parts of messages have their places already.
        """
        found = {kind: self.named(record, prompt_field, kind) for kind in KINDS}
        kinds = [kind for kind, (field, files) in found.items() if files and field != prompt_field]
        return [message if message["role"] == "assistant" else in_parts(message, kinds) for message in messages]


def held_by_parts(messages: Any, kind: Kind) -> Iterator[Any]:
    """Yields what the parts of messages hold: `path`, `url`, one named as its kind, or the `image_url` of OpenAI."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if part["type"] in (kind, f"{kind}_url"):
                given = (part.get(name) for name in (kind, f"{kind}_url", "path", "url"))
                held = next((value for value in given if value not in _NOTHING), None)
                held = held["url"] if isinstance(held, dict) and "url" in held else held
                if held is not None:
                    yield held.removeprefix("file://") if isinstance(held, str) else held


def with_media(prompt: Prompt, record: Record, prompt_field: str, where: str, media: MediaFields) -> Prompt:
    """Adds the paths of the record's images and videos to its prompt, after reading the size of each."""
    if media.processor is None:
        _refuse_media(record, where, media)
        return prompt
    fields = dict(prompt.fields)
    paths: dict[Kind, tuple[str, ...]] = {}
    for kind in KINDS:
        name, named = media.named(record, prompt_field, kind)
        try:
            files = as_files(named) if kind == "image" else named
            paths[kind] = () if files is None else absolute_paths(files, media_folder(where))
        except ValueError as error:
            raise ValueError(f"{where}: {name!r} {error}.") from error
        if name in fields:
            # Instead of pixels, which would travel between ranks and, in its records, stay in a run's memory.
            fields[name] = record[name] = files
    try:
        sizes = [image_size(path) for path in paths["image"]], [video_size(path) for path in paths["video"]]
        expanded = media.processor.expanded(prompt.token_ids, *sizes)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    num_media_tokens = len(expanded) - len(prompt.token_ids)
    return replace(
        prompt, fields=fields, images=paths["image"], videos=paths["video"], num_media_tokens=num_media_tokens
    )


def _refuse_media(record: Record, where: str, media: MediaFields) -> None:
    for field, kind in ((media.image_field, "image"), (media.video_field, "video")):
        if record.get(field) not in _NOTHING:
            raise ValueError(
                f"{where}: {field!r} names {kind}s, and the model takes none. Use a vision-language model "
                f"({', '.join(FAMILIES)}), or give --data.{kind}_field another name."
            )
