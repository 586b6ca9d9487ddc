"""Images in the messages of a request: held by data URLs, compared by content, never fetched or read from a path."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightrl.data.held_images import held_content, image_content
from lightrl.data.media import MediaError
from lightrl.models.multimodal import FAMILIES
from lightrl.records import Prompt
from lightrl.rollout.client import EngineClient
from lightrl.rollout.endpoint.errors import RequestError
from lightrl.rollout.observations import ReadImage, images_of

_MOST_SHOWN = 80  # characters of a refused address
_KINDS = ("image", "image_url")  # types of parts
# PIL knows more formats, some of which run programs. The letters of WebP stand behind those of RIFF and a length.
_BEGINNINGS = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8")

Message = dict[str, Any]


def is_image(part: Any) -> bool:
    """Returns whether a part of a message stands for an image."""
    return isinstance(part, Mapping) and part.get("type") in _KINDS


def image_part(part: Mapping[str, Any], where: str) -> Message:
    """Returns a part with the content of the image's file; without it if the part names none.

    Raises RequestError for anything but a data URL of a PNG, JPEG, GIF or WebP file.
    """
    given = part.get("image_url", part.get("image"))
    url = given.get("url") if isinstance(given, Mapping) else given
    if part["type"] == "image" and all(value is None for name, value in part.items() if name != "type"):
        return {"type": "image"}
    if not isinstance(url, str):
        raise RequestError(
            f'{where} must be {{"type": "image_url", "image_url": {{"url": "data:image/png;base64,..."}}}}.',
            param=where,
        )
    try:
        content = held_content(url)
    except ValueError as error:
        raise RequestError(f"{where} {error}.", param=where) from error
    if not isinstance(content, bytes):
        raise RequestError(
            f"{where} has the address {url[:_MOST_SHOWN]!r}. The endpoint fetches no addresses and reads no files: "
            "send the image itself as a data URL, data:image/png;base64,...",
            param=where,
        )
    if not content.startswith(_BEGINNINGS) and (content[:4], content[8:12]) != (b"RIFF", b"WEBP"):
        raise RequestError(f"{where} is no PNG, JPEG, GIF or WebP file.", param=where)
    return {"type": "image", "image": content}


def with_images(messages: Sequence[Message], engine: EngineClient, task: Prompt | None) -> list[Message]:
    """Returns messages whose parts all hold their images; raises RequestError if the model takes none.

    Parts without an image, as in the messages of a data set, stand for the images of the task's prompt in their order.
    """
    parts = list(_image_parts(messages))
    if parts and not engine.placeholder_ids:
        raise RequestError(
            "The messages have an image, and this model takes only text. The run needs a vision-language model "
            f"({', '.join(FAMILIES)}).",
            param="messages",
        )
    own = [] if task is None else list(task.images)
    count = sum("image" not in part for part in parts)
    if count not in (0, len(own)):
        raise RequestError(
            f"The messages have {count} image part(s) without an image, and the prompt of the episode has {len(own)} "
            "image(s). Such parts stand for these, in order; send other images as data URLs.",
            param="messages",
        )
    following = iter(own if count else ())
    return [_filled(message, following) for message in messages]


async def with_pictures(messages: Sequence[Message]) -> Sequence[Message]:
    """Returns messages whose images have been read in a thread: a large one takes seconds, in which others are served.

    Raises RequestError for an image that cannot be read.
    """
    if not any(_image_parts(messages)):
        return messages
    try:
        return await asyncio.to_thread(lambda: [_read(message) for message in messages])
    except MediaError as error:
        raise RequestError(f"An image cannot be read: {error}.", param="messages") from error


def _read(message: Message) -> Message:
    if isinstance(message["content"], str):
        return message
    parts = [{**part, "image": ReadImage(part["image"])} if is_image(part) else part for part in message["content"]]
    return {**message, "content": parts}


def _filled(message: Message, following: Iterator[str]) -> Message:
    if isinstance(message["content"], str):
        return message
    bare = {"type": "image"}
    parts = [{**bare, "image": image_content(next(following))} if part == bare else part for part in message["content"]]
    return {**message, "content": parts}


def _image_parts(messages: Sequence[Message]) -> Iterator[Message]:
    for message in messages:
        yield from () if isinstance(message["content"], str) else filter(is_image, message["content"])


def in_words(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a message with digests in place of images: two messages with the same images have the same words."""
    content = message["content"]
    if isinstance(content, str):
        return message
    return {**message, "content": [{**part, "image": _digest(part.get("image", b""))} for part in content]}


def identity(ids: tuple[int, ...]) -> tuple[int | str, ...]:
    """Returns a key that identifies a prompt: its tokens, and a digest of each of its images."""
    return (*ids, *(_digest(image.content) for image in images_of(ids)))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
