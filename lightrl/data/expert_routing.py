"""Takes the experts that an engine chose from samples into packs and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightrl.models.routing import UNKNOWN
from lightrl.records import Sample


def join_routing(samples: Sequence[Sample]) -> Tensor:
    """Returns the experts of sequences laid end to end, [T, layers, k] int16; at least one sample must have them.

    A token whose experts nobody recorded, such as the last token of a response, gets UNKNOWN.
    """
    shapes = {sample.routing.shape[1:] for sample in samples if sample.routing is not None}
    if len(shapes) != 1:
        raise ValueError(f"The samples have routing of shapes {sorted(shapes)}: they must come from one model.")
    (shape,) = shapes
    return torch.cat([_of_sequence(sample, shape) for sample in samples])


def _of_sequence(sample: Sample, shape: tuple[int, ...]) -> Tensor:
    num_tokens = len(sample.prompt_ids) + len(sample.response_ids)
    whole = torch.full((num_tokens, *shape), UNKNOWN, dtype=torch.int16)
    if sample.routing is not None:
        if len(sample.routing) > num_tokens:
            raise ValueError(
                f"Sample {sample.key} has {num_tokens} tokens and experts of {len(sample.routing)}: its engine must "
                "return at most one row for each token of prompt and response."
            )
        whole[: len(sample.routing)] = torch.from_numpy(np.asarray(sample.routing, np.int16))
    return whole
