"""Ids, patches and positions against transformers' own processor and model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from tiny_vlm import (
    FAMILIES,
    IMAGE,
    VIDEO,
    checkered,
    frames,
    save_tiny_vlm,
    tiny_config,
    tiny_media,
    tiny_model,
    tiny_processor,
)
from torch.testing import assert_close

from lightrl.models.multimodal import (
    MediaProcessor,
    blank_vision,
    decoder_inputs,
    embedded,
    join_vision,
    rope_positions,
    sequence_positions,
)
from lightrl.models.policy import response_batch
from lightrl.models.token_split import TokenSplit


def own_processor(family: str, text: str, images: list[object], videos: list[object]) -> dict[str, torch.Tensor]:
    """What transformers makes of it, with frames as they are and two of them a second."""
    metadata = [
        {"fps": 2.0, "total_num_frames": len(video), "frames_indices": list(range(len(video)))} for video in videos
    ]
    return dict(
        tiny_processor(family)(
            text=text,
            images=images or None,
            videos=videos or None,
            return_tensors="pt",
            **({"video_metadata": metadata, "do_sample_frames": False} if videos else {}),
        )
    )


CASES = {
    "one image": (f"ab{IMAGE}c", [(60, 90)], []),
    "two images of other sizes": (f"{IMAGE}x{IMAGE}", [(60, 90), (140, 30)], []),
    "a video of five frames": (f"a{VIDEO}b", [], [(5, 60, 80)]),
    "a video before an image": (f"{VIDEO} and {IMAGE}?", [(30, 30)], [(4, 40, 60)]),
    "text": ("abc", [], []),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", CASES)
def test_it_is_what_the_models_own_processor_makes(family: str, case: str) -> None:
    text, image_sizes, video_sizes = CASES[case]
    images = [checkered(*size, seed=place) for place, size in enumerate(image_sizes)]
    videos = [frames(*size, seed=place) for place, size in enumerate(video_sizes)]
    media = tiny_media(family)
    encode = media.processor.tokenizer.encode
    ids = encode(text)
    encoded = media.encode(ids, images, videos)
    expected = own_processor(family, text, images, videos)
    assert list(encoded.token_ids) == expected["input_ids"][0].tolist()
    assert (
        media.expanded(ids, [size[::-1] for size in image_sizes], [(n, h, w) for n, w, h in video_sizes])
        == encoded.token_ids
    )
    patches = [expected[name] for name in ("pixel_values_videos", "pixel_values") if name in expected]
    if not patches:
        assert encoded.pixel_values is None
        return
    assert encoded.pixel_values is not None
    assert_close(encoded.pixel_values, torch.cat(patches), atol=0, rtol=0)
    assert len(encoded.feature_positions) * 4 == len(encoded.pixel_values)  # 2 x 2 patches a feature


def test_positions_of_an_image_worked_out_by_hand() -> None:
    # 2 text tokens, an image of 4 x 6 patches (2 x 3 features), 2 text tokens. The image begins at 2 and takes as many
    # positions as its longer side has features, 3, so that the text goes on at 5 where its place is 8.
    config = tiny_config("qwen2_5_vl")
    image = config.image_token_id
    positions, delta = rope_positions(config, [5, 6, *[image] * 6, 7, 8], torch.tensor([[1, 4, 6]]))
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]
    assert delta == -3
    text, no_delta = rope_positions(config, [5, 6, 7], None)
    assert (text.tolist(), no_delta) == ([[0, 1, 2]] * 3, 0)


def test_positions_of_a_video_worked_out_by_hand() -> None:
    # 1 text token, a video of 2 x 2 x 4 patches (2 frames of 1 x 2 features), 1 text token, an image of 1 feature. A
    # frame stands for 2 of 2 a second, one second, which is 4 positions (tokens_per_second): the second frame is at
    # 1 + 4 = 5, so the text goes on at 6, and the image behind it at 7.
    config = tiny_config("qwen2_5_vl")
    assert config.vision_config.tokens_per_second == 4
    ids = [5, *[config.video_token_id] * 4, 6, config.image_token_id]
    positions, delta = rope_positions(config, ids, torch.tensor([[2, 2, 4], [1, 2, 2]]))
    assert positions.tolist() == [[0, 1, 1, 5, 5, 6, 7], [0, 1, 1, 1, 1, 6, 7], [0, 1, 2, 1, 2, 6, 7]]
    assert delta == 8 - 7
    # Qwen3-VL: the frames are separate, each behind the word for its time (9).
    config = tiny_config("qwen3_vl")
    video = config.video_token_id
    positions, delta = rope_positions(config, [5, 9, video, video, 9, video, video, 6], torch.tensor([[2, 2, 4]]))
    assert positions.tolist() == [[0, 1, 2, 2, 4, 5, 5, 7], [0, 1, 2, 2, 4, 5, 5, 7], [0, 1, 2, 3, 4, 5, 6, 7]]
    assert delta == 0


SAME_POSITIONS = [  # in transformers, what follows a Qwen2.5-VL video may begin before the video ends
    (family, case)
    for family in FAMILIES
    for case, (_, images, videos) in CASES.items()
    if (images or videos) and not (videos and family == "qwen2_5_vl")
]


@pytest.mark.parametrize(("family", "case"), SAME_POSITIONS)
def test_positions_are_those_of_transformers(family: str, case: str) -> None:
    text, image_sizes, video_sizes = CASES[case]
    media = tiny_media(family)
    encoded = media.encode(
        media.processor.tokenizer.encode(text),
        [checkered(*size) for size in image_sizes],
        [frames(*size) for size in video_sizes],
    )
    assert encoded.grid_thw is not None
    ids = torch.tensor([encoded.token_ids])
    is_video = encoded.grid_thw[:, 0] > 1
    positions, deltas = tiny_model(family).model.get_rope_index(
        ids,
        mm_token_type_ids=(ids == media.image_token_id).int() + 2 * (ids == media.video_token_id).int(),
        image_grid_thw=encoded.grid_thw[~is_video],
        video_grid_thw=encoded.grid_thw[is_video] if is_video.any() else None,
    )
    assert torch.equal(encoded.positions, positions[:, 0])
    assert encoded.rope_delta == int(deltas)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_response_goes_on_where_the_prompt_ends(family: str) -> None:
    media = tiny_media(family)
    encoded = media.encode(media.processor.tokenizer.encode(f"a{IMAGE}"), [checkered(90, 60)], [])
    positions = sequence_positions(encoded, len(encoded.token_ids) + 3)
    last = int(encoded.positions.max())  # the closing marker's
    assert positions[:, -3:].tolist() == [[last + 1, last + 2, last + 3]] * 3


@pytest.mark.parametrize("family", FAMILIES)
def test_the_decoder_sees_what_it_sees_inside_the_model(family: str) -> None:
    """Two rows of one batch: an image and a video, and two samples of one prompt that share an image."""
    model, media = tiny_model(family), tiny_media(family)
    encode = media.processor.tokenizer.encode
    both = media.encode(encode(f"{VIDEO} and {IMAGE}?"), [checkered(60, 60)], [frames(3, 60, 60)])
    single = media.encode(encode(f"q{IMAGE}"), [checkered(30, 90, seed=1)], [])
    for rows in ([both], [single, single]):
        width = len(rows[0].token_ids)
        ids = torch.tensor([row.token_ids for row in rows])
        vision = join_vision(rows, [place * width for place in range(len(rows))])
        positions = torch.stack([row.positions for row in rows], dim=1)
        with torch.no_grad():
            inputs = decoder_inputs(model, ids, vision)
            hidden = model.get_decoder()(position_ids=positions, use_cache=False, **inputs)[0]
            own = own_forward(model, rows)
        assert_close(model.get_output_embeddings()(hidden), own, atol=1e-5, rtol=0)
    assert vision is not None
    assert len(vision.grid_thw) == 1  # one image, whose features stand in two rows
    assert vision.feature_index.tolist() == 2 * list(range(len(single.feature_positions)))


def own_forward(model, rows):
    config = model.config
    kinds = [
        [1 if i == config.image_token_id else 2 if i == config.video_token_id else 0 for i in r.token_ids] for r in rows
    ]
    arguments = {}
    ids = torch.tensor([row.token_ids for row in rows])
    if (ids == config.video_token_id).any():  # the first entry is the video
        count = int(rows[0].grid_thw[0].prod())
        arguments = {"pixel_values_videos": rows[0].pixel_values[:count], "video_grid_thw": rows[0].grid_thw[:1]}
        pixels, grids = rows[0].pixel_values[count:], rows[0].grid_thw[1:]
        if config.model_type == "qwen2_5_vl":
            arguments["position_ids"] = torch.stack([row.positions for row in rows], dim=1)
    else:
        pixels, grids = (torch.cat([getattr(r, name) for r in rows]) for name in ("pixel_values", "grid_thw"))
    return model(
        input_ids=ids, pixel_values=pixels, image_grid_thw=grids, mm_token_type_ids=torch.tensor(kinds), **arguments
    ).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_a_blank_image_changes_nothing_and_trains_nothing(family: str) -> None:
    model = tiny_model(family)
    ids = torch.tensor([[5, 6, 7]])
    blank = blank_vision(model.config, torch.device("cpu"))
    inputs = decoder_inputs(model, ids, blank)
    hidden = model.get_decoder()(use_cache=False, **inputs)[0]
    assert_close(hidden, model.get_decoder()(input_ids=ids, use_cache=False)[0], atol=0, rtol=0)
    hidden.sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if "visual" in name}
    assert [name for name, gradient in gradients.items() if gradient is None or gradient.any()] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_part_of_a_pack_runs_the_images_that_it_shows(family: str) -> None:
    """A rank may hold the end of one of three images and all of the next, one token of an image, or text alone."""
    model, media = tiny_model(family), tiny_media(family)
    images = [checkered(*size, seed=seed) for seed, size in enumerate([(60, 90), (30, 60), (90, 60)])]
    prompt = media.encode(media.processor.tokenizer.encode(f"a{IMAGE}b{IMAGE}c{IMAGE}def"), images, [])
    batch = response_batch([(prompt.token_ids, [5])], encoded=[prompt])
    assert batch.vision is not None
    seen: list[int] = []
    model.model.visual.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    whole = embedded(model, batch)
    counts, places = batch.vision.grid_thw.prod(1).tolist(), batch.vision.feature_positions
    first = int(places[counts[0] // 4])  # token of the second image
    length = len(batch.input_ids)
    for start, stop in ((first + 1, length), (first, first + 1), (length - 3, length)):
        is_mine = (places >= start) & (places < stop)
        held = replace(
            batch.vision,
            feature_positions=places[is_mine] - start,
            feature_index=batch.vision.feature_index[is_mine],
        )
        part = TokenSplit(
            input_ids=batch.input_ids[start:stop],
            position_ids=batch.position_ids[:, start:stop],
            cu_seqlens=(),
            vision=held,
        )
        found = embedded(model, part)
        assert_close(found["inputs_embeds"], whole["inputs_embeds"][:, start:stop], atol=1e-5, rtol=1e-5)
        layers = (output.get("deepstack_visual_embeds", ()) for output in (found, whole))
        for ours, wanted in zip(*layers, strict=True):
            assert_close(ours, wanted[is_mine], atol=1e-5, rtol=1e-5)
    assert seen == [sum(counts), counts[1] + counts[2], counts[1], 4]  # 4: the smallest image


def test_wrong_placeholders_are_told() -> None:
    media = tiny_media("qwen2_5_vl")
    encode = media.processor.tokenizer.encode
    with pytest.raises(ValueError, match=r"2 image placeholder\(s\) <\|image_pad\|> and 1 image\(s\)"):
        media.expanded(encode(IMAGE * 2), [(30, 30)], [])
    with pytest.raises(ValueError, match=r"0 video placeholder\(s\) <\|video_pad\|> and 1 video\(s\)"):
        media.expanded(encode("a"), [], [(2, 30, 30)])


def test_the_markers_of_a_timed_video() -> None:
    media = tiny_media("qwen3_vl")
    tokenizer = media.processor.tokenizer
    ids = tokenizer.encode(f"a{VIDEO}b")
    frame = "<|vision_start|><|video_pad|><|vision_end|>"  # one feature
    timed = f"<0.2 seconds>{frame}<1.0 seconds>{frame}"  # frames 0 and 1 of 2 a second, then 2 by itself
    inside = f"a<|vision_start|>{timed}<|vision_end|>b"
    assert tokenizer.decode(media.expanded(ids, [], [(3, 32, 32)])) == inside


def test_a_folder_gives_its_processor_or_none(tmp_path: Path) -> None:
    save_tiny_vlm(tmp_path / "vlm", "qwen2_5_vl")
    media = MediaProcessor.load(str(tmp_path / "vlm"))
    assert media is not None
    assert media.image_token_id == tiny_config("qwen2_5_vl").image_token_id
    config = transformers.Qwen3Config(num_hidden_layers=1)
    config.save_pretrained(tmp_path / "text")
    assert config.model_type not in FAMILIES
    assert MediaProcessor.load(str(tmp_path / "text")) is None
    config = tiny_config("qwen3_vl")
    config.save_pretrained(tmp_path / "bare")
    media.processor.tokenizer.save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match="bare has no processor for images"):
        MediaProcessor.load(str(tmp_path / "bare"))
