"""Policy of a vision-language model against transformers' own forward, one sequence at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_vlm import FAMILIES, save_tiny_vlm, tiny_model
from tiny_vlm_training import TEMPERATURE, Encoder, experiences, own_logprobs
from torch.testing import assert_close

from lightrl.data.packing import dummy_batch, pack, unpack
from lightrl.models import policy as policy_module
from lightrl.models.policy import Policy, load_policy
from lightrl.models.score_check import check_scores
from lightrl.records import PackedBatch

CPU = torch.device("cpu")


def packed(encoder: Encoder, **options: Any) -> PackedBatch:
    batch = pack(
        experiences(encoder, **options), temperature=TEMPERATURE, old_logprobs=None, ref_logprobs=None, encode=encoder
    )
    return batch.to(CPU)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_and_gradients_of_a_mixed_pack_equal_the_models_own(family: str) -> None:
    model, encoder = tiny_model(family), Encoder(family)
    samples = experiences(encoder)
    expected = {(e.sample.position, e.sample.sample_index): own_logprobs(model, encoder, e) for e in samples}
    sum(float(place + 1) * scores.sum() for place, scores in enumerate(expected.values())).backward()  # type: ignore[union-attr]
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    batch = packed(encoder)
    assert batch.vision is not None
    assert len(batch.vision.grid_thw) == 5  # the image that two samples share is there once
    policy = Policy(model).train()
    found = unpack(batch, policy(batch).logprobs)
    for key, scores in expected.items():
        assert_close(found[key], scores, atol=1e-5, rtol=0)
    sum(float(place + 1) * found[key].sum() for place, key in enumerate(expected)).backward()  # type: ignore[union-attr]
    for name, parameter in model.named_parameters():
        scale = gradients[name].abs().max().item()
        assert_close(parameter.grad, gradients[name], atol=1e-5 * max(1.0, scale), rtol=1e-4, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pack_without_images_runs_the_vision_tower_and_trains_nothing_of_it(family: str) -> None:
    policy, encoder = Policy(tiny_model(family)), Encoder(family)
    for batch in (packed(encoder, keys=((1, 0), (1, 1))), dummy_batch(temperature=1.0)):
        policy.zero_grad()
        assert batch.vision is None
        policy(batch).logprobs.sum().backward()
        gradients = {name: p.grad for name, p in policy.hf.named_parameters()}
        assert [name for name, gradient in gradients.items() if gradient is None] == []
        visual = [gradient for name, gradient in gradients.items() if "visual" in name and gradient is not None]
        assert visual
        assert not any(gradient.any() for gradient in visual)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_changes_no_gradient(family: str) -> None:
    encoder = Encoder(family)
    batch = packed(encoder)
    gradients = []
    for checkpointed in (False, True):
        policy = Policy(tiny_model(family)).train()
        if checkpointed:
            policy.hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        policy(batch).logprobs.sum().backward()
        gradients.append([p.grad for p in policy.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert_close(plain, recomputed, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_check_scores_looks_at_an_image(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(tiny_model(family))
    check_scores(policy, CPU)

    def of_text(lengths: list[int], prompts: Any) -> torch.Tensor:
        return torch.cat([torch.arange(length) for length in lengths])

    with monkeypatch.context() as patch:
        patch.setattr(policy_module, "pack_positions", of_text)
        with pytest.raises(ValueError, match=f"model type '{family}' differ from its own logits"):
            check_scores(policy, CPU)


def test_a_pack_tells_a_prompt_that_the_engine_saw_otherwise() -> None:
    encoder = Encoder("qwen2_5_vl")
    (item,) = experiences(encoder, keys=((0, 0),))
    object.__setattr__(item.sample, "prompt_ids", item.sample.prompt_ids[:-1])
    with pytest.raises(
        ValueError, match="Prompt 0 has 10 tokens in the engine and 11 in the trainer, .* from the end on"
    ):
        pack([item], temperature=1.0, old_logprobs=None, ref_logprobs=None, encode=encoder)


def test_a_text_policy_takes_no_images(tmp_path: Path) -> None:
    encoder = Encoder("qwen2_5_vl")
    policy = Policy(tiny_model("qwen2_5_vl"))
    policy.takes_images = False
    with pytest.raises(ValueError, match="The pack has images, and qwen2_5_vl takes none"):
        policy(packed(encoder))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_is_loaded_whole_or_on_the_meta_device(family: str, tmp_path: Path) -> None:
    save_tiny_vlm(tmp_path, family)
    encoder = Encoder(family)
    policy = load_policy(str(tmp_path), materialize=True)
    assert_close(policy(packed(encoder)).logprobs, Policy(tiny_model(family))(packed(encoder)).logprobs)
    empty = load_policy(str(tmp_path), materialize=False)
    assert all(p.is_meta for p in empty.parameters())
    assert [name for name, _ in empty.named_parameters()] == [name for name, _ in policy.named_parameters()]
