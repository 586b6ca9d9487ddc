"""Direct preference optimisation (arXiv:2305.18290): makes the chosen of two answers likelier than the rejected.

Both likelihoods are relative to the model that the training started from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightrl.algorithms.losses import sequence_means, sequence_sums
from lightrl.algorithms.preference import answer_log_ratios, pair_mean, preference_terms
from lightrl.config import DPOConfig
from lightrl.data.example_packing import pair_sequences
from lightrl.data.examples import ExampleBuilder, ExampleFields
from lightrl.metrics import Statistics
from lightrl.records import Example, PackedBatch, TokenScores
from lightrl.strategy import StrategyBase
from lightrl.trainers.fit import Shown, StepReport, Trainer
from lightrl.trainers.offline import (
    ExampleData,
    ExampleLearner,
    Examples,
    describe_pairs,
    load_policy,
    media_of,
    pair_weight,
    prepare_to_train,
)
from lightrl.trainers.reference import prepare_reference
from lightrl.trainers.run import RunContext


class DPOTrainer(Trainer):
    """Trains on pairs of answers. The reference scores every batch once, before the update."""

    config: DPOConfig
    kind = "dpo"
    shown = Shown(
        step=("accuracy", "tokens/per_second", "loss", "margin"),
        evaluation=("eval/accuracy", "eval/margin", "eval/probability/chosen"),
        table=("eval/accuracy", "eval/margin", "eval/probability/chosen"),
    )

    def __init__(self, run: RunContext | DPOConfig, *, strategy: StrategyBase | None = None) -> None:
        super().__init__(run, strategy=strategy)
        self.examples = ExampleData(self.run, self._build_examples)
        self.config, self.batches = self.examples.config, self.examples.describe()
        self.learner = ExampleLearner(self, self.examples, self.loss, pair_weight, self.pack)
        self.saved["sampler"] = self.examples.sampler
        self.model = prepare_to_train(self.run, self.config, lambda: load_policy(self.run, self.examples))
        self.reference = prepare_reference(self, self.model)
        self.resume()

    def step(self) -> StepReport:
        """Draws a batch, packs this rank's part, scores it with the reference, learns, reports."""
        return self.learner.step()

    def pack(self, mine: Sequence[Example]) -> list[PackedBatch]:
        """Packs this rank's examples with the reference's logprobs."""
        packs = self.examples.pack(mine)
        scores = self.strategy.forward(packs, model=self.reference)
        return [replace(batch, ref_logprobs=item.logprobs) for batch, item in zip(packs, scores, strict=True)]

    def evaluate(self) -> dict[str, float]:
        """Measures the loss on the held-out examples."""
        return self.learner.evaluate()

    def loss(self, output: TokenScores, batch: PackedBatch, examples: Examples, statistics: Statistics) -> Tensor:
        """Returns the mean preference loss of the pairs, from the log-ratios of policy and reference."""
        assert batch.ref_logprobs is not None
        config, num_answers = self.config, len(batch.keys)
        ratios = answer_log_ratios(
            output.logprobs,
            batch.ref_logprobs,
            batch.loss_mask,
            batch.sequence_index,
            num_answers,
            length_normalized=config.length_normalized,
        )
        chosen, rejected = pair_sequences(batch)
        describe_pairs(config.beta * ratios[chosen], config.beta * ratios[rejected], statistics)
        trained = torch.where(batch.loss_mask, output.logprobs.detach(), 0.0)
        likelihoods = sequence_sums(trained, batch.sequence_index, num_answers).exp()
        statistics.mean("probability/chosen", float(likelihoods[chosen].sum()), len(chosen))
        statistics.mean("probability/rejected", float(likelihoods[rejected].sum()), len(rejected))
        terms = preference_terms(
            config.loss, ratios[chosen] - ratios[rejected], beta=config.beta, label_smoothing=config.label_smoothing
        )
        if config.nll_coef:
            means = sequence_means(output.logprobs, batch.loss_mask, batch.sequence_index, num_answers)
            statistics.mean("nll/chosen", -float(means[chosen].detach().sum()), len(chosen))
            terms = terms - config.nll_coef * means[chosen]
        return pair_mean(terms)

    def _build_examples(self, records: Sequence[Any]) -> Sequence[Example]:
        data = self.config.data
        fields = ExampleFields(prompt=data.prompt_field, chosen=data.chosen_field, rejected=data.rejected_field)
        builder = ExampleBuilder(self.run.tokenizer, fields, chat_template=data.chat_template, media=media_of(self.run))
        return builder.pairs(records)
