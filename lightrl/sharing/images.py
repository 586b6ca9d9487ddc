"""Images in the trees of packs: a token that stands for a part of an image is identified by that image.

Nothing here runs for a pack of text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightrl.models.policy import response_batch
from lightrl.models.score_check import random_image_in, random_tokens
from lightrl.records import PackedBatch, VisionInputs

_TEXT = 24  # tokens of the check's prompts, without the image
_RESPONSES = (5, 3, 5)  # tokens


def identified(batch: PackedBatch, vision: VisionInputs) -> tuple[PackedBatch, NDArray[np.int64]]:
    """Returns a pack on the CPU with each distinct image once, and a key for each token.

    Two tokens with equal keys, and equal keys before them, have equal states. The key of text is its id. The key of a
    feature is below 0 and identifies the image and the place in it. Positions need no key: a feature's position follows
    from the grid of its image, which the digest includes, and a text token's from the tokens before it.
    """
    vision = distinct_images(vision)
    keys = batch.input_ids.numpy().copy()
    keys[vision.feature_positions.numpy()] = -1 - vision.feature_index.numpy()
    return replace(batch, vision=vision), keys


def distinct_images(vision: VisionInputs) -> VisionInputs:
    """Returns the images of a pack without duplicates, so that the vision tower computes each only once.

    Samples of one prompt share their images anyway, but prompts that show the same files do not.
    """
    counts = vision.grid_thw.prod(1)
    patches = vision.pixel_values.split(counts.tolist())
    digests = [_digest(*pair) for pair in zip(patches, vision.grid_thw, strict=True)]
    firsts = [digests.index(digest) for digest in digests]
    kept = sorted(set(firsts))
    if len(kept) == len(digests):
        return vision
    # Every feature of a pack stands for a token, so this is the number of patches per token.
    per_feature = len(vision.pixel_values) // (int(vision.feature_index.max()) + 1)
    sizes = counts // per_feature
    offset_of = dict(zip(kept, _starts(sizes[kept]).tolist(), strict=True))
    moved = torch.tensor([offset_of[first] for first in firsts]) - _starts(sizes)
    return VisionInputs(
        pixel_values=torch.cat([patches[index] for index in kept]),
        grid_thw=vision.grid_thw[kept],
        feature_positions=vision.feature_positions,
        feature_index=vision.feature_index + moved.repeat_interleave(sizes)[vision.feature_index],
    )


def kept_features(vision: VisionInputs, kept: Tensor, num_tokens: int) -> VisionInputs:
    """Returns the images for some of a pack's tokens.

    Args:
        vision: the images of the whole pack.
        kept: [U] int64, the tokens that are kept.
        num_tokens: the number of tokens of the whole pack.
    """
    feature_of = kept.new_full((num_tokens,), -1).index_copy(0, vision.feature_positions, vision.feature_index)[kept]
    positions = (feature_of >= 0).nonzero()[:, 0]
    return replace(vision, feature_positions=positions, feature_index=feature_of[positions])


def trial_with_images(body: Any) -> PackedBatch:
    """Returns a pack of random tokens: responses to a prompt with an image, and to its text with another image."""
    text, draws = random_tokens(body, _TEXT, seed=0), enumerate([*_RESPONSES, *_RESPONSES], start=1)
    shown = [random_image_in(body.config, text, seed=seed) for seed in (0, 1)]
    encoded = [shown[0]] * len(_RESPONSES) + [shown[1]] * len(_RESPONSES)
    responses: Sequence[tuple[int, ...]] = [random_tokens(body, count, seed=seed) for seed, count in draws]
    pairs = [(prompt.token_ids, response) for prompt, response in zip(encoded, responses, strict=True)]
    return response_batch(pairs, encoded=encoded)


def _digest(patches: Tensor, grid: Tensor) -> bytes:
    return sha256(patches.contiguous().numpy().data).digest() + grid.numpy().tobytes()


def _starts(sizes: Tensor) -> Tensor:
    """Returns the start of each part when parts of these sizes are laid end to end."""
    return sizes.cumsum(0) - sizes
