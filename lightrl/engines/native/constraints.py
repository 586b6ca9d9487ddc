"""Changes logits before a draw: bars end tokens that are too early, and penalises earlier tokens.

Used only for requests that ask for it. Logprobs are then those of the changed distribution.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightrl.engines.base import SamplingParams
from lightrl.engines.native.scheduler import RunningSamples


def constrain(logits: Tensor, rows: RunningSamples, first_row: int, eos_table: NDArray[np.bool_]) -> Tensor:
    """Returns logits [n, vocab] of the rows from first_row on, changed for rows that ask for it."""
    logits = logits.float().clone()
    for index in np.nonzero(rows.is_constrained[first_row : first_row + len(logits)])[0]:
        row = first_row + int(index)
        request, num_produced = rows.request[row], int(rows.num_produced[row])
        params = request.params
        penalise(logits[index], params, request.prompt, rows.outputs["token"][row, :num_produced].tolist())
        if num_produced < params.min_new_tokens:
            ends = set() if params.ignore_eos else set(np.nonzero(eos_table)[0].tolist())
            logits[index, sorted(ends | set(params.stop_token_ids))] = float("-inf")
    return logits


def penalise(scores: Tensor, params: SamplingParams, prompt: tuple[int, ...], produced: list[int]) -> None:
    """Changes the scores [vocab] of a row in place."""
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted({*prompt, *produced}), device=scores.device)
        values = scores[seen]
        scores[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if produced and (params.presence_penalty or params.frequency_penalty):
        tokens, counts = torch.tensor(produced, device=scores.device).unique(return_counts=True)
        scores[tokens] -= params.presence_penalty + params.frequency_penalty * counts
