"""Images and videos in every form in which programs hand them over."""

import base64
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lightrl.data.media import MediaError
from lightrl.strategy.serving.foreign_media import as_images, as_videos, build_multimodal_inputs

RED = np.zeros((2, 4, 3), np.uint8) + np.array([255, 0, 0], np.uint8)


def test_an_image_may_be_a_path_an_array_bytes_or_an_image(tmp_path: Path) -> None:
    image = Image.fromarray(RED)
    path = tmp_path / "red.png"
    image.save(path)
    url = "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    tensor = torch.from_numpy(RED).permute(2, 0, 1)  # channels first
    for given in (image, path, str(path), f"file://{path}", url, path.read_bytes(), RED, tensor):
        (made,) = as_images(given)
        assert np.array_equal(np.asarray(made), RED)
    assert as_images(None) == ()
    assert len(as_images([RED, str(path)])) == 2
    for wrong, text in (
        (RED.astype(np.float32), "an array of float32"),
        (np.zeros((2, 2, 4), np.uint8), "it must be uint8"),
        ("https://example.org/a.png", "is not on this machine"),
        (str(tmp_path / "none.png"), "there is no image"),
        (b"no image", "8 bytes cannot be read"),
    ):
        with pytest.raises(MediaError, match=text):
            as_images([wrong])


def test_a_video_may_be_a_path_an_array_or_a_list_of_frames(tmp_path: Path) -> None:
    frames = np.stack([RED, RED])
    np.save(tmp_path / "red.npy", frames)
    paths = []
    for index in range(2):
        paths.append(str(tmp_path / f"{index}.png"))
        Image.fromarray(RED).save(paths[-1])
    first = torch.from_numpy(frames).permute(0, 3, 1, 2)
    for given in (frames, first, str(tmp_path / "red.npy"), [Image.fromarray(RED)] * 2, [RED, RED], paths):
        (made,) = as_videos(given)
        assert np.array_equal(made, frames)
    assert len(as_videos([frames, [RED, RED]])) == 2
    with pytest.raises(MediaError, match="a video is int"):
        as_videos([3])


def test_a_list_of_frames_is_one_video_and_not_a_prompts_list() -> None:
    one, two = [RED, RED], [RED]
    flat = build_multimodal_inputs(["p", "q"], None, None, [one, two], [1, 1])
    assert [len(item["multi_modal_data"]["video"]) for item in flat] == [1, 1]
    assert flat[0]["multi_modal_data"]["video"][0] is one
    inferred = build_multimodal_inputs(["p", "q"], None, None, [one, two], None)
    assert [len(item["multi_modal_data"]["video"]) for item in inferred] == [1, 1]
    nested = build_multimodal_inputs(["p"], None, None, [[one, two]], [2])
    assert nested[0]["multi_modal_data"]["video"] == [one, two]
    paths = build_multimodal_inputs(["p"], None, None, [["a.mp4", "b.mp4"]], None)
    assert paths[0]["multi_modal_data"]["video"] == ["a.mp4", "b.mp4"]
