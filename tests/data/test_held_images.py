"""Images that a data set holds become files, named by their content."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tiny_vlm import IMAGE, checkered, tiny_media

from lightrl.data.held_images import as_files
from lightrl.data.media import image_size, read_image
from lightrl.data.media_fields import MediaFields
from lightrl.data.prompts import build_prompts, load_records


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIGHTRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "images"


def encoded(image: Image.Image, kind: str = "PNG", **settings: Any) -> bytes:
    content = io.BytesIO()
    image.save(content, kind, **settings)
    return content.getvalue()


def test_every_form_becomes_a_file(cache: Path) -> None:
    image = checkered(20, 10)
    content = encoded(image, "JPEG")
    from_dict, from_bytes, from_pil, *again = as_files(
        [{"bytes": content, "path": "a.jpg"}, content, image, {"path": None, "bytes": content}, {"bytes": content}]
    )
    assert [from_bytes, *again] == [from_dict] * 3
    assert Path(from_dict).read_bytes() == content
    assert sorted(path.name for path in cache.iterdir()) == sorted(Path(path).name for path in (from_dict, from_pil))
    assert read_image(from_pil).tobytes() == image.convert("RGB").tobytes()
    assert as_files(content) == from_dict


def test_a_held_image_of_16_bits_is_shown_as_its_file_is(tmp_path: Path) -> None:
    image = Image.fromarray(np.array([[0, 257, 32768, 65535]], dtype=np.uint16))
    image.save(tmp_path / "a.png")
    shown = read_image(as_files(image))
    assert np.asarray(shown)[0, :, 0].tolist() == [0, 1, 128, 255]
    assert shown.tobytes() == read_image(str(tmp_path / "a.png")).tobytes()


def test_base64_becomes_a_file() -> None:
    content = encoded(checkered(60, 30))
    text = base64.b64encode(content).decode()
    for image in (f"data:image/png;base64,{text}", f"data:image/PNG;charset=utf-8;base64,{text}", {"bytes": text}):
        assert as_files([image]) == as_files([content])
    with pytest.raises(ValueError, match=r"^holds an image that is no base64 \(.*\): '%%%a{37}'$"):
        as_files("data:image/png;base64,%%%" + "a" * 5_000)


def test_a_pil_image_keeps_the_way_up_that_it_says(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    checkered(20, 10).save(tmp_path / "a.jpg", exif=exif)
    with Image.open(tmp_path / "a.jpg") as image:
        held = as_files(image)
    assert image_size(held) == (20, 10)
    assert image_size(as_files(Image.new("CMYK", (4, 6)))) == (6, 4)


@pytest.mark.parametrize("given", ["a.png", ["a.png"], 3, None, [{"url": "a"}]])
def test_paths_and_what_is_no_image_stay(given: Any, cache: Path) -> None:
    assert as_files(given) == given
    assert not cache.exists()


@pytest.mark.parametrize("empty", [None, "", b""])
def test_an_image_without_bytes_is_that_of_its_path(empty: Any, cache: Path) -> None:
    assert as_files([{"bytes": empty, "path": "a.png"}, {"bytes": empty}]) == ["a.png", None]
    assert not cache.exists()


def test_a_file_is_written_once(cache: Path) -> None:
    path = Path(as_files(b"content"))
    path.write_bytes(b"left alone")
    assert Path(as_files(b"content")).read_bytes() == b"left alone"
    assert list(cache.iterdir()) == [path]


def test_ranks_of_two_nodes_that_write_one_file_do_not_disturb_each_other(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = Path.replace

    def late(self: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace)
        as_files(b"content")  # on another node, in a process of the same number
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", late)
    assert Path(as_files(b"content")).read_bytes() == b"content"
    assert len(list(cache.iterdir())) == 1


def test_a_file_that_cannot_be_finished_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(ValueError, match=r"no space left\)\. Set LIGHTRL_CACHE"):
        as_files(b"content")
    assert not list(cache.iterdir())


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LIGHTRL_CACHE", str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"cannot be written to .*file/images .*Set LIGHTRL_CACHE to a folder"):
        as_files(b"content")


def records_in(folder: Path, kind: str) -> str:
    """Writes two records, the first of which holds two images; returns the name of the data set."""
    import datasets

    images = [{"bytes": encoded(checkered(width, 28)), "path": None} for width in (56, 28)]
    rows = datasets.Dataset.from_dict(
        {
            "prompt": [f"a{IMAGE}{IMAGE}", "b"],
            "images": [images, []],
            "answer": ["x", "y"],
        },
        features=datasets.Features(
            {
                "prompt": datasets.Value("string"),
                "images": datasets.List(datasets.Image()),
                "answer": datasets.Value("string"),
            }
        ),
    )
    if kind == "folder":
        rows.save_to_disk(str(folder / "saved"))
        return str(folder / "saved")
    rows.to_parquet(folder / "rows.parquet")
    return str(folder / "rows.parquet")


@pytest.mark.parametrize("kind", ["folder", "parquet"])
@pytest.mark.parametrize("stream", [False, True])
def test_prompts_name_the_files_of_the_images_in_their_data_set(
    kind: str, stream: bool, tmp_path: Path, cache: Path
) -> None:
    media = tiny_media("qwen2_5_vl")
    prompts = build_prompts(
        load_records(records_in(tmp_path, kind), stream=stream),
        media.processor.tokenizer,
        max_prompt_tokens=40,
        chat_template="never",
        media=MediaFields(processor=media),
    )
    with_images, without = prompts[0], prompts[1]
    assert [Path(path).parent for path in with_images.images] == [cache, cache]
    assert [image_size(path) for path in with_images.images] == [(28, 56), (28, 28)]
    assert with_images.fields == {"images": list(with_images.images)}  # paths, for rewards and logs
    assert (without.images, without.answer) == ((), "y")


def test_the_folder_may_be_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlike a relative path in the data, it does not start at the folder of the data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIGHTRL_CACHE", "cache")
    assert as_files(b"content").startswith(str(tmp_path / "cache" / "images"))


def test_a_model_without_images_refuses_them_before_anything_is_written(tmp_path: Path, cache: Path) -> None:
    media = tiny_media("qwen2_5_vl")
    with pytest.raises(ValueError, match=r"rows.parquet: row 1: 'images' names images, and the model takes none"):
        build_prompts(
            load_records(records_in(tmp_path, "parquet")),
            media.processor.tokenizer,
            max_prompt_tokens=40,
            chat_template="never",
            media=MediaFields(),
        )
    assert not cache.exists()


def test_a_run_does_not_keep_the_images_beside_their_files(tmp_path: Path, cache: Path) -> None:
    media = tiny_media("qwen2_5_vl")
    records = load_records(records_in(tmp_path, "parquet"))
    fields = MediaFields(processor=media)
    for _ in range(2):  # the second time, they are paths
        prompts = build_prompts(
            records, media.processor.tokenizer, max_prompt_tokens=40, chat_template="never", media=fields
        )
    assert records[0][0]["images"] == list(prompts[0].images) == prompts[0].fields["images"]
