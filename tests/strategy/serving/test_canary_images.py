"""Weight syncs of a vision-language model: the canary generates from images and scores them as the trainer does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_vlm import FAMILIES, IMAGE, checkered, save_tiny_vlm, tiny_media

from lightrl.config import GRPOConfig
from lightrl.engines.base import WeightSyncError
from lightrl.models.multimodal import MediaProcessor
from lightrl.models.policy import Policy, load_policy, load_tokenizer
from lightrl.records import EncodedPrompt
from lightrl.strategy import StrategyBase, create_strategy

CANARY = {"max_tokens": 6, "ignore_eos": True}


@pytest.fixture(params=FAMILIES)
def ready(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[StrategyBase, Policy]:
    """A strategy whose engine has generated from an image."""
    save_tiny_vlm(tmp_path, request.param)
    strategy = create_strategy(GRPOConfig(strategy="single", canary_every=1))
    strategy.setup_distributed()
    policy = strategy.prepare(load_policy(str(tmp_path), materialize=True))
    strategy.tokenizer, strategy.media = load_tokenizer(str(tmp_path)), MediaProcessor.load(str(tmp_path))
    strategy.setup_inference_engine(None, "native", actor=policy)
    items = strategy.gather_and_generate(
        CANARY, all_prompts=["text", f"see {IMAGE}{IMAGE}"], all_images=[[], [checkered(60, 60), checkered(90, 60)]]
    )
    assert len(items) == 2
    return strategy, policy


def largest_difference(strategy: StrategyBase, policy: Policy) -> float:
    strategy.update_engine_weights(policy)
    assert strategy.serving.last_sync is not None
    assert strategy.serving.last_sync.canary is not None
    return strategy.serving.last_sync.canary


def test_it_agrees_over_updates(ready: tuple[StrategyBase, Policy]) -> None:
    strategy, policy = ready
    assert strategy.serving.canary._prompts[0].images
    for _ in range(2):
        assert 0 < largest_difference(strategy, policy) < 1e-5
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
    strategy.media = None  # no processor, so nothing to score an image with: text has to do
    assert largest_difference(strategy, policy) < 1e-5


def without_rope_delta(encoded: EncodedPrompt) -> None:
    object.__setattr__(encoded, "rope_delta", encoded.rope_delta + 1)


def other_pixels(encoded: EncodedPrompt) -> None:
    object.__setattr__(encoded, "pixel_values", -encoded.pixel_values)  # type: ignore[operator]


@pytest.mark.parametrize("spoil", [without_rope_delta, other_pixels])
def test_it_sees_an_image_that_is_served_wrongly(
    spoil: Callable[[EncodedPrompt], None], ready: tuple[StrategyBase, Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy, policy = ready
    assert strategy.engine is not None
    media = strategy.engine.engine._media  # type: ignore[attr-defined]
    assert media is not strategy.media
    encode = media.encode

    def spoilt(*arguments: Any) -> EncodedPrompt:
        encoded: EncodedPrompt = encode(*arguments)
        if encoded.pixel_values is not None:
            spoil(encoded)
        return encoded

    monkeypatch.setattr(media, "encode", spoilt)
    with pytest.raises(WeightSyncError, match="a logprob of the engine differs from the trainer's"):
        strategy.update_engine_weights(policy)


def test_it_tells_another_expansion(ready: tuple[StrategyBase, Policy]) -> None:
    strategy, policy = ready
    other = tiny_media(policy.hf.config.model_type)
    other.processor.image_processor.size = {"shortest_edge": 28**2, "longest_edge": 32**2}
    strategy.media = other
    with pytest.raises(ValueError, match="they expand its images in different ways"):
        strategy.update_engine_weights(policy)
