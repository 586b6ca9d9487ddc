"""Reads images and videos from disk: their sizes at the start of a run, and their pixels when a prompt is used."""

from __future__ import annotations

import re
import reprlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from lightrl.models.multimodal import MediaProcessor
from lightrl.records import EncodedPrompt, Prompt, Sample

_VIDEO_SUFFIXES = (".npy", ".gif", ".webp")
_TRANSPOSED = (5, 6, 7, 8)  # EXIF orientations that swap height and width
_ORIENTATION_TAG = 0x0112
_TRANSPARENT = ("RGBA", "LA", "PA", "RGBa", "La")  # modes of Pillow
_MOST_SHOWN = 500  # characters of a path that is no file
_KEPT_BYTES = 512 << 20  # of encoded prompts


class MediaError(ValueError):
    """Raised for a file that is missing or unreadable; the message names it."""


def media_folder(where: str) -> Path:
    """Returns the folder to which relative paths in a record refer: that of its file, which `where` names."""
    path = Path(where.rpartition(":")[0])
    return path if path.is_dir() else path.parent if path.is_file() else Path()


def image_size(file: str | bytes) -> tuple[int, int]:
    """Returns the height and the width of an image; reads only the file's header, except of TIFF files."""
    with _opened(file, "image") as image:
        if image.format == "TIFF":
            image.load()  # versions of Pillow differ in whether they swap the size before they read the pixels
        width, height = image.size
        is_transposed = _header_exif(image).get(_ORIENTATION_TAG) in _TRANSPOSED
    return (width, height) if is_transposed else (height, width)


def video_size(path: str) -> tuple[int, int, int]:
    """Returns the number of frames, the height and the width of a video."""
    if Path(path).suffix == ".npy":
        frames, height, width, _ = _mapped_frames(path).shape
        return frames, height, width
    _require_video_suffix(path)
    with _opened(path, "video") as video:
        width, height = video.size
        return int(getattr(video, "n_frames", 1)), height, width


def read_image(file: str | bytes) -> Any:
    """Reads a PIL image in RGB, rotated as its EXIF data say, from a path or from the content of a file."""
    from PIL import ImageOps  # noqa: PLC0415  (optional)

    with _opened(file, "image") as image:
        _header_exif(image)  # which Pillow keeps, so that image_size() and what follows agree
        return in_rgb(ImageOps.exif_transpose(image))


def in_rgb(image: Any) -> Any:
    """Returns a PIL image in RGB, on white where it is transparent, as servers of models show it.

    What stands behind transparent pixels is mostly black, and would hide black letters.
    """
    if image.mode.startswith("I;16"):
        image = _in_eight_bits(image)
    if image.mode in _TRANSPARENT or "transparency" in image.info:
        from PIL import Image  # noqa: PLC0415  (optional)

        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def _in_eight_bits(image: Any) -> Any:
    """Returns an image of 16-bit grey values in 8 bits. Pillow's own conversion would make all from 255 up white."""
    from PIL import Image  # noqa: PLC0415  (optional)

    values = np.asarray(image).astype(np.uint32)
    grey = Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8))
    if (transparent := image.info.get("transparency")) is not None:
        grey.putalpha(Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8)))
    return grey


def _header_exif(image: Any) -> Any:
    """Returns the EXIF data of an image that stand before its pixels.

    The method that a PNG has instead decodes all pixels, because EXIF data may follow them.
    """
    from PIL.Image import Image  # noqa: PLC0415  (optional)

    return Image.getexif(image)


def read_video(path: str) -> Any:
    """Reads a video as a uint8 array, [frames, height, width, 3]."""
    if Path(path).suffix == ".npy":
        return np.array(_mapped_frames(path))
    from PIL import ImageSequence  # noqa: PLC0415  (optional)

    _require_video_suffix(path)
    with _opened(path, "video") as video:
        return np.stack([np.asarray(in_rgb(frame)) for frame in ImageSequence.Iterator(video)])


def read_media(prompt: Prompt) -> tuple[list[Any], list[Any]]:
    """Reads the images and the videos of a prompt."""
    return [read_image(path) for path in prompt.images], [read_video(path) for path in prompt.videos]


class PromptEncoder:
    """Encodes prompts for the model, and keeps the most recent ones, because several passes use them."""

    def __init__(self, processor: MediaProcessor, kept_bytes: int = _KEPT_BYTES) -> None:
        self.processor = processor
        self._kept_bytes = kept_bytes
        self._kept: OrderedDict[tuple[object, ...], EncodedPrompt] = OrderedDict()
        self._num_bytes = 0

    def __call__(self, prompt: Prompt) -> EncodedPrompt:
        """Returns the encoded prompt; its files are read unless it is one of those that are kept."""

        def encode() -> EncodedPrompt:
            try:
                return self.processor.encode(prompt.token_ids, *read_media(prompt))
            except MediaError as error:
                raise MediaError(f"Prompt {prompt.index}: {error}.") from error

        return self._keep((prompt.token_ids, prompt.images, prompt.videos), encode)

    def episode(self, sample: Sample) -> EncodedPrompt:
        """Returns a sample whose episode has shown images of its own, encoded with its prompt and its response."""
        prompt, whole = sample.prompt, (*sample.prompt_ids, *sample.response_ids)
        before = self(prompt) if prompt.images or prompt.videos else None

        def encode() -> EncodedPrompt:
            try:
                return self.processor.encode_expanded(whole, [read_image(image) for image in sample.images], before)
            except ValueError as error:
                raise ValueError(f"Prompt {prompt.index}, sample {sample.sample_index}: {error}.") from error

        return self._keep((whole, prompt.images, prompt.videos, sample.images), encode)

    def is_apart(self, sample: Sample) -> bool:
        """Returns whether the sample's own images are all that it shows: it has begun with another prompt."""
        return self.processor.are_all_shown(
            (*sample.prompt_ids, *sample.response_ids), [read_image(image) for image in sample.images]
        )

    def _keep(self, key: tuple[object, ...], encode: Callable[[], EncodedPrompt]) -> EncodedPrompt:
        encoded = self._kept.pop(key, None)
        if encoded is None:
            encoded = encode()
            self._num_bytes += _num_bytes(encoded)
        self._kept[key] = encoded
        while self._num_bytes > self._kept_bytes and len(self._kept) > 1:
            self._num_bytes -= _num_bytes(self._kept.popitem(last=False)[1])
        return encoded


def _num_bytes(encoded: EncodedPrompt) -> int:
    tensors = (encoded.pixel_values, encoded.positions, encoded.feature_positions)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def require_file(path: str, kind: str) -> None:
    """Raises MediaError unless there is a file."""
    try:
        is_file = Path(path).is_file()
    except OSError:  # a name that is too long, as of base64
        is_file = False
    if not is_file:
        raise MediaError(f"there is no {kind} {path[:_MOST_SHOWN]}")


def _require_video_suffix(path: str) -> None:
    if Path(path).suffix not in _VIDEO_SUFFIXES:
        raise MediaError(f"the video {path} is of no known kind: it must be one of {', '.join(_VIDEO_SUFFIXES)}")


@contextmanager
def _opened(file: str | bytes, kind: str) -> Iterator[Any]:
    """Opens a PIL image, reading only its header at first; raises MediaError if PIL fails, here or later."""
    name = file if isinstance(file, str) else f"of {len(file)} bytes"
    try:
        from PIL import Image  # noqa: PLC0415  (optional)
    except ImportError as error:
        raise ImportError('Images need Pillow and torchvision: pip install "lightrl[vision]".') from error
    if isinstance(file, str):
        require_file(file, kind)
    try:
        with Image.open(file if isinstance(file, str) else BytesIO(file)) as image:
            yield image
    except Exception as error:  # PIL raises what it likes for a broken file, such as SyntaxError and struct.error
        raise MediaError(f"the {kind} {name} cannot be read ({error})") from error


def _mapped_frames(path: str) -> Any:
    """Maps the array of a .npy file without reading it. Pickled objects are refused because they could run code."""
    require_file(path, "video")
    try:
        frames = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise MediaError(f"the video {path} cannot be read ({error})") from error
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or not frames.shape[0]:
        raise MediaError(
            f"the video {path} is an array of {frames.dtype} and shape {list(frames.shape)}: it must be uint8 "
            "[frames, height, width, 3]"
        )
    return frames


def in_parts(message: dict[str, Any], kinds: Sequence[str]) -> dict[str, Any]:
    """Returns a message as parts, if its text names the places of images by <image> and of videos by <video>.

    A message that has images or videos as parts is left as it is.

    kinds: those to look for: a record without images may contain the word.
    """
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    marks = {f"<{kind}>": {"type": kind} for kind in kinds}
    texts = [part["text"] for part in parts if part["type"] == "text"]
    if len(texts) < len(parts) or not any(mark in text for mark in marks for text in texts):
        return message
    pieces = [piece for text in texts for piece in re.split("(" + "|".join(marks) + ")", text) if piece]
    return {**message, "content": [marks.get(piece) or {"type": "text", "text": piece} for piece in pieces]}


def absolute_paths(paths: Any, folder: Path) -> tuple[str, ...]:
    """Returns a path or a list of paths as absolute paths; raises ValueError for anything else."""
    listed: Sequence[Any] = [paths] if isinstance(paths, str) else paths
    if not isinstance(listed, list | tuple) or not all(isinstance(path, str) and path for path in listed):
        raise ValueError(f"is {reprlib.repr(paths)}: it must be a path or a list of paths")
    return tuple(str((folder / path).absolute()) for path in listed)
