"""Writes each token of the logged samples with what the training made of it (--log.tokens).

Nothing of it is entered by a run without the option: log_tokens() puts itself around the methods of one trainer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightrl.data.packing import Key, unpack
from lightrl.records import Experience, PackedBatch, Sample, TokenScores
from lightrl.rewards.scoring import RewardError

Values = dict[str, list[float | None]]  # of the tokens of a sample, by name; None is not finite

_DIGITS = 4  # of a value in samples.jsonl that matter


def log_tokens(trainer: Any) -> None:
    """Adds tokens and rewards to the lines of samples.jsonl; every rank calls it."""
    if not hasattr(trainer, "loss"):
        raise ValueError(
            f"--log.tokens needs a trainer that has loss(scores, batch), as those of GRPO and PPO: "
            f"{type(trainer).__name__} has none."
        )
    comm, folder, first = trainer.strategy.comm, trainer.folder, trainer.config.log.samples_per_step
    if not first:
        return
    log = TokenLog(first)
    loss, step, sample_row = trainer.loss, trainer.step, folder.sample_row

    def noted_loss(scores: TokenScores, batch: PackedBatch) -> Tensor:
        log.note(scores, batch)
        made: Tensor = loss(scores, batch)
        return made

    def observed_step() -> Any:
        report = step()
        log.merge(comm.all_gather_object(log.take()))
        return report

    def row_with_tokens(step: int, item: Experience) -> dict[str, Any]:
        return {**sample_row(step, item), **log.row(item, trainer.run.tokenizer.decode)}

    trainer.loss, trainer.step, folder.sample_row = noted_loss, observed_step, row_with_tokens
    if len(trainer.rewards.rewards) > 1:
        trainer.rewards.run = _noted(trainer.rewards.run, log)


def _noted(run: Callable[..., Sequence[Any]], log: TokenLog) -> Callable[..., Sequence[Any]]:
    def noted_run(label: str, samples: Sequence[Sample], budget: Any) -> Sequence[Any]:
        outcomes = run(label, samples, budget)
        log.note_rewards(label, samples, outcomes)
        return outcomes

    return noted_run


class TokenLog:
    """What is known of the tokens of the first samples of a step."""

    def __init__(self, first: int) -> None:
        self._first = first  # samples of a step; each of these is of one of as many prompts
        self._values: dict[Key, Values] = {}
        self._rewards: dict[
            tuple[Key, str], dict[str, float]
        ] = {}  # by sample and text: evaluations have such keys too

    def note(self, scores: TokenScores, batch: PackedBatch) -> None:
        """Keeps the values of a micro-batch. Of several updates on a sample, the first and the last one count."""
        before = scores.logprobs if batch.old_logprobs is None else batch.old_logprobs
        tensors = {
            "advantage": batch.advantages,
            "mask": batch.loss_mask.float(),
            "logprob": scores.logprobs,
            "ratio": (scores.logprobs - before).exp(),
            "engine_ratio": (scores.logprobs - batch.sampler_logprobs).exp(),
            "entropy": scores.entropy,
        }
        for name, tensor in tensors.items():
            for key, part in unpack(batch, tensor.detach()).items():
                known = self._values.setdefault(key, {}) if key[0] < self._first else {}
                if name == "ratio" or name not in known:
                    known[name] = [_short(value) for value in part.tolist()]

    def note_rewards(self, label: str, samples: Sequence[Sample], outcomes: Sequence[Any]) -> None:
        """Keeps a reward of each sample."""
        for sample, outcome in zip(samples, outcomes, strict=True):
            if sample.position < self._first and not isinstance(outcome, RewardError):
                self._rewards.setdefault((sample.key, sample.text), {})[label] = float(outcome)

    def take(self) -> tuple[dict[Key, Values], dict[tuple[Key, str], dict[str, float]]]:
        """Returns what this rank knows, and starts anew."""
        taken = self._values, self._rewards
        self._values, self._rewards = {}, {}
        return taken

    def merge(self, parts: Sequence[tuple[Mapping[Key, Values], Mapping[tuple[Key, str], dict[str, float]]]]) -> None:
        """Takes what all ranks know: the rank that trained a sample need not be the one that made it."""
        self._values = {key: values for part, _ in parts for key, values in part.items()}
        self._rewards = {key: values for _, part in parts for key, values in part.items()}

    def row(self, item: Experience, decode: Callable[[list[int]], str]) -> dict[str, Any]:
        """Returns what to write of a sample. One that was not trained has no more than the engine knew."""
        sample = item.sample
        tokens: dict[str, Any] = {
            "text": [decode([token]) for token in sample.response_ids],
            "version": list(sample.versions),
            "mask": [float(is_own) for is_own in sample.is_own],
            **self._values.pop(item.key, {}),
        }
        rewards = self._rewards.get((item.key, sample.text))
        return {"tokens": tokens, **({"rewards": rewards} if rewards else {})}


def _short(value: float) -> float | None:
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
