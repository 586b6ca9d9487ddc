"""Chooses the tokens that a loss treats specially, over all ranks, before the update is cut into micro-batches.

A choice per micro-batch would depend on the split. The choice is based on the policy's scores before the update. A loss
declares its own choice (`@loss(selects_tokens=...)`); --algorithm.entropy_fraction keeps the tokens of highest entropy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightrl.algorithms.registry import BUILTIN, LossTraits, bind, find, traits_of
from lightrl.algorithms.selection import UpdateTokens
from lightrl.comm import Comm
from lightrl.config import AlgorithmConfig, named_values
from lightrl.data.packing import TokenMasks, TokenValues
from lightrl.metrics import Statistics
from lightrl.records import Experience
from lightrl.seeding import mix_seed

_SELECTION_STREAM = 4


def needs_selection(config: AlgorithmConfig) -> bool:
    """Returns whether the options need tokens that are chosen over a whole update, by a TokenSelector."""
    return bool(_selection_of(config.loss) or config.selection_args) or config.entropy_fraction != 1


class TokenSelector:
    """The choices that a run's options ask for, tried on two tokens before anything expensive."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self._entropy_fraction = config.entropy_fraction
        self._select: Callable[[UpdateTokens], Tensor] | None = None
        select = _selection_of(config.loss)
        if select is not None:
            self._select = _bound_and_tried(select, config)
        elif config.selection_args:
            raise _selects_nothing(config)

    def choose(
        self,
        experience: Sequence[Experience],
        logprobs: TokenValues,
        entropy: TokenValues,
        *,
        seed: int,
        comm: Comm,
        statistics: Statistics,
    ) -> dict[str, TokenMasks]:
        """Returns the masks of this rank's samples of one update, by pack()'s names.

        Every rank must call it, even without samples.

        Args:
            logprobs: Those of the policy before the update, by sample.
            entropy: That of the policy before the update, by sample.
            seed: Depends on the run and the step.
            comm: Sums and gathers over the ranks.
            statistics: Receives the fraction of tokens that each choice selects.
        """
        tokens = _tokens_of(experience, logprobs, entropy, mix_seed(_SELECTION_STREAM, seed), comm)
        masks: dict[str, Tensor] = {}
        if self._select is not None:
            masks["selected"] = self._select(tokens)
        if self._entropy_fraction < 1:
            masks["in_policy_loss"] = tokens.top(tokens.entropy, self._entropy_fraction)
        for name, mask in masks.items():
            statistics.mean(f"selection/{name}", float(mask.sum()), float(tokens.mask.sum()))
        return {name: _by_sample(experience, mask) for name, mask in masks.items()}


def _selection_of(loss: str) -> Callable[..., Tensor] | None:
    """Returns the function that chooses tokens for a loss, if that declares one."""
    return traits_of(find("loss", loss), LossTraits).selects_tokens


def _bound_and_tried(select: Callable[..., Tensor], config: AlgorithmConfig) -> Callable[[UpdateTokens], Tensor]:
    """Binds a selection's parameters and calls it once, so that a bad parameter raises before the run starts."""
    option = "--algorithm.selection_args"
    given = named_values(config.selection_args, "algorithm.selection_args")
    bound = bind(select, given, f"{option}: the selection of {config.loss}")
    two = torch.zeros(2)
    try:
        bound(
            UpdateTokens(
                logprobs=two,
                entropy=two,
                advantages=two,
                mask=torch.ones(2).bool(),
                sequence_ids=torch.zeros(2).long(),
                positions=torch.arange(2),
                seed=0,
                sum_over_ranks=lambda values: values,
                gather_over_ranks=lambda values: values,
            )
        )
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{option}: {error}") from error
    return bound


def _selects_nothing(config: AlgorithmConfig) -> ValueError:
    losses = (name for name in BUILTIN["loss"] if _selection_of(name))
    return ValueError(
        f"--algorithm.selection_args are given, but --algorithm.loss {config.loss} selects no tokens: only "
        f"{' and '.join(sorted(losses))} do, and losses of your own that are marked @loss(selects_tokens=...)."
    )


def _tokens_of(
    experience: Sequence[Experience], logprobs: TokenValues, entropy: TokenValues, seed: int, comm: Comm
) -> UpdateTokens:
    keys = [item.sample.key for item in experience]
    lengths = torch.tensor([len(logprobs[key]) for key in keys], dtype=torch.int64)

    def per_sample(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).repeat_interleave(lengths)

    def per_token(values: TokenValues) -> Tensor:
        return torch.tensor([value for key in keys for value in values[key]], dtype=torch.float32)

    return UpdateTokens(
        logprobs=per_token(logprobs),
        entropy=per_token(entropy),
        advantages=per_sample([item.advantage for item in experience], torch.float32),
        mask=torch.tensor([is_trained for item in experience for is_trained in item.trained_tokens], dtype=torch.bool),
        sequence_ids=per_sample([mix_seed(*key) for key in keys], torch.int64),
        positions=torch.cat([torch.arange(0), *(torch.arange(int(length)) for length in lengths)]),
        seed=seed,
        sum_over_ranks=lambda values: comm.all_reduce(values, "sum"),
        gather_over_ranks=comm.all_gather,
    )


def _by_sample(experience: Sequence[Experience], mask: Tensor) -> TokenMasks:
    parts = mask.split([len(item.sample.response_ids) for item in experience]) if experience else ()
    return {item.key: part.tolist() for item, part in zip(experience, parts, strict=True)}
