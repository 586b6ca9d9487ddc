"""Records that pass between the stages of a step. They are frozen: a stage makes new records and edits none.

The module does not import torch, so a process that only reads texts starts quickly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import compress
from operator import and_
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort", "turns", "context"]


class Status(Enum):
    """The state of a sample, ordered from best to worst. Only a completed sample is scored and trained on."""

    ARCHIVED = "archived"  # trained on, or put away for good
    COMPLETED = "completed"
    FILTERED = "filtered"  # rejected by its workflow or by a filter of the run
    EXPIRED = "expired"  # none of its tokens is recent enough to train on
    INIT = "init"  # not begun
    ABORTED = "aborted"  # stopped halfway; it can be continued
    FAILED = "failed"  # its workflow raised an error or ran out of time

    def to(self, following: Status) -> Status:
        """Returns the given status; raises ValueError if it cannot follow this one."""
        if following not in _FOLLOWING[self]:
            raise _cannot_follow(self, following)
        return following

    @staticmethod
    def worst(statuses: Iterable[Status]) -> Status:
        """Returns the status of a group: that of its worst member."""
        return max(statuses, key=_BADNESS.__getitem__)


_FOLLOWING: dict[Status, frozenset[Status]] = {
    Status.INIT: frozenset({Status.COMPLETED, Status.ABORTED, Status.FAILED}),
    Status.ABORTED: frozenset({Status.COMPLETED, Status.ABORTED, Status.FAILED, Status.EXPIRED}),
    Status.COMPLETED: frozenset({Status.FILTERED, Status.EXPIRED, Status.ARCHIVED}),
    Status.EXPIRED: frozenset({Status.INIT, Status.ARCHIVED}),  # INIT: generated again from its prompt
    Status.FILTERED: frozenset(),
    Status.FAILED: frozenset(),
    Status.ARCHIVED: frozenset(),
}
_BADNESS = {status: badness for badness, status in enumerate(Status)}


def _cannot_follow(status: Status, following: Status) -> ValueError:
    allowed = ", ".join(sorted(item.value for item in _FOLLOWING[status])) or "nothing"
    return ValueError(
        f"A sample that is {status.value} cannot become {following.value}: {allowed} can follow {status.value}."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt of the data set: one record, rendered and tokenised."""

    index: int  # in the data set
    text: str  # after the chat template
    token_ids: tuple[int, ...]
    messages: tuple[Mapping[str, Any], ...] = ()  # before the chat template
    answer: Any = None
    fields: Mapping[str, Any] = field(default_factory=dict)  # the other fields of the line, for the reward
    images: tuple[str, ...] = ()  # paths, in the order of their placeholders; token_ids has one placeholder for each
    videos: tuple[str, ...] = ()
    num_media_tokens: int = 0  # tokens that images and videos add beyond their placeholders

    @property
    def num_tokens(self) -> int:
        """Tokens that the prompt takes in the model's context."""
        return len(self.token_ids) + self.num_media_tokens


def inner_value(record: Mapping[str, Any], name: str) -> Any:
    """Returns a field's value, or that of a field inside a field, named as reward_model.ground_truth; else None."""
    if name in record:
        return record[name]
    outer, _, inner = name.partition(".")
    inside = record.get(outer)
    return inner_value(inside, inner) if inner and isinstance(inside, Mapping) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A response to a prompt as the engine produced it; tools and environments may have written parts of it."""

    prompt: Prompt
    position: int  # of the prompt in the step's global batch; with sample_index it names a sample at any world size
    sample_index: int  # within the group
    response_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]  # one per response token, of the distribution that was sampled from
    versions: tuple[int, ...]  # weight version per response token
    finish_reason: FinishReason
    text: str  # response_ids decoded, special tokens skipped
    prompt_ids: tuple[int, ...] = ()  # as the engine saw them, with images expanded; default: prompt.token_ids
    own: tuple[bool, ...] = ()  # one per response token, True = the policy chose it; empty: it chose all of them
    routing: NDArray[np.int16] | None = field(default=None, compare=False, repr=False)
    """[tokens, layers, k]: the k experts that the engine of a mixture of experts chose for each token of prompt and
    response, in each layer that has a router. None unless --routing.replay asks for them."""
    allowed: NDArray[np.int32] | None = field(default=None, compare=False, repr=False)
    """[m, 2]: pairs of an index in the response and a token that --top_p and --top_k left to draw from there, including
    the token that was drawn. At an index without a pair, or if None, the whole vocabulary was left."""
    images: tuple[bytes, ...] = field(default=(), repr=False)
    """Image files that environments and tools have shown, in the order of their tokens, which are in response_ids or,
    for a prompt without images of its own, in prompt_ids."""
    turns: tuple[int, ...] = (0,)  # index in response_ids at which each turn of the policy begins
    reward: float | None = None  # given by the workflow; --reward episode reads it
    turn_rewards: tuple[float, ...] = ()  # each turn's share of it; if shorter than turns, later turns earned nothing
    numbers: Mapping[str, float] = field(default_factory=dict)  # what the workflow counted, such as tool calls
    status: Status = Status.COMPLETED
    ticket: int = -1  # index of the prompt in the run's one order; -1: the run counts by step and position alone
    start_version: int = -1  # version of the weights when the ticket was started; -1: those of the step
    branches: tuple[Sample, ...] = ()  # other conversations of the episode, trained with this sample's advantage
    is_scored: bool = False  # the workflow asked for the run's rewards itself, so its reward is final
    components: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Weight and value of each reward, by label; NaN if it does not apply, or failed without a --reward_failure_value.
    Kept only for an estimator that needs them."""
    judged: float | None = None  # what --dynamic_sampling.reward counts in its place, if another rank has scored it

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            object.__setattr__(self, "prompt_ids", self.prompt.token_ids)
        if self.own and len(self.own) != len(self.response_ids):
            raise _wrong_length_of_own(len(self.own), len(self.response_ids))

    @property
    def key(self) -> tuple[int, int]:
        """The name of the sample, which is the same on every rank and at every world size."""
        return (self.position, self.sample_index)

    @property
    def is_own(self) -> tuple[bool, ...]:
        """Whether the policy chose each response token."""
        return self.own or (True,) * len(self.response_ids)

    @property
    def num_own(self) -> int:
        """Number of response tokens that the policy chose."""
        return sum(self.own) if self.own else len(self.response_ids)

    @property
    def oldest_version(self) -> int:
        """Version of the oldest weights that chose a token; without such a token, of those it was started under."""
        chosen = compress(self.versions, self.own) if self.own else self.versions
        return min(chosen, default=self.start_version)

    def to(self, status: Status) -> Sample:
        """Returns the sample with this status; raises ValueError if it cannot follow the present one."""
        return replace(self, status=self.status.to(status))


def _wrong_length_of_own(given: int, num_tokens: int) -> ValueError:
    return ValueError(f"own has {given} values for a response of {num_tokens} tokens: give one per token.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """The samples of one prompt and their rewards."""

    samples: tuple[Sample, ...]
    rewards: tuple[float, ...]  # one per sample; NaN where the reward failed
    step: int  # the step that sampled the group
    baseline: float | None = None  # the reward of a greedy response to the prompt, if the estimator asks for one

    @property
    def has_signal(self) -> bool:
        """Whether the group can teach something: its rewards differ, and no baseline is missing.

        If the samples keep each reward by itself, for an estimator that compares these, one of the rewards must differ.
        """
        has_baseline = self.baseline is None or not math.isnan(self.baseline)
        return has_baseline and any(len(values) > 1 for values in self._compared)

    @property
    def ticket(self) -> int:
        """The ticket, which all samples of the group share."""
        return self.samples[0].ticket

    @property
    def start_version(self) -> int:
        """Version of the weights under which the ticket was started."""
        return self.samples[0].start_version

    @property
    def oldest_version(self) -> int:
        """Version of the oldest weights that chose any of the group's tokens."""
        return min(sample.oldest_version for sample in self.samples)

    @property
    def status(self) -> Status:
        """The status of the group, which is that of its worst member."""
        return Status.worst(sample.status for sample in self.samples)

    @property
    def is_solved(self) -> bool:
        """Whether every sample has a reward of 1 or more."""
        return min(self._known_rewards, default=0.0) >= 1

    @property
    def _known_rewards(self) -> list[float]:
        """The rewards that did not fail."""
        return [reward for reward in self.rewards if not math.isnan(reward)]

    @property
    def _compared(self) -> list[set[float]]:
        """The different values of each reward that the samples keep, or else of the sums; failures are left out."""
        pairs = zip(self.samples, self.rewards, strict=True)
        kept = [sample.components for sample, reward in pairs if sample.components and not math.isnan(reward)]
        labels = {label for components in kept for label in components}
        values = [{components[label][1] for components in kept if label in components} for label in labels]
        return [{value for value in one if not math.isnan(value)} for one in values] or [set(self._known_rewards)]

    def at(self, position: int) -> ScoredGroup:
        """Returns the group moved to another position of the batch."""
        return replace(self, samples=tuple(replace(sample, position=position) for sample in self.samples))


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """A scored sample that the learner trains on."""

    sample: Sample
    reward: float
    advantage: float
    shaping: float = 0.0  # added to the reward before it became an advantage
    is_trained: bool = True  # False: none of its tokens counts in a loss
    min_version: int = 0  # tokens of older weights are too old to count in a loss

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response."""
        return len(self.sample.prompt_ids) + len(self.sample.response_ids)

    @property
    def trained_tokens(self) -> tuple[bool, ...]:
        """Whether each response token counts in a loss."""
        own = self.sample.is_own if self.is_trained else (False,) * len(self.sample.response_ids)
        is_young = (version >= self.min_version for version in self.sample.versions)
        return tuple(map(and_, own, is_young)) if self.min_version else own

    @property
    def num_trained(self) -> int:
        """Number of tokens that count in a loss, including those of the sample's branches."""
        everything = (self.sample, *self.sample.branches)
        if self.min_version:
            return sum(replace(self, sample=one).trained_tokens.count(True) for one in everything)
        return self.is_trained * sum(one.num_own for one in everything)

    @property
    def key(self) -> tuple[int, int]:
        """The name of the sample: Sample.key."""
        return self.sample.key

    @property
    def label(self) -> str:
        """Subject of a message about the sample."""
        return f"A sample of prompt {self.sample.prompt.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A prompt and a response of a data set. Later questions in a conversation are untrained parts of the response."""

    prompt_ids: tuple[int, ...]  # up to the first trained token
    response_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]  # one per response token, True = trained
    images: tuple[str, ...] = ()  # paths, in the order of their placeholders; prompt_ids has one placeholder for each
    videos: tuple[str, ...] = ()
    num_media_tokens: int = 0  # tokens that images and videos add beyond their placeholders

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt_ids) + self.num_media_tokens + len(self.response_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """An example that is learned from without sampling: an answer to imitate, or a pair of answers to compare."""

    index: int  # in the data set
    where: str  # file and line, for messages
    answers: tuple[Answer, ...]  # one, or the chosen and the rejected one; none if the text is too long to tokenise
    margin: float = 0.0  # by how much the chosen one should win
    position: int = 0  # in the step's global batch
    too_long: str = ""  # the error for an example without answers

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers with their prompts."""
        return sum(answer.num_tokens for answer in self.answers)

    @property
    def key(self) -> tuple[int, int]:
        """The name of the example, which is the same at any world size."""
        return (self.position, 0)

    @property
    def label(self) -> str:
        """Subject of a message about the example."""
        return f"{self.where}: the example"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """A prompt in the form that a vision-language model takes."""

    token_ids: tuple[int, ...]  # L of them, with a placeholder for each vision feature
    positions: Tensor  # [3, L] int64: frame, row and column of a vision feature; the same three times for text
    rope_delta: int  # a token after the prompt, at index i, has the position i + rope_delta
    feature_positions: Tensor  # [V] int64: which of the L tokens are vision features, ascending
    pixel_values: Tensor | None = None  # [P, patch_dim] float32: patches of all images and videos, in token order
    grid_thw: Tensor | None = None  # [M, 3] int64: patches of each image or video in time, height and width


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionInputs:
    """The images and videos of a pack, each once, and the tokens that stand for their features."""

    pixel_values: Tensor  # [P, patch_dim] float32
    grid_thw: Tensor  # [M, 3] int64
    feature_positions: Tensor  # [V] int64: which tokens of the pack are vision features, ascending
    feature_index: Tensor  # [V] int64: which feature each of them is; samples of one prompt share theirs

    def to(self, device: torch.device) -> VisionInputs:
        """Copies the tensors to a device."""
        return replace(self, **{name: getattr(self, name).to(device) for name in self.__dataclass_fields__})


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """A micro-batch: S sequences laid end to end in T tokens, of which N are response tokens. There is no padding.

    Sequences of equal length are adjacent, so that attention can batch them.
    """

    input_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, from 0 in each sequence; [3, T] for a model with images
    cu_seqlens: tuple[int, ...]  # S + 1 boundaries in the pack, from 0 to T
    score_index: Tensor  # [N] int64: the token whose hidden state predicts the n-th response token
    targets: Tensor  # [N] int64: the response tokens
    sequence_index: Tensor  # [N] int64 in [0, S): the sequence that the token belongs to
    loss_mask: Tensor  # [N] bool, True = trained
    advantages: Tensor  # [N] float32
    sampler_logprobs: Tensor  # [N] float32
    versions: Tensor | None = None  # [N] int64, weights that made each token; None: the batch was not sampled
    old_logprobs: Tensor | None = None  # [N] float32, of the policy before the update
    proximal_share: Tensor | None = None  # [N] float32, where old_logprobs are between sampler (0) and policy (1)
    ref_logprobs: Tensor | None = None  # [N] float32, of the frozen reference
    old_values: Tensor | None = None  # [N] float32, the critic's before the update
    returns: Tensor | None = None  # [N] float32, what the critic is trained towards
    temperature: float = 1.0  # at which the tokens were sampled
    keys: tuple[tuple[int, int], ...]  # S of (prompt position, sample index)
    vision: VisionInputs | None = None  # None: no sequence has an image or video
    teacher_logprobs: Tensor | None = None  # [N] float32, of the teacher that the policy learns from
    selected: Tensor | None = None  # [N] bool, tokens that the loss treats differently; None: no token
    in_policy_loss: Tensor | None = None  # [N] bool, tokens whose policy loss counts; None: all trained tokens
    routing: Tensor | None = None  # [T, layers, k] int16: the experts to use for each token, -1 for the router's own
    allowed: Tensor | None = None  # [m, 2] int32, (n, token) that the n-th response token was drawn from; see Sample

    @property
    def last_tokens(self) -> tuple[int, ...]:
        """S positions in the pack: the last token of each sequence."""
        return tuple(end - 1 for end in self.cu_seqlens[1:])

    def to(self, device: torch.device) -> PackedBatch:
        """Copies the tensors to a device."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return replace(self, **{name: value.to(device) for name, value in values.items() if hasattr(value, "to")})


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """The policy's scores of the response tokens of a PackedBatch."""

    logprobs: Tensor  # [N] float32, at the batch's temperature
    entropy: Tensor  # [N] float32, of the same distribution
    routing: RoutingScores | None = None  # None unless --routing.* asks for it


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingScores:
    """What the routers of a mixture of experts did in a forward."""

    logits: tuple[Tensor, ...]  # [T, E] of each router; empty without router losses
    experts: tuple[Tensor, ...]  # [T, k], the experts that each router used
    is_sigmoid: bool  # an expert's probability is its share of the sigmoids, not a softmax
    num_layers: int  # layers that have a router
    num_routed: int  # tokens for which the engine's experts are known
    num_tokens_differ: int  # those among them for which the trainer would have chosen other experts in some layer
    num_choices_differ: int  # pairs of such a token and a layer


@dataclass(frozen=True, slots=True, kw_only=True)
class StateValues:
    """The critic's values of the states of a PackedBatch."""

    values: Tensor  # [N] float32, of the state in which each response token was chosen: the tokens before it
    final_values: Tensor  # [S] float32, of the state after the last token of each sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoresAndValues(TokenScores):
    """Scores and values of a policy and a critic that share a backbone."""

    values: Tensor  # both as in StateValues
    final_values: Tensor
