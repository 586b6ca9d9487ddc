"""What passes between the stages of a step. Frozen: a stage makes a new record, it never edits another's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One line of the data set, rendered and tokenised."""

    index: int  # place in the data set
    text: str  # after the chat template
    token_ids: tuple[int, ...]
    answer: Any = None
    fields: Mapping[str, Any] = field(default_factory=dict)  # every other field of the line, for the reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One response to one prompt, exactly as the engine produced it."""

    prompt: Prompt
    position: int  # of the prompt in the step's global batch: with sample_index it names a sample on any world size
    sample_index: int  # within the group
    response_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]  # of the distribution that was sampled from; one per response token
    versions: tuple[int, ...]  # weight version per response token
    finish_reason: FinishReason
    text: str  # response_ids decoded, special tokens skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """A scored sample: what the learner trains on."""

    sample: Sample
    reward: float
    advantage: float

    @property
    def num_tokens(self) -> int:
        return len(self.sample.prompt.token_ids) + len(self.sample.response_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """A micro-batch: S sequences laid end to end in T tokens, N of them response tokens. There is no padding.

    Sequences of equal length are adjacent, so that attention can batch them.
    """

    input_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, from 0 in each sequence
    cu_seqlens: tuple[int, ...]  # S + 1 boundaries in the pack, from 0 to T
    score_index: Tensor  # [N] int64: place in the pack whose hidden state predicts the n-th response token
    targets: Tensor  # [N] int64: the response tokens
    sequence_index: Tensor  # [N] int64 in [0, S): whose token it is
    loss_mask: Tensor  # [N] bool, True = trained
    advantages: Tensor  # [N] float32
    sampler_logprobs: Tensor  # [N] float32
    old_logprobs: Tensor | None = None  # [N] float32, of the policy before the update
    ref_logprobs: Tensor | None = None  # [N] float32, of the frozen reference
    temperature: float = 1.0  # the tokens were sampled at
    keys: tuple[tuple[int, int], ...]  # S times (prompt position, sample index)

    def to(self, device: torch.device) -> PackedBatch:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        moved = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **moved)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """What the policy says of the response tokens of a PackedBatch."""

    logprobs: Tensor  # [N] float32, at the batch's temperature
    entropy: Tensor  # [N] float32, of the same distribution
