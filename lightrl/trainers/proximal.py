"""Old logprobs of other policies than the one before the update; used only for samples of older weights."""

from __future__ import annotations

from collections.abc import Set

import torch

from lightrl.algorithms.corrections import proximal_share
from lightrl.config import AlgorithmConfig
from lightrl.data.packing import Key
from lightrl.trainers.policy_step import Batch


def with_other_policy(batch: Batch, algorithm: AlgorithmConfig, step: int, older: Set[Key]) -> Batch:
    """Adds the values that the ratio compares with, if they are not the logprobs before the update.

    Args:
        batch: With the logprobs before the update, if the options ask for them.
        step: The number of the step; its weights have this version, and the update makes the next one.
        older: The samples that have tokens of older weights.
    """
    if algorithm.ratio_to == "engine":
        return batch.with_columns(old_logprobs=batch.sampler_logprobs)
    if algorithm.ratio_to == "interpolate":
        versions = {item.key: torch.tensor(item.sample.versions, dtype=torch.int64) for item in batch.samples}
        shares = {
            key: proximal_share(part, proximal_version=step, current_version=step + 1).tolist()
            for key, part in versions.items()
        }
        return batch.with_columns(proximal_share=shares)
    if algorithm.used_correction == "none":
        # A correction compares with the policy that sampled; without one, the ratio must.
        sampled = {key: part for key, part in batch.sampler_logprobs.items() if key in older}
        return batch.with_columns(old_logprobs={**batch.columns["old_logprobs"], **sampled})
    return batch
