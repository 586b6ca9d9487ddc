"""Writes the images that a data set itself holds to files, because prompts name their images by path.

A file is named by its content, in the folder `images` of $LIGHTRL_CACHE (~/.cache/lightrl): other ranks, later runs and
prompts with the same image find it there.
"""

from __future__ import annotations

import base64
import hashlib
import re
import reprlib
import secrets
from collections.abc import Mapping
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

from lightrl.builtin.task import cache_folder
from lightrl.data.media import MediaError, in_rgb, require_file

_DATA_URL = re.compile(r"data:image/[^,]*;base64,", re.IGNORECASE)
_MOST_SHOWN = 40  # characters of an image that cannot be read


def as_files(images: Any) -> Any:
    """Returns an image or a list of images, with the path of its file in place of each that is held.

    Held are the bytes of a file, {"bytes": ..., "path": ...} as in the columns of `datasets` and in Parquet files, both
    also in base64 as in JSON, data URLs, and PIL images. Anything else is returned as it is.
    """
    return [_as_file(image) for image in images] if isinstance(images, list | tuple) else _as_file(images)


def _as_file(image: Any) -> Any:
    content = held_content(image)
    return str(_written(content)) if isinstance(content, bytes) else content


def held_content(image: Any) -> Any:
    """Returns the content of the file of an image that is held; the path of one that is not; else what was given."""
    if isinstance(image, Mapping) and image and image.keys() <= {"bytes", "path"}:
        given = image.get("bytes")  # None or empty beside a path
        image = (_decoded(given) if isinstance(given, str) else given) if given else image.get("path")
    if isinstance(image, str) and _DATA_URL.match(image):
        image = _decoded(image.partition(",")[2])
    return _png(image) if hasattr(image, "getexif") else image


def image_content(image: Any) -> bytes:
    """Returns the content of an image's file, for an image in any form that as_files() takes, or its path."""
    try:
        held = held_content(image)
    except ValueError as error:
        raise MediaError(f"an observation {error}") from error
    if isinstance(held, str):
        require_file(held, "image")
        return Path(held).read_bytes()
    if not isinstance(held, bytes):
        raise MediaError(f"an image is {reprlib.repr(image)}: it must be a PIL image, a path or a data URL")
    return held


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except ValueError as error:
        raise ValueError(f"holds an image that is no base64 ({error}): {text[:_MOST_SHOWN]!r}") from error


def _png(image: Any) -> bytes:
    content = BytesIO()
    whole = image if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA") else in_rgb(image)
    whole.save(content, "PNG", exif=image.getexif())
    return content.getvalue()


def _written(content: bytes) -> Path:
    path = cache_folder().absolute() / "images" / hashlib.sha256(content).hexdigest()  # other paths are the data's
    if not path.is_file():
        # Ranks that write the same file do not disturb each other. Those of two nodes may have one process number.
        unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_bytes(content)
            unfinished.replace(path)
        except OSError as error:
            with suppress(OSError):
                unfinished.unlink()
            raise ValueError(
                f"holds an image, which cannot be written to {path.parent} ({error}). Set LIGHTRL_CACHE to a folder "
                "with room for the images of the data set"
            ) from error
    return path
