import dataclasses

import pytest
import torch
from tiny_vlm import tiny_config

from lightrl.data.packing import dummy_batch
from lightrl.models.multimodal import blank_vision
from lightrl.records import Experience, Prompt, Sample


def test_records_are_frozen_and_know_their_size() -> None:
    sample = Sample(
        prompt=Prompt(index=0, text="ab", token_ids=(1, 2)),
        position=0,
        sample_index=0,
        response_ids=(3, 4, 5),
        sampler_logprobs=(-1.0,) * 3,
        versions=(0,) * 3,
        finish_reason="stop",
        text="cde",
    )
    item = Experience(sample=sample, reward=1.0, advantage=0.0)
    assert item.num_tokens == 5
    seen = dataclasses.replace(sample, prompt_ids=(1, 7, 7, 7, 2))  # by an engine that expanded an image
    assert dataclasses.replace(item, sample=seen).num_tokens == 8
    assert (sample.prompt_ids, sample.prompt.num_tokens) == ((1, 2), 2)
    assert dataclasses.replace(sample.prompt, num_media_tokens=3).num_tokens == 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        item.reward = 2.0  # type: ignore[misc]


def test_a_pack_moves_whole() -> None:
    batch = dummy_batch(temperature=0.5)
    moved = batch.to(torch.device("meta"))
    for field in dataclasses.fields(batch):
        before, after = getattr(batch, field.name), getattr(moved, field.name)
        if isinstance(before, torch.Tensor):
            assert after.is_meta
            assert before.device.type == "cpu"
        else:
            assert after == before
    vision = blank_vision(tiny_config("qwen3_vl"), torch.device("cpu"))
    moved_vision = dataclasses.replace(batch, vision=vision).to(torch.device("meta")).vision
    assert moved_vision is not None
    assert all(getattr(moved_vision, field.name).is_meta for field in dataclasses.fields(vision))
