"""Supervised fine-tuning: the assistant's tokens become likelier, every one as much as any other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightrl.algorithms.losses import mean_loss, token_mean
from lightrl.algorithms.tokens import sequence_sums
from lightrl.config import SFTConfig
from lightrl.data.examples import ExampleBuilder, ExampleFields
from lightrl.metrics import Statistics
from lightrl.records import Example, PackedBatch, TokenScores
from lightrl.trainers.console import Shown
from lightrl.trainers.offline import Examples, OfflineTrainer


class SFTTrainer(OfflineTrainer):
    """The loss is the mean over all trained tokens of the batch, however it is split."""

    config: SFTConfig
    kind = "sft"
    shown = Shown(
        step=("loss", "tokens/per_second"),
        evaluation=("eval/loss", "eval/probability"),
        table=("eval/probability", "eval/loss", "loss"),
    )

    def build_examples(self, records: list[Any]) -> list[Example]:
        data = self.config.data
        fields = ExampleFields(prompt=data.prompt_field, response=data.response_field)
        builder = ExampleBuilder(self.tokenizer, fields, chat_template=data.chat_template, train_on=data.train_on)
        return builder.responses(records)

    def load_model(self) -> nn.Module:
        return self.load_policy(is_reference=False)

    def weight(self, batch: PackedBatch) -> Tensor:
        return batch.loss_mask.sum()

    def loss(self, output: TokenScores, batch: PackedBatch, examples: Examples, statistics: Statistics) -> Tensor:
        weights = token_mean(batch.loss_mask, batch.sequence_index, len(batch.keys))
        trained = torch.where(batch.loss_mask, output.logprobs.detach(), 0.0)
        likelihoods = sequence_sums(trained, batch.sequence_index, len(batch.keys)).exp()
        num_examples = sum(position >= 0 for position, _ in batch.keys)  # none in a dummy
        # The share of samples at temperature 1 that would be just this response.
        statistics.mean("probability", float(likelihoods.sum()) if num_examples else 0.0, num_examples)
        return mean_loss(-output.logprobs, weights)
