"""Files of images and videos: sizes from headers, pixels, and what is said of those that cannot be used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_vlm import IMAGE, checkered, frames, tiny_media

from lightrl.data import media as media_module
from lightrl.data.media import (
    MediaError,
    PromptEncoder,
    absolute_paths,
    image_size,
    media_folder,
    read_image,
    read_video,
    video_size,
)
from lightrl.records import Prompt


def test_an_image_is_read_the_way_up_that_it_says(tmp_path: Path) -> None:
    path = str(tmp_path / "a.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    checkered(20, 10).save(path, exif=exif)
    assert image_size(path) == (20, 10)
    assert read_image(path).size == (10, 20)  # PIL says width first
    Image.new("LA", (4, 6)).save(path)
    assert (image_size(path), read_image(path).mode) == ((6, 4), "RGB")


def test_transparent_pixels_are_white(tmp_path: Path) -> None:
    letters = np.zeros((2, 3, 4), dtype=np.uint8)  # all black, and transparent but for one pixel
    letters[0, 1, 3], letters[1, 2] = 255, (200, 0, 0, 51)
    Image.fromarray(letters, "RGBA").save(tmp_path / "rgba.png")
    shown = np.asarray(read_image(str(tmp_path / "rgba.png"))).tolist()
    assert shown == [[[255] * 3, [0] * 3, [255] * 3], [[255] * 3, [255] * 3, [244, 204, 204]]]
    for mode, transparent, opaque in (("P", 0, 1), ("L", 0, 9), ("RGB", (0, 0, 0), (9, 9, 9))):
        image = Image.new(mode, (2, 1), transparent)
        image.putpixel((1, 0), opaque)
        image.save(tmp_path / f"{mode}.png", transparency=transparent)
        image.save(tmp_path / "opaque.png")
        marked, plain = (np.asarray(read_image(str(tmp_path / f"{name}.png"))) for name in (mode, "opaque"))
        assert marked[0, 0].tolist() == [255] * 3, mode
        assert marked[0, 1].tolist() == plain[0, 1].tolist(), mode


def test_grey_values_of_16_bits_are_scaled_and_not_clipped(tmp_path: Path) -> None:
    # 65535 / 255 = 257: 128 is 0.498 of a step, and 129 is 0.502 of one.
    values = np.array([[0, 128, 129, 257, 32768, 65535]], dtype=np.uint16)
    for kind in ("png", "tiff"):
        Image.fromarray(values).save(tmp_path / f"a.{kind}")
        shown = np.asarray(read_image(str(tmp_path / f"a.{kind}")))
        assert shown.tolist() == [[[grey] * 3 for grey in (0, 0, 1, 1, 128, 255)]]
    Image.fromarray(values).save(tmp_path / "b.png", transparency=257)
    assert np.asarray(read_image(str(tmp_path / "b.png")))[0, :, 0].tolist() == [0, 0, 1, 255, 128, 255]


def test_the_size_is_that_of_the_pixels_wherever_the_file_says_its_way_up(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    for kind in ("jpg", "webp", "tiff", "png"):
        checkered(20, 10).save(tmp_path / f"a.{kind}", exif=exif)
    content = (tmp_path / "a.png").read_bytes()
    start = content.index(b"eXIf") - 4
    end = start + 12 + int.from_bytes(content[start : start + 4], "big")
    late = content[:start] + content[end:-12] + content[start:end] + content[-12:]  # behind the pixels
    (tmp_path / "late.png").write_bytes(late)
    for path in map(str, tmp_path.iterdir()):
        assert image_size(path) == read_image(path).size[::-1], path


def test_videos_are_arrays_or_animations(tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", frames(3, 20, 10))
    assert video_size(str(tmp_path / "v.npy")) == (3, 10, 20)
    assert (read_video(str(tmp_path / "v.npy")) == frames(3, 20, 10)).all()
    first, *others = [Image.new("RGB", (8, 6), color) for color in ("red", "lime", "blue")]
    for name in ("v.gif", "v.webp"):
        first.save(tmp_path / name, save_all=True, append_images=others, lossless=True)
        assert video_size(str(tmp_path / name)) == (3, 6, 8)
        assert read_video(str(tmp_path / name))[:, 0, 0].tolist() == [[255, 0, 0], [0, 255, 0], [0, 0, 255]]


def test_bad_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no image")
    checkered(64, 64).save(tmp_path / "whole.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:3000])
    checkered(8, 8).save(tmp_path / "exif.png", exif=b"Exif\0\0nothing of the kind")
    checkered(8, 8).save(tmp_path / "short.png", exif=b"Exif\0\0MM\0*")
    np.save(tmp_path / "float.npy", np.zeros((2, 4, 4, 3)))
    np.save(tmp_path / "object.npy", np.array([{}]), allow_pickle=True)
    (tmp_path / "v.mp4").write_text("")
    cases = [
        (image_size, "none.png", "there is no image .*none.png"),
        (image_size, "n" * 1_000, "there is no image .{500}$"),
        (image_size, "text.png", "the image .*text.png cannot be read"),
        (read_image, "cut.png", "the image .*cut.png cannot be read"),
        (image_size, "exif.png", "the image .*exif.png cannot be read"),
        (read_image, "short.png", "the image .*short.png cannot be read"),
        (video_size, "none.npy", "there is no video .*none.npy"),
        (video_size, "float.npy", r"float.npy is an array of float64 and shape \[2, 4, 4, 3\]: it must be uint8"),
        (read_video, "object.npy", "object.npy cannot be read"),
        (video_size, "v.mp4", "v.mp4 is of no known kind: it must be one of .npy, .gif, .webp"),
    ]
    for function, name, message in cases:
        with pytest.raises(MediaError, match=message):
            function(str(tmp_path / name))


def test_the_size_of_an_image_is_read_from_its_header(tmp_path: Path) -> None:
    for name in ("a.png", "a.jpg"):
        checkered(64, 32).save(tmp_path / name)
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[: len(content) * 3 // 4])
        assert image_size(str(tmp_path / name)) == (32, 64)


def test_paths_start_from_the_data_file(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text("")
    assert media_folder(f"{tmp_path / 'data.jsonl'}:3") == media_folder(f"{tmp_path}: row 3") == tmp_path
    assert media_folder("builtin:addition: row 3") == Path()
    assert absolute_paths("a/b.png", tmp_path) == (str(tmp_path / "a/b.png"),)
    assert absolute_paths(["/x.png", "c.png"], tmp_path) == ("/x.png", str(tmp_path / "c.png"))
    with pytest.raises(ValueError, match="is 3: it must be a path or a list of paths"):
        absolute_paths(3, tmp_path)


def test_the_error_for_what_is_no_path_does_not_show_its_bytes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'other': 1.*it must be a path or a list of paths") as error:
        absolute_paths([{"bytes": b"PNG" * 100_000, "other": 1}], tmp_path)
    assert len(str(error.value)) < 300


def test_an_encoder_reads_a_prompt_once_while_it_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    media = tiny_media("qwen2_5_vl")
    ids = tuple(media.processor.tokenizer.encode(IMAGE))
    prompts = []
    for place in range(3):
        path = tmp_path / f"{place}.png"
        checkered(56, 56, seed=place).save(path)
        prompts.append(Prompt(index=place, text="", token_ids=ids, images=(str(path),)))
    num_read: list[str] = []

    def counting(path: str) -> Image.Image:
        num_read.append(path)
        return read_image(path)

    monkeypatch.setattr(media_module, "read_image", counting)
    encoder = PromptEncoder(media, kept_bytes=200_000)  # 16 patches of 1176 floats: 75 kB each
    first = encoder(prompts[0])
    assert encoder(prompts[0]) is first
    encoder(prompts[1])
    assert len(num_read) == 2
    encoder(prompts[2])  # the first must go
    encoder(prompts[1])
    assert len(num_read) == 3
    encoder(prompts[0])
    assert len(num_read) == 4
    Path(prompts[2].images[0]).unlink()
    with pytest.raises(MediaError, match=r"Prompt 2: there is no image .*2.png\."):
        PromptEncoder(media)(prompts[2])
