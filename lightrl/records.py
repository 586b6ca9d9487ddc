"""What passes between the stages of a step. Frozen: a stage makes a new record, it never edits another's.

Loads no torch, so that a process that only reads texts starts at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One line of the data set, rendered and tokenised."""

    index: int  # place in the data set
    text: str  # after the chat template
    token_ids: tuple[int, ...]
    messages: tuple[Mapping[str, Any], ...] = ()  # before the chat template
    answer: Any = None
    fields: Mapping[str, Any] = field(default_factory=dict)  # every other field of the line, for the reward
    images: tuple[str, ...] = ()  # paths, in the order of their placeholders, of which token_ids has one each
    videos: tuple[str, ...] = ()
    num_media_tokens: int = 0  # that the model makes of them beyond the placeholders

    @property
    def num_tokens(self) -> int:
        """Places that it takes in the model's context."""
        return len(self.token_ids) + self.num_media_tokens


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
    prompt_ids: tuple[int, ...] = ()  # as the engine saw them, images expanded; left out: prompt.token_ids

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            object.__setattr__(self, "prompt_ids", self.prompt.token_ids)

    @property
    def key(self) -> tuple[int, int]:
        """Names the sample; equal on every rank and for every world size."""
        return (self.position, self.sample_index)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """All samples of one prompt."""

    samples: tuple[Sample, ...]
    rewards: tuple[float, ...]  # of each sample
    step: int  # that sampled it
    baseline: float | None = None  # the reward of a greedy response to the prompt, where one was asked for

    @property
    def has_signal(self) -> bool:
        """Whether the samples can be told apart by their rewards, and are not left out for want of a baseline."""
        has_baseline = self.baseline is None or not math.isnan(self.baseline)
        return len(set(self._known)) > 1 and has_baseline

    @property
    def is_solved(self) -> bool:
        """Whether every sample has a reward of 1 or more."""
        return min(self._known, default=0.0) >= 1

    @property
    def _known(self) -> list[float]:
        """Without those of rewards that failed, which are NaN."""
        return [reward for reward in self.rewards if not math.isnan(reward)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """A scored sample: what the learner trains on."""

    sample: Sample
    reward: float
    advantage: float
    shaping: float = 0.0  # what was added to the reward before it became an advantage
    is_trained: bool = True  # False: none of its tokens counts in a loss

    @property
    def num_tokens(self) -> int:
        return len(self.sample.prompt_ids) + len(self.sample.response_ids)

    @property
    def key(self) -> tuple[int, int]:
        """Names the sample: Sample.key."""
        return self.sample.key

    @property
    def label(self) -> str:
        """What messages call it."""
        return f"A sample of prompt {self.sample.prompt.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Tokens of a data set to learn from. A conversation's later questions are part of the response, untrained."""

    prompt_ids: tuple[int, ...]  # up to the first trained token
    response_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]  # one per response token, True = trained

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One line of a data set to learn from without sampling: an answer to imitate, or a pair of them."""

    index: int  # place in the data set
    where: str  # file and line, for messages
    answers: tuple[Answer, ...]  # one, or the chosen and the rejected
    margin: float = 0.0  # by how much the chosen one should win
    position: int = 0  # in the step's global batch

    @property
    def num_tokens(self) -> int:
        return sum(answer.num_tokens for answer in self.answers)

    @property
    def key(self) -> tuple[int, int]:
        return (self.position, 0)

    @property
    def label(self) -> str:
        return f"{self.where}: the example"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """A prompt as a vision-language model takes it."""

    token_ids: tuple[int, ...]  # L of them: a placeholder for each vision feature
    positions: Tensor  # [3, L] int64: frame, row and column for vision features, three times the same for text
    rope_delta: int  # place p behind the prompt has the position p + rope_delta
    feature_positions: Tensor  # [V] int64: which of the L tokens are vision features, ascending
    pixel_values: Tensor | None = None  # [P, patch_dim] float32: patches of all images and videos, in token order
    grid_thw: Tensor | None = None  # [M, 3] int64: of each image or video the patches in time, height and width


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionInputs:
    """The images and videos of several sequences, each once, and where their features stand among the tokens."""

    pixel_values: Tensor  # [P, patch_dim] float32
    grid_thw: Tensor  # [M, 3] int64
    feature_positions: Tensor  # [V] int64: which tokens of the pack are vision features, ascending
    feature_index: Tensor  # [V] int64: which feature each of them is; samples of one prompt share theirs

    def to(self, device: torch.device) -> VisionInputs:
        return replace(self, **{name: getattr(self, name).to(device) for name in self.__dataclass_fields__})


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """A micro-batch: S sequences laid end to end in T tokens, N of them response tokens. There is no padding.

    Sequences of equal length are adjacent, so that attention can batch them.
    """

    input_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, from 0 in each sequence; [3, T] for a model with images
    cu_seqlens: tuple[int, ...]  # S + 1 boundaries in the pack, from 0 to T
    score_index: Tensor  # [N] int64: place in the pack whose hidden state predicts the n-th response token
    targets: Tensor  # [N] int64: the response tokens
    sequence_index: Tensor  # [N] int64 in [0, S): whose token it is
    loss_mask: Tensor  # [N] bool, True = trained
    advantages: Tensor  # [N] float32
    sampler_logprobs: Tensor  # [N] float32
    old_logprobs: Tensor | None = None  # [N] float32, of the policy before the update
    ref_logprobs: Tensor | None = None  # [N] float32, of the frozen reference
    old_values: Tensor | None = None  # [N] float32, the critic's before the update
    returns: Tensor | None = None  # [N] float32, what the critic is trained towards
    temperature: float = 1.0  # the tokens were sampled at
    keys: tuple[tuple[int, int], ...]  # S times (prompt position, sample index)
    vision: VisionInputs | None = None  # None: no sequence has an image or video
    teacher_logprobs: Tensor | None = None  # [N] float32, of the teacher that is distilled
    selected: Tensor | None = None  # [N] bool, tokens that the loss treats apart; None: it treats none so
    in_policy_loss: Tensor | None = None  # [N] bool, tokens whose policy loss counts; None: all that are trained

    def to(self, device: torch.device) -> PackedBatch:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return replace(self, **{name: value.to(device) for name, value in values.items() if hasattr(value, "to")})


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """What the policy says of the response tokens of a PackedBatch."""

    logprobs: Tensor  # [N] float32, at the batch's temperature
    entropy: Tensor  # [N] float32, of the same distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class StateValues:
    """What the critic says of a PackedBatch."""

    values: Tensor  # [N] float32, of the state in which each response token was chosen
    final_values: Tensor  # [S] float32, of the state after the last token of each sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoresAndValues(TokenScores):
    """Of a policy and a critic that share a backbone."""

    values: Tensor  # both as in StateValues
    final_values: Tensor
