"""Direct preference optimisation (arXiv:2305.18290): of two answers to a prompt the chosen one is to become likelier,
measured against the model that the training started from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightrl.algorithms.preference import answer_log_ratios, pair_mean, preference_terms
from lightrl.algorithms.tokens import sequence_sums
from lightrl.config import DPOConfig
from lightrl.data.example_packing import pair_places, pair_positions
from lightrl.data.examples import ExampleBuilder, ExampleFields
from lightrl.metrics import Statistics
from lightrl.models.lora import WithoutAdapters
from lightrl.records import Example, PackedBatch, TokenScores
from lightrl.trainers.console import Shown
from lightrl.trainers.offline import Examples, OfflineTrainer
from lightrl.trainers.reward_model import describe_pairs


class DPOTrainer(OfflineTrainer):
    """The loss is the mean over the pairs of the batch; the reference scores every batch once, before the update."""

    config: DPOConfig
    reference: nn.Module
    kind = "dpo"
    shown = Shown(
        step=("accuracy", "tokens/per_second", "loss", "margin"),
        evaluation=("eval/accuracy", "eval/margin", "eval/probability/chosen"),
        table=("eval/accuracy", "eval/margin", "eval/probability/chosen"),
    )

    def build_examples(self, records: list[Any]) -> list[Example]:
        data = self.config.data
        fields = ExampleFields(prompt=data.prompt_field, chosen=data.chosen_field, rejected=data.rejected_field)
        return ExampleBuilder(self.tokenizer, fields, chat_template=data.chat_template).pairs(records)

    def load_model(self) -> nn.Module:
        return self.load_policy(is_reference=False)

    def build_models(self) -> nn.Module:
        policy = super().build_models()
        if self.config.lora.is_on:
            self.reference = WithoutAdapters(policy)
            return policy
        # Only now: before the policy was sharded, rank 0 would have held both models whole.
        with self.strategy.comm.phase("loading the reference model", local=True):
            reference = self.load_policy(is_reference=True)
        self.reference = self.strategy.prepare(reference, is_rlhf=True)
        return policy

    def batches(self, mine: Sequence[Example]) -> list[PackedBatch]:
        """With the logprobs of the reference."""
        packs = super().batches(mine)
        scores = self.strategy.forward(packs, model=self.reference)
        return [replace(pack, ref_logprobs=found.logprobs) for pack, found in zip(packs, scores, strict=True)]

    def weight(self, batch: PackedBatch) -> float:
        return float(len(pair_positions(batch)))

    def loss(self, output: TokenScores, batch: PackedBatch, examples: Examples, statistics: Statistics) -> Tensor:
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
        chosen, rejected = pair_places(batch)
        describe_pairs(config.beta * ratios[chosen], config.beta * ratios[rejected], statistics)
        trained = torch.where(batch.loss_mask, output.logprobs.detach(), 0.0)
        likelihoods = sequence_sums(trained, batch.sequence_index, num_answers).exp()
        statistics.mean("probability/chosen", float(likelihoods[chosen].sum()), len(chosen))
        statistics.mean("probability/rejected", float(likelihoods[rejected].sum()), len(rejected))
        return pair_mean(
            preference_terms(
                config.loss,
                ratios[chosen] - ratios[rejected],
                beta=config.beta,
                label_smoothing=config.label_smoothing,
            )
        )
