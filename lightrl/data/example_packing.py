"""Packs examples with pack(), and locates the two answers of each pair in a pack."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightrl.data.packing import Encoder, dummy_batch, pack
from lightrl.records import Example, Experience, PackedBatch, Prompt, Sample


def pack_examples(examples: Sequence[Example], *, encode: Encoder | None = None) -> PackedBatch:
    """Packs the answers of a micro-batch as sequences with the keys (example's position, index among its answers).

    Args:
        examples: the examples; without any, the result is a dummy pack, which trains nothing.
        encode: as for pack().
    """
    if not examples:
        return dummy_batch(temperature=1.0)
    masks = {
        (example.position, index): answer.loss_mask
        for example in examples
        for index, answer in enumerate(example.answers)
    }
    experiences = [
        _as_experience(example, index, encode) for example in examples for index in range(len(example.answers))
    ]
    return pack(experiences, temperature=1.0, old_logprobs=None, loss_mask=masks, encode=encode)


def pair_positions(batch: PackedBatch) -> list[int]:
    """Returns the ascending positions of the pairs in a pack; a dummy pack has none."""
    return sorted({position for position, _ in batch.keys if position >= 0})


def pair_sequences(batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Returns the sequences of the chosen and of the rejected answers, each [P] int64, in the order of positions."""
    index_of = {key: index for index, key in enumerate(batch.keys)}
    positions = pair_positions(batch)
    chosen, rejected = ([index_of[position, answer] for position in positions] for answer in (0, 1))
    indices = torch.tensor([chosen, rejected], dtype=torch.int64, device=batch.input_ids.device)
    return indices[0], indices[1]


def _as_experience(example: Example, index: int, encode: Encoder | None) -> Experience:
    """Wraps an answer as a sample, although nobody sampled it: its logprobs are 0, and it has no versions."""
    answer = example.answers[index]
    prompt = Prompt(
        # pack() treats prompts with the same index as one prompt, but the prompts of two conversations differ.
        index=example.index * len(example.answers) + index,
        text="",
        token_ids=answer.prompt_ids,
        images=answer.images,
        videos=answer.videos,
    )
    sample = Sample(
        prompt=prompt,
        prompt_ids=encode(prompt).token_ids if encode and answer.num_media_tokens else (),
        position=example.position,
        sample_index=index,
        response_ids=answer.response_ids,
        sampler_logprobs=(0.0,) * len(answer.response_ids),
        versions=(),
        finish_reason="stop",
        text="",
    )
    return Experience(sample=sample, reward=0.0, advantage=0.0)
