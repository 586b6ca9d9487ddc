"""Records name their images in the field `images`, in one named `image`, or in the parts of their messages."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tiny_vlm import IMAGE, checkered, tiny_media

from lightrl.data.media_fields import MediaFields
from lightrl.data.prompts import build_prompts
from lightrl.records import Prompt


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTRL_CACHE", str(tmp_path / "cache"))


def prompt_of(record: dict[str, Any], **fields: Any) -> Prompt:
    media = MediaFields(processor=tiny_media("qwen2_5_vl"), **fields)
    assert media.processor is not None
    tokenizer = media.processor.processor.tokenizer
    (prompt,) = build_prompts([(record, "data.jsonl:1")], tokenizer, max_prompt_tokens=99, media=media)
    return prompt


def asked(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "which?"}]}]}


def test_a_field_named_image_is_read(tmp_path: Path) -> None:
    image = checkered(28, 28)
    image.save(path := tmp_path / "a.png")
    by_path = prompt_of({"prompt": "<image>which?", "image": str(path)})
    assert (by_path.text, by_path.images) == (f"user:{IMAGE}which?;assistant:", (str(path),))
    held = prompt_of({"prompt": "<image>which?", "image": image, "images": None})
    assert held.images == (held.fields["image"],)  # the pixels stay in a file
    with Image.open(held.images[0]) as kept:
        assert kept.tobytes() == image.tobytes()
    both = prompt_of({"prompt": "<image>which?", "image": "none.png", "images": [str(path)]})
    assert both.images == (str(path),)
    with pytest.raises(ValueError, match=r"0 image placeholder\(s\) .* and 1 image\(s\): .*<image> is one"):
        prompt_of({"prompt": "which?", "image": str(path)})
    for fields in ({"image_field": ""}, {"image_field": "picture"}):  # `image` may be anything then
        assert prompt_of({"prompt": "which?", "image": 3}, **fields).images == ()


def test_parts_hold_images_in_the_forms_of_qwen_transformers_and_openai(tmp_path: Path) -> None:
    image, content = checkered(28, 28), io.BytesIO()
    image.save(path := tmp_path / "a.png")
    image.save(content, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"
    parts: list[dict[str, Any]] = [
        {"type": "image", "image": f"file://{path}"},
        {"type": "image", "image": image, "text": None},
        {"type": "image", "path": str(path), "image": None},
        {"type": "image", "url": str(path)},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": str(path)},
    ]
    for part in parts:
        prompt = prompt_of(asked(part))
        assert prompt.text == f"user:{IMAGE}which?;assistant:"
        assert prompt.messages[0]["content"][0] == {"type": "image"}  # no pixels
        with Image.open(prompt.images[0]) as kept:
            assert kept.tobytes() == image.tobytes()
    assert len(prompt_of(asked(*parts)).images) == len(parts)
    talk = [{"role": "system", "content": "<image> is a word."}, *asked(parts[0])["messages"]]
    assert prompt_of({"messages": talk}).text.startswith("system:<image> is a word.;user:")
    named = prompt_of({**asked({"type": "image", "image": "none.png"}), "images": [str(path)]})
    assert named.images == (str(path),)
    with pytest.raises(ValueError, match=r"data.jsonl:1: there is no image .*none.png"):
        prompt_of(asked({"type": "image", "image": "none.png"}))
    with pytest.raises(ValueError, match="1 image placeholder.* and 0 image"):
        prompt_of(asked({"type": "image", "image": str(path)}), image_field="")
