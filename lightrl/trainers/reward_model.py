"""Reward-model training: of two answers to a prompt the chosen one is to score higher (Bradley-Terry)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightrl.algorithms.preference import bradley_terry_terms, pair_mean
from lightrl.config import RMConfig
from lightrl.data.example_packing import pair_places, pair_positions
from lightrl.data.examples import ExampleBuilder, ExampleFields
from lightrl.metrics import Statistics
from lightrl.models.lora import add_adapters
from lightrl.models.reward_model import check_reward_scores, load_reward_model
from lightrl.records import Example, PackedBatch
from lightrl.trainers.console import Shown
from lightrl.trainers.offline import Examples, OfflineTrainer


class RMTrainer(OfflineTrainer):
    """The loss is the mean over the pairs of the batch."""

    config: RMConfig
    kind = "rm"
    shown = Shown(
        step=("accuracy", "tokens/per_second", "loss", "margin"),
        evaluation=("eval/accuracy", "eval/margin", "eval/loss"),
        table=("eval/accuracy", "eval/margin", "eval/loss"),
    )

    def build_examples(self, records: list[Any]) -> list[Example]:
        data = self.config.data
        fields = ExampleFields(
            prompt=data.prompt_field,
            chosen=data.chosen_field,
            rejected=data.rejected_field,
            margin=data.margin_field,
        )
        return ExampleBuilder(self.tokenizer, fields, chat_template=data.chat_template).pairs(records)

    def load_model(self) -> nn.Module:
        model = load_reward_model(
            self.model_path,
            self.tokenizer,
            materialize=self.strategy.materializes_weights,
            seed=self.config.seed,
            trust_remote_code=self.config.trust_remote_code,
        )
        add_adapters(model.hf, self.config.lora, seed=self.config.seed, trained=("score",))
        if self.strategy.materializes_weights:
            check_reward_scores(model)
        return model

    def weight(self, batch: PackedBatch) -> float:
        return float(len(pair_positions(batch)))

    def loss(self, output: Tensor, batch: PackedBatch, examples: Examples, statistics: Statistics) -> Tensor:
        chosen_places, rejected_places = pair_places(batch)
        chosen, rejected = output[chosen_places], output[rejected_places]
        wanted = torch.tensor([examples[position].margin for position in pair_positions(batch)]).to(chosen)
        describe_pairs(chosen, rejected, statistics)
        return pair_mean(bradley_terry_terms(chosen, rejected, margins=wanted, centring_coef=self.config.centring_coef))


def describe_pairs(chosen: Tensor, rejected: Tensor, statistics: Statistics) -> None:
    """Of the rewards of both answers of every pair, [P]; a tie is no success."""
    with torch.no_grad():
        margins = chosen - rejected
        statistics.mean("accuracy", float((margins > 0).sum()), len(margins))
        statistics.mean("margin", float(margins.sum()), len(margins))
        statistics.mean("reward/chosen", float(chosen.sum()), len(margins))
        statistics.mean("reward/rejected", float(rejected.sum()), len(margins))
