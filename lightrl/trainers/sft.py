"""Supervised fine-tuning: makes the assistant's tokens likelier, all with the same weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightrl.algorithms.losses import mean_loss, sequence_sums, token_mean
from lightrl.config import SFTConfig
from lightrl.data.examples import ExampleBuilder, ExampleFields
from lightrl.metrics import Statistics
from lightrl.records import Example, PackedBatch, TokenScores
from lightrl.strategy import StrategyBase
from lightrl.trainers.fit import Shown, StepReport, Trainer
from lightrl.trainers.offline import (
    ExampleData,
    ExampleLearner,
    Examples,
    load_policy,
    media_of,
    prepare_to_train,
)
from lightrl.trainers.run import RunContext


class SFTTrainer(Trainer):
    """Trains on responses. The loss is the mean over all trained tokens of the batch, however it is split."""

    config: SFTConfig
    kind = "sft"
    shown = Shown(
        step=("loss", "tokens/per_second"),
        evaluation=("eval/loss", "eval/probability"),
        table=("eval/probability", "eval/loss", "loss"),
    )

    def __init__(self, run: RunContext | SFTConfig, *, strategy: StrategyBase | None = None) -> None:
        super().__init__(run, strategy=strategy)
        self.examples = ExampleData(self.run, self._build_examples)
        self.config, self.batches = self.examples.config, self.examples.describe()
        self.learner = ExampleLearner(self, self.examples, self.loss, self.weight)
        self.saved["sampler"] = self.examples.sampler
        self.model = prepare_to_train(self.run, self.config, lambda: load_policy(self.run, self.examples))
        self.resume()

    def step(self) -> StepReport:
        """Draws a batch, packs this rank's part, learns, reports."""
        return self.learner.step()

    def evaluate(self) -> dict[str, float]:
        """Measures the loss on the held-out examples."""
        return self.learner.evaluate()

    def weight(self, batch: PackedBatch) -> Tensor:
        """Returns the number of trained tokens."""
        return batch.loss_mask.sum()

    def loss(self, output: TokenScores, batch: PackedBatch, examples: Examples, statistics: Statistics) -> Tensor:
        """Returns the mean negative log likelihood of the trained tokens."""
        weights = token_mean(batch.loss_mask, batch.sequence_index, len(batch.keys))
        trained = torch.where(batch.loss_mask, output.logprobs.detach(), 0.0)
        likelihoods = sequence_sums(trained, batch.sequence_index, len(batch.keys)).exp()
        num_examples = sum(position >= 0 for position, _ in batch.keys)  # a dummy has no tokens
        # The share of samples at temperature 1 that would be exactly this response.
        statistics.mean("probability", float(likelihoods.sum()) if num_examples else 0.0, num_examples)
        return mean_loss(-output.logprobs, weights)

    def _build_examples(self, records: Sequence[Any]) -> Sequence[Example]:
        data = self.config.data
        fields = ExampleFields(prompt=data.prompt_field, response=data.response_field)
        builder = ExampleBuilder(
            self.run.tokenizer,
            fields,
            chat_template=data.chat_template,
            train_on=data.train_on,
            media=media_of(self.run),
        )
        return builder.responses(records)
