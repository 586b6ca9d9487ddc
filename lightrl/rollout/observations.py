"""What environments, users and tools show: finds the images in it, and keeps them with the tokens that stand for them.

An engine takes one placeholder for each image, and a trainer the tokens that the image becomes. SeenIds are the former,
with the images; token_counts() leads to the latter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightrl.data.held_images import image_content
from lightrl.data.media import image_size, read_image
from lightrl.data.media_fields import held_by_parts
from lightrl.data.prompts import require_message
from lightrl.models.multimodal import FAMILIES, MediaProcessor

Message = Mapping[str, Any]
_MEDIA = ("image", "image_url", "video", "video_url")  # types of parts


@dataclass(frozen=True, slots=True)
class SeenImage:
    """An image that an episode has seen in addition to those of its prompt."""

    content: bytes = field(repr=False)  # of an image file
    picture: Any = field(repr=False, compare=False)  # the same as a PIL image
    token_id: int  # its placeholder
    num_tokens: int  # that it becomes in the model


class ReadImage(bytes):
    """The content of an image file, with the picture that has been read from it."""

    picture: Any

    def __new__(cls, content: bytes) -> ReadImage:
        """Reads the picture; raises MediaError if that fails."""
        made = super().__new__(cls, content)
        made.picture = read_image(content)
        return made


class SeenIds(tuple[int, ...]):
    """Ids of tokens with one placeholder for each image, and the images."""

    images: tuple[SeenImage, ...]

    def __new__(cls, ids: Iterable[int], images: Iterable[SeenImage] = ()) -> SeenIds:
        """Takes the images in the order of their placeholders."""
        made = super().__new__(cls, ids)
        made.images = tuple(images)
        return made


class Shown(NamedTuple):
    """Messages for a chat template, with places where images are."""

    messages: Sequence[Message]
    images: Sequence[SeenImage]
    renderer: Any  # has the chat template

    def placed(self, ids: Sequence[int]) -> Sequence[int]:
        """Returns the ids of the rendered messages with the images; raises ValueError unless each has its place."""
        if not self.images:
            return ids
        count = sum(token == self.images[0].token_id for token in ids)
        if count != len(self.images):
            raise ValueError(
                f"The chat template gives {count} places to the {len(self.images)} image(s) of messages of the roles "
                f"{', '.join(message['role'] for message in self.messages)}. Give one by --data.chat_template_file "
                "that has a place for each image, and let no text contain the token of one."
            )
        return SeenIds(ids, self.images)


def images_of(ids: Sequence[int]) -> tuple[SeenImage, ...]:
    """Returns the images that come with ids; plain ids have none."""
    return ids.images if isinstance(ids, SeenIds) else ()


def joined(*parts: Sequence[int]) -> SeenIds:
    """Returns the parts as one, with the images of all."""
    ids = (token for part in parts for token in part)
    return SeenIds(ids, (image for part in parts for image in images_of(part)))


def rest(ids: Sequence[int], num_ids: int, num_images: int) -> SeenIds:
    """Returns the ids after the first num_ids, with the images after the first num_images."""
    return SeenIds(ids[num_ids:], images_of(ids)[num_images:])


def num_tokens(ids: Sequence[int]) -> int:
    """Returns how many tokens the ids become in the model."""
    return len(ids) + sum(image.num_tokens - 1 for image in images_of(ids))


def require_images(num_places: int, num_images: int) -> None:
    """Raises ValueError for tokens that have places of images without the images."""
    if num_places != num_images:
        raise ValueError(
            f"The episode has {num_places} places of images and {num_images} images. A list of tokens has no images: "
            "give generate() and room() the ids of the episode, and hear() and room() the result of "
            "engine.encode_messages(), each as it is, as in room(episode.ids, heard). Tensors cannot have images."
        )


def token_counts(ids: Sequence[int], images: Sequence[SeenImage]) -> list[int]:
    """Returns for each id how many tokens it becomes in the model."""
    following = iter(images)
    placeholder = images[0].token_id if images else None
    return [next(following).num_tokens if token == placeholder else 1 for token in ids]


def shown_in(messages: Sequence[Message], tokenizer: Any, media: MediaProcessor | None) -> Shown:
    """Reads the images of messages; raises ValueError if there are some and the model takes none."""
    if not any(map(_has_media, messages)):
        return Shown(messages, (), tokenizer)
    if media is None:
        raise ValueError(
            f"An observation shows an image, and the model takes none. Use a vision-language model "
            f"({', '.join(FAMILIES)}), or let tools and environments answer with text."
        )
    plain = [require_message(dict(message), "An observation", takes_parts=True) for message in messages]
    kinds = [part["type"] for message in plain if isinstance(message["content"], list) for part in message["content"]]
    held = list(held_by_parts(list(messages), "image"))
    if "video" in kinds or len(held) != kinds.count("image"):
        raise ValueError(
            "An observation has a part for a video, or for an image without the image: it must be text and images, "
            'each {"type": "image", "image": a PIL image, a path or a data URL}.'
        )
    if not media.processor.chat_template:
        raise ValueError("An observation shows an image, which needs the place that a chat template gives it.")
    return Shown(plain, [_seen(image_content(image), media) for image in held], media.processor)


def _seen(content: bytes, media: MediaProcessor) -> SeenImage:
    picture = content.picture if isinstance(content, ReadImage) else read_image(content)
    count = len(media.expanded([media.image_token_id], [(picture.height, picture.width)], ()))
    return SeenImage(bytes(content), picture, media.image_token_id, count)


def _has_media(message: Message) -> bool:
    content = message.get("content")
    parts = content if isinstance(content, list) else ()
    return any(isinstance(part, Mapping) and part.get("type") in _MEDIA for part in parts)


def as_tensor(content: bytes) -> Tensor:
    """Returns the content of an image file as bytes in a tensor, which checkpoints and records can hold."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def as_content(tensor: Tensor) -> bytes:
    """Returns the content of the image file that as_tensor() took."""
    return tensor.numpy().tobytes()


def parts_of(observation: Any) -> list[Message] | None:
    """Returns the parts of an image, of a list of images, texts and parts, or of a message; None for anything else.

    An image is one of PIL, or an array of numpy, [height, width, 3] uint8.
    """
    content = observation
    if isinstance(observation, Mapping):  # a part by itself may be any record, unless it holds an image
        content = [observation] if _is_image(observation.get("image")) else observation.get("content")
    given = [content] if _is_image(content) else content
    if not isinstance(given, list) or all(isinstance(item, str) for item in given):
        return None
    parts = [part for part in map(_part_of, given) if part is not None]
    return parts if len(parts) == len(given) else None


def _part_of(item: Any) -> Message | None:
    if _is_image(item):
        return {"type": "image", "image": _as_pil(item)}
    if isinstance(item, str):
        return {"type": "text", "text": item}
    if not isinstance(item, Mapping) or "role" in item:
        return None
    if item.get("type") == "image" and _is_image(item.get("image")):
        return {**item, "image": _as_pil(item["image"])}
    is_text = item.get("type") == "text" and isinstance(item.get("text"), str)
    return item if is_text or item.get("type") in _MEDIA else None


def _is_image(item: Any) -> bool:
    if isinstance(item, np.ndarray):
        return item.dtype == np.uint8 and item.ndim == 3 and item.shape[2] == 3 and item.size > 0
    return hasattr(item, "getexif")  # of PIL, which is optional


def _as_pil(image: Any) -> Any:
    if not isinstance(image, np.ndarray):
        return image
    from PIL import Image  # noqa: PLC0415  (optional)

    return Image.fromarray(image)


def content_of(parts: list[Message]) -> list[Message] | str:
    """Returns parts as the content of a message: their text if all of them are text, which any chat template takes."""
    texts = [part["text"] for part in parts if part["type"] == "text"]
    return "".join(texts) if len(texts) == len(parts) else parts


def checked_part(part: Message) -> Message:
    """Returns a part that shows an image with the content of its file; raises ValueError if that cannot be read."""
    held = list(held_by_parts([{"content": [part]}], "image"))
    if not held:
        raise ValueError(
            f"a part of the type {part['type']!r} without an image: a tool answers with text and images, each "
            '{"type": "image", "image": a PIL image, a path or a data URL}'
        )
    content = image_content(held[0])
    read_image(content)
    return {"type": "image", "image": content}


def is_data(part: Message) -> bool:
    """Returns whether a record that has the type of a part is a tool's own data, such as a file that it has found.

    A part holds its image, or names its file under `image` or `image_url` and has no further field.
    """
    if part["type"] == "text" or part.keys() <= {"type", *_MEDIA}:
        return False
    held = next(held_by_parts([{"content": [part]}], "image"), None)
    if isinstance(held, Mapping):
        return not held.get("bytes")
    is_url = isinstance(held, str) and held.startswith("data:image/")
    return not (is_url or isinstance(held, bytes) or _is_image(held))


def refused_image(parts: Iterable[Message], media: MediaProcessor) -> str:
    """Returns why the model cannot take an image of checked parts; empty if it takes all of them."""
    for content in (part["image"] for part in parts if part["type"] == "image"):
        try:
            media.expanded([media.image_token_id], [image_size(content)], ())
        except ValueError as error:
            return f"the model cannot take the image: {error}"
    return ""


def as_messages(observation: Any) -> Sequence[Message] | None:
    """Returns an observation as messages; None unless it is a text, an image, parts, or one or several messages."""
    if isinstance(observation, Mapping) and "content" in observation:
        return _messages([{"role": "user", **observation}])
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    if (parts := parts_of(observation)) is not None:
        return [{"role": "user", "content": content_of(parts)}]
    return _messages(observation) if isinstance(observation, list) else None


def _messages(given: Sequence[Any]) -> list[Message] | None:
    """Returns messages whose contents are texts or parts, also for bare images; None for anything else."""
    made: list[Message] = []
    for message in given:
        content = message.get("content") if isinstance(message, Mapping) else None
        parts = parts_of(content)
        if parts is None and not isinstance(content, str):
            return None
        made.append(message if parts is None else {**message, "content": content_of(parts)})
    return made
