"""Images and videos in the forms of other trainers: nested or flat lists, paths, arrays, lists of frames.

lightrl's own trainers read the files of a data set, and never run this code.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from lightrl.data.media import MediaError, in_rgb, read_image, read_video

_FRAME_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp")


def build_multimodal_inputs(
    prompts: Sequence[Any],
    images: Sequence[Any] | None,
    images_num: Sequence[int] | None,
    videos: Sequence[Any] | None,
    videos_num: Sequence[int] | None,
) -> list[dict[str, Any]]:
    """Returns a dict per prompt: "prompt" (a text or token ids), and "multi_modal_data" if it has images or videos."""
    image_lists = _per_prompt(prompts, images, images_num, "image")
    video_lists = _per_prompt(prompts, videos, videos_num, "video")
    inputs = []
    for prompt, own_images, own_videos in zip(prompts, image_lists, video_lists, strict=True):
        media = {name: items for name, items in (("image", own_images), ("video", own_videos)) if items}
        inputs.append({"prompt": prompt, "multi_modal_data": media} if media else {"prompt": prompt})
    return inputs


def _per_prompt(
    prompts: Sequence[Any], items: Sequence[Any] | None, counts: Sequence[int] | None, kind: str
) -> list[list[Any]]:
    """Returns nested lists unchanged and cuts flat ones by the counts; without counts, each prompt has one item."""
    if items is None:
        return [[] for _ in prompts]
    if counts is not None and len(counts) != len(prompts):
        raise ValueError(f"{len(counts)} {kind} counts for {len(prompts)} prompts.")
    is_nested = any(_is_list_of_items(item, kind) for item in items)
    if is_nested or (counts is None and len(items) == len(prompts)):
        nested = [list(item) if _is_list_of_items(item, kind) else [] if item is None else [item] for item in items]
        if len(nested) != len(prompts):
            raise ValueError(f"{len(nested)} lists of {kind}s for {len(prompts)} prompts.")
        for index, own in enumerate(nested):
            if counts is not None and counts[index] != len(own):
                raise ValueError(f"prompt {index} has {len(own)} {kind}s, but its count says {counts[index]}.")
        return nested
    if counts is None:
        raise ValueError(f"{len(items)} {kind}s for {len(prompts)} prompts: say how many each has in {kind}s_num.")
    if sum(counts) != len(items):
        raise ValueError(f"{len(items)} {kind}s, but the counts {list(counts)} add up to {sum(counts)}.")
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    return [list(items[end - count : end]) for end, count in zip(ends, counts, strict=True)]


def _is_list_of_items(item: Any, kind: str) -> bool:
    """Returns whether this is a prompt's list of items; a list of frames is one video."""
    return isinstance(item, list | tuple) and not (kind == "video" and _is_list_of_frames(item))


def _is_list_of_frames(item: Any) -> bool:
    return isinstance(item, list | tuple) and bool(item) and all(map(_is_frame, item))


def _is_frame(item: Any) -> bool:
    if isinstance(item, str | Path):
        return Path(item).suffix.lower() in _FRAME_SUFFIXES
    if isinstance(item, np.ndarray | Tensor):
        return item.ndim in (2, 3)
    return hasattr(item, "convert") and hasattr(item, "size")  # a PIL image


def as_images(given: Any) -> tuple[Any, ...]:
    """Returns PIL images for one image or several: paths, data URLs, bytes, arrays, tensors or PIL images."""
    if given is None:
        return ()
    return tuple(map(as_image, given)) if isinstance(given, list | tuple) else (as_image(given),)


def as_videos(given: Any) -> tuple[Any, ...]:
    """Returns uint8 arrays [frames, height, width, 3] for one video or several: paths, arrays or lists of frames."""
    if given is None:
        return ()
    several = isinstance(given, list | tuple) and not _is_list_of_frames(given)
    return tuple(map(as_video, given)) if several else (as_video(given),)


def as_image(given: Any) -> Any:
    """Returns a PIL image."""
    if isinstance(given, str | Path):
        return _image_at(str(given))
    if isinstance(given, bytes):
        return _image_of_bytes(given)
    if isinstance(given, np.ndarray | Tensor):
        from PIL import Image  # noqa: PLC0415  (optional)

        return in_rgb(Image.fromarray(_pixels(given)))
    return in_rgb(given) if hasattr(given, "getexif") else given


def as_video(given: Any) -> Any:
    """Returns a uint8 array [frames, height, width, 3]."""
    if isinstance(given, str | Path):
        return read_video(str(given).removeprefix("file://"))
    if _is_list_of_frames(given):
        return np.stack([np.asarray(as_image(frame).convert("RGB")) for frame in given])
    if isinstance(given, np.ndarray | Tensor) and given.ndim == 4:
        return np.stack([_pixels(frame) for frame in given])
    shape = list(given.shape) if hasattr(given, "shape") else type(given).__name__
    raise MediaError(f"a video is {shape}: give a path, an array [frames, height, width, 3], or a list of frames")


def _image_at(path: str) -> Any:
    if path.startswith("data:"):
        return _image_of_bytes(base64.b64decode(path.partition(",")[2]))
    if path.startswith(("http://", "https://")):
        raise MediaError(f"the image {path[:100]} is not on this machine: download it first, and give its path")
    return read_image(path.removeprefix("file://"))


def _image_of_bytes(content: bytes) -> Any:
    from PIL import Image  # noqa: PLC0415  (optional)

    try:
        return in_rgb(Image.open(io.BytesIO(content)))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise MediaError(f"an image of {len(content)} bytes cannot be read ({error})") from error


def _pixels(given: Any) -> Any:
    """Returns uint8 [height, width, 3] (or [height, width]) for an array that may have its channels first."""
    array = given.cpu().numpy() if isinstance(given, Tensor) else given
    if array.ndim == 3 and array.shape[2] != 3 and array.shape[0] == 3:
        array = array.transpose(1, 2, 0)
    is_image = array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 3)
    if array.dtype != np.uint8 or not is_image:
        raise MediaError(
            f"an image is an array of {array.dtype} and shape {list(array.shape)}: it must be uint8 of [height, width, "
            "3], [3, height, width] or [height, width]"
        )
    return np.ascontiguousarray(array)
