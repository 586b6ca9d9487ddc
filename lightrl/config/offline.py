"""What a run is told that learns from answers in its data and samples none: SFT, reward models, DPO."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lightrl.config.runs import RunConfig
from lightrl.config.sections import (
    ExampleDataConfig,
    ExampleEvalConfig,
    MarginPairDataConfig,
    PairDataConfig,
    ResponseDataConfig,
)
from lightrl.config.values import check_at_least_one, check_finite, check_not_negative


@dataclass(kw_only=True, slots=True)
class OfflineConfig(RunConfig):
    """What a trainer needs whose data has the answers."""

    max_steps: int = 0
    """Steps, over as many epochs as they take; 0 makes num_epochs passes."""
    num_epochs: int = 1
    """Passes over the data, used when max_steps is 0; the last batch may be smaller."""
    batch_size: int = 64
    """Examples (or pairs) per step, over all ranks; a step is one optimizer step."""
    micro_batch_size: int = 0
    """Examples (or pairs) per forward and backward on a rank; 0 leaves it to max_tokens_per_microbatch. It changes
    memory and speed, never the result."""
    max_tokens_per_microbatch: int = 16384
    """Tokens per forward and backward on a rank; both answers of a pair count, and stay together."""
    data: ExampleDataConfig = field(default_factory=ExampleDataConfig)
    """Data."""
    eval: ExampleEvalConfig = field(default_factory=ExampleEvalConfig)
    """Evaluation."""

    def check(self) -> None:
        RunConfig.check(self)
        check_not_negative(
            {
                "data.max_tokens": self.data.max_tokens,
                "eval.every": self.eval.every,
                "eval.max_examples": self.eval.max_examples,
            }
        )
        check_at_least_one({"batch_size": self.batch_size, "num_epochs": self.num_epochs})

    @property
    def samples_per_update(self) -> int:
        return self.batch_size

    @property
    def optimizer_steps_per_step(self) -> int:
        return 1


@dataclass(kw_only=True, slots=True)
class SFTConfig(OfflineConfig):
    """Train a language model on responses."""

    train_data: str = "builtin:addition-answers"
    """A .jsonl or .parquet file, hf:NAME[:SPLIT] or a data set's folder, or builtin:addition-answers. A line has a
    prompt and a response, or messages."""
    eval_data: str = ""
    """The same for evaluation; empty evaluates on the held-out part of a built-in data set, else not at all."""
    data: ResponseDataConfig = field(default_factory=ResponseDataConfig)
    """Data."""


@dataclass(kw_only=True, slots=True)
class PairConfig(OfflineConfig):
    """What a trainer needs that learns from pairs of answers."""

    train_data: str = "builtin:addition-pairs"
    """A .jsonl or .parquet file, hf:NAME[:SPLIT] or a data set's folder, or builtin:addition-pairs. A line has a
    prompt, a chosen and a rejected answer, or two conversations."""
    eval_data: str = ""
    """The same for evaluation; empty evaluates on the held-out part of a built-in data set, else not at all."""
    data: PairDataConfig = field(default_factory=PairDataConfig)
    """Data."""


@dataclass(kw_only=True, slots=True)
class RMConfig(PairConfig):
    """Train a reward model on pairs of answers."""

    centring_coef: float = 0.0
    """Weight of (chosen score + rejected score)^2 in the loss, which holds the scores around 0; 0.01 is usual."""
    data: MarginPairDataConfig = field(default_factory=MarginPairDataConfig)
    """Data."""

    def check(self) -> None:
        PairConfig.check(self)
        check_finite({"centring_coef": self.centring_coef})
        check_not_negative({"centring_coef": self.centring_coef})


@dataclass(kw_only=True, slots=True)
class DPOConfig(PairConfig):
    """Train a language model on pairs of answers by DPO."""

    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """The loss of a pair: sigmoid is DPO's own."""
    beta: float = 0.1
    """How strongly the policy is held to the model it started from; small lets it go far."""
    label_smoothing: float = 0.0
    """Share of pairs whose labels are taken to be wrong, below 0.5; of the sigmoid loss only."""
    length_normalized: bool = False
    """Compare the mean of an answer's log-ratios over its tokens in place of their sum."""

    def check(self) -> None:
        PairConfig.check(self)
        check_finite({"beta": self.beta})
        if not self.beta > 0:
            raise ValueError(f"--beta is {self.beta}: it must be above 0.")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"--label_smoothing is {self.label_smoothing}: it must be at least 0 and below 0.5.")
        if self.label_smoothing and self.loss != "sigmoid":
            raise ValueError(f"--label_smoothing belongs to --loss sigmoid, not to {self.loss}: leave it out.")
