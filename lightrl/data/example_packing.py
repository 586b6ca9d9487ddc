"""Lays examples out as packs, through pack(), and finds the two answers of a pair again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightrl.data.packing import TokenValues, dummy_batch, pack
from lightrl.records import EncodedPrompt, Example, Experience, PackedBatch, Prompt, Sample


def pack_examples(
    examples: Sequence[Example],
    *,
    ref_logprobs: TokenValues | None = None,
    encode: Callable[[Prompt], EncodedPrompt] | None = None,
) -> PackedBatch:
    """One micro-batch: every answer is a sequence with the key (example's position, place among its answers).

    Without examples it is a dummy, which trains nothing. ref_logprobs are by key, one per response token.
    """
    if not examples:
        return dummy_batch(temperature=1.0)
    masks = {
        (example.position, place): answer.loss_mask
        for example in examples
        for place, answer in enumerate(example.answers)
    }
    experiences = [_as_experience(example, place) for example in examples for place in range(len(example.answers))]
    return pack(
        experiences, temperature=1.0, old_logprobs=None, ref_logprobs=ref_logprobs, loss_masks=masks, encode=encode
    )


def pair_positions(batch: PackedBatch) -> list[int]:
    """The positions of the pack's pairs, rising; none for a dummy."""
    return sorted({position for position, _ in batch.keys if position >= 0})


def pair_places(batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """[P] and [P] int64: which sequences are the chosen and the rejected answers, in the order of pair_positions."""
    place_of = {key: place for place, key in enumerate(batch.keys)}
    positions = pair_positions(batch)
    chosen, rejected = ([place_of[position, answer] for position in positions] for answer in (0, 1))
    places = torch.tensor([chosen, rejected], dtype=torch.int64, device=batch.input_ids.device)
    return places[0], places[1]


def _as_experience(example: Example, place: int) -> Experience:
    """An answer in the form of a sample, which it was not: nothing is known of how it was drawn."""
    answer = example.answers[place]
    sample = Sample(
        # pack() takes prompts of one index to be one prompt, which those of two conversations are not.
        prompt=Prompt(index=example.index * len(example.answers) + place, text="", token_ids=answer.prompt_ids),
        position=example.position,
        sample_index=place,
        response_ids=answer.response_ids,
        sampler_logprobs=(0.0,) * len(answer.response_ids),
        versions=(),
        finish_reason="stop",
        text="",
    )
    return Experience(sample=sample, reward=0.0, advantage=0.0)
