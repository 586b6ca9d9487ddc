"""The forward of other trainers' loops: takes padded rows, applies a function to their logits, returns padded rows.

Rows are packed, so that a model computes nothing for padding, and logits exist for only a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightrl.config import StrategyOptions
from lightrl.data.token_dict import TokenPack, UserBatch, pack_rows, read_rows, rows_of_pack
from lightrl.models.critic import Critic
from lightrl.models.lazy_logits import gather_logprobs_entropy
from lightrl.models.policy import response_batch
from lightrl.strategy.foreign_models import Native
from lightrl.strategy.results import LossFn
from lightrl.strategy.user_batch import computing

Processor = Callable[..., dict[str, Tensor]]  # takes logits [T, V] and, by name, tensors [T, ...]
Step = Callable[[Iterator[Any], nn.Module], tuple[Any, Callable[..., Any]]]
_ARGUMENT = "argument "  # prefix of a processor's arguments in a pack, which has input_ids of its own


class ForwardNames:
    """Mixin with the two names of Megatron's forward, over a strategy's models."""

    def get_forward_step_func(self: Native, loss_fn: LossFn | None = None) -> Step:
        """Returns Megatron's step: step(micro_batches, model) returns outputs and a function of them.

        The function returns (loss_fn(outputs, micro-batch), numbers), or the outputs without a loss_fn. Outputs are
        the model's or, for a dictionary of padded rows, log_probs and entropy, [B, L]: at each token, the next one's.
        """
        return forward_step(temperature_of(self.options), loss_fn)

    @staticmethod
    def custom_forward(
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor | None = None,
        sequence_parallel: bool = False,
        value_model: bool = False,
        pack_seqs: bool = True,
        logits_processor: Processor | None = None,
        logits_processor_args: Mapping[str, Tensor] | None = None,
        temperature: float = 1.0,
        max_batch_seqlen: int = 4096,
        padding_seqlen: int | None = None,
    ) -> Any:
        """Packs padded rows, runs the model, and returns logits_processor's results as padded rows.

        The processor gets logits [T, V], divided by the temperature, and its arguments, [T, ...], and returns a dict.
        Without a processor, the logits are returned, or a value_model's values. Arguments about padding are ignored.
        Raises ValueError for position_ids that do not count each row's tokens from 0.
        """
        if position_ids is not None:
            check_positions(position_ids, attention_mask)
        rows = PackedRows(
            input_ids,
            attention_mask,
            processor=logits_processor,
            arguments=logits_processor_args or {},
            temperature=temperature,
            value_model=value_model,
        )
        return rows.run(model)


def check_positions(position_ids: Tensor, attention_mask: Tensor) -> None:
    """Raises ValueError unless the tokens of each row have the positions 0, 1, 2 and so on."""
    mask = attention_mask.bool()
    if ((position_ids != mask.cumsum(-1) - 1) & mask).any():
        raise ValueError(
            "custom_forward() takes no position_ids but those that count the tokens of each row from 0, padding left "
            "out: it packs the rows. Leave them out."
        )


class PackedRows:
    """Padded rows as a pack, with the function that is applied to its logits."""

    def __init__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        *,
        processor: Processor | None,
        arguments: Mapping[str, Tensor],
        temperature: float = 1.0,
        value_model: bool = False,
    ) -> None:
        named = {f"{_ARGUMENT}{name}": value for name, value in arguments.items()}
        batch = UserBatch({"input_ids": input_ids, "attention_mask": attention_mask, **named}, per_token=[*named])
        self.pack = pack_rows(read_rows(batch)).to(input_ids.device)
        self._mask, self._names = attention_mask, tuple(arguments)
        self._processor, self._temperature, self._value_model = processor, temperature, value_model

    def run(self, model: nn.Module) -> Any:
        """Returns the processor's outputs, or logits, or values, each [B, L, ...] with zeros for padding."""
        if self._value_model and isinstance(model, Critic):
            return self._unpacked(model(_every_state(self.pack)).values)
        return self.inside(model, lambda: model(self.pack))

    def inside(self, model: nn.Module, function: Callable[[], Any]) -> Any:
        """Returns the outputs of a function as rows; while it runs, the model's forward applies the processor."""
        with computing(model, self._compute):
            output = function()
        if isinstance(output, Mapping):
            return {name: self._unpacked(value) for name, value in output.items()}
        return self._unpacked(output)

    def _compute(self, logits: Any, pack: TokenPack) -> Any:
        if self._value_model:
            return logits[:, 0]
        scaled = logits if self._temperature == 1 else logits / self._temperature
        if self._processor is not None:
            return self._processor(scaled, **{name: pack.data[f"{_ARGUMENT}{name}"] for name in self._names})
        return scaled if isinstance(scaled, Tensor) else scaled.map(lambda rows: rows)

    def _unpacked(self, values: Tensor) -> Tensor:
        """Puts values per token back into rows, with their gradient."""
        device, mask, indices = values.device, self._mask.bool().to(values.device), self.pack.indices
        counts = torch.tensor(self.pack.cu_seqlens, device=device).diff()
        rows = torch.tensor(indices, device=device).repeat_interleave(counts)
        columns = torch.cat([mask[index].nonzero()[:, 0] for index in indices])
        return values.new_zeros(*mask.shape, *values.shape[1:]).index_put((rows, columns), values)


def _every_state(pack: TokenPack) -> Any:
    """Returns the pack in a form that makes a critic value all of its states."""
    rows: list[tuple[list[int], list[int]]] = [(ids.tolist(), []) for _, ids in rows_of_pack(pack, pack.input_ids)]
    batch = response_batch(rows).to(pack.input_ids.device)
    return replace(batch, score_index=torch.arange(pack.cu_seqlens[-1], device=pack.input_ids.device))


def forward_step(temperature: float, loss_fn: LossFn | None) -> Step:
    """Returns Megatron's step for models that are whole on a rank.

    A micro-batch is a PackedBatch, or a dictionary of padded rows with input_ids and attention_mask, whose outputs are
    log_probs and entropy, [B, L]: at each token, those of the next one, as with logits.
    """

    def step(micro_batches: Iterator[Any], model: nn.Module) -> tuple[Any, Callable[..., Any]]:
        batch = next(micro_batches)
        rows = scored_rows(batch, temperature) if isinstance(batch, Mapping) else None
        output = model(batch) if rows is None else rows.run(model)
        return output, partial(finish, batch, loss_fn)

    return step


def scored_rows(batch: Mapping[str, Tensor], temperature: float) -> PackedRows:
    """Returns rows in which each token's successor is scored; a token without one gets 0."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    is_followed = torch.cat([mask[:, :-1] * mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1).bool()

    def score(logits: Any, label: Tensor, is_followed: Tensor) -> dict[str, Tensor]:
        log_probs, entropy = gather_logprobs_entropy(logits, label, temperature)
        return {"log_probs": log_probs * is_followed, "entropy": entropy * is_followed}

    arguments = {"label": ids.roll(-1, 1), "is_followed": is_followed}
    return PackedRows(ids, mask, processor=score, arguments=arguments)


def temperature_of(options: StrategyOptions) -> float:
    """Returns the temperature at which a run samples."""
    return float(getattr(options, "temperature", 1.0))


def finish(batch: Any, loss_fn: LossFn | None, output: Any, non_loss_data: bool = False) -> Any:
    """Returns (loss, numbers) for a micro-batch's outputs, or the outputs themselves if there is no loss_fn."""
    if loss_fn is None or non_loss_data:
        return output
    loss = loss_fn(output, batch)
    return loss, {"loss": loss.detach().clone()}  # Megatron's schedules divide the loss in place
