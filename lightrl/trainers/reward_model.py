"""Reward-model training (Bradley-Terry): makes the chosen of two answers score higher than the rejected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightrl.algorithms.preference import bradley_terry_terms, pair_mean
from lightrl.config import RMConfig
from lightrl.data.example_packing import pair_positions, pair_sequences
from lightrl.data.examples import ExampleBuilder, ExampleFields
from lightrl.data.prompts import require_field
from lightrl.metrics import Statistics
from lightrl.models.lora import add_adapters
from lightrl.models.reward_model import HEAD_NAME, check_reward_scores, load_reward_model
from lightrl.records import Example, PackedBatch
from lightrl.strategy import StrategyBase
from lightrl.trainers.fit import Shown, StepReport, Trainer
from lightrl.trainers.offline import (
    ExampleData,
    ExampleLearner,
    Examples,
    describe_pairs,
    media_of,
    pair_weight,
    prepare_to_train,
)
from lightrl.trainers.run import RunContext, fix_for_run


class RMTrainer(Trainer):
    """Trains a sequence classifier with one output on pairs of answers. The loss is the mean over the pairs."""

    config: RMConfig
    kind = "rm"
    shown = Shown(
        step=("accuracy", "tokens/per_second", "loss", "margin"),
        evaluation=("eval/accuracy", "eval/margin", "eval/loss"),
        table=("eval/accuracy", "eval/margin", "eval/loss"),
    )

    def __init__(self, run: RunContext | RMConfig, *, strategy: StrategyBase | None = None) -> None:
        super().__init__(run, strategy=strategy)
        self.examples = ExampleData(self.run, self._build_examples)
        self.config, self.batches = self.examples.config, self.examples.describe()
        self.learner = ExampleLearner(self, self.examples, self.loss, pair_weight)
        self.saved["sampler"] = self.examples.sampler
        self.model = prepare_to_train(self.run, self.config, self._load_model)
        self.resume()

    def step(self) -> StepReport:
        """Draws a batch, packs this rank's part, learns, reports."""
        return self.learner.step()

    def evaluate(self) -> dict[str, float]:
        """Measures the loss on the held-out examples."""
        return self.learner.evaluate()

    def loss(self, output: Tensor, batch: PackedBatch, examples: Examples, statistics: Statistics) -> Tensor:
        """Returns the mean Bradley-Terry loss of the pairs. output: the score of each sequence, [S]."""
        chosen_index, rejected_index = pair_sequences(batch)
        chosen, rejected = output[chosen_index], output[rejected_index]
        margins = torch.tensor([examples[position].margin for position in pair_positions(batch)]).to(chosen)
        describe_pairs(chosen, rejected, statistics)
        terms = bradley_terry_terms(chosen, rejected, margins=margins, centring_coef=self.config.centring_coef)
        return pair_mean(terms)

    def _load_model(self) -> nn.Module:
        materialize = self.strategy.materializes_weights
        model = load_reward_model(
            self.run.model_path,
            self.run.tokenizer,
            materialize=materialize,
            seed=self.config.seed,
            trust_remote_code=self.config.trust_remote_code,
        )
        fix_for_run(self.run, model)
        add_adapters(model.hf, self.config.lora, seed=self.config.seed, trained=(HEAD_NAME,))
        if materialize:
            check_reward_scores(model)
        return model

    def _build_examples(self, records: Sequence[Any]) -> Sequence[Example]:
        data = self.config.data
        if records is self.run.train_records and data.margin_field != "margin":
            require_field(records, data.margin_field, "--data.margin_field")
        fields = ExampleFields(
            prompt=data.prompt_field, chosen=data.chosen_field, rejected=data.rejected_field, margin=data.margin_field
        )
        builder = ExampleBuilder(
            self.run.tokenizer, fields, chat_template=data.chat_template, is_scored=True, media=media_of(self.run)
        )
        return builder.pairs(records)
