"""Which tokens of an update the loss treats apart: chosen over all ranks, before the update is cut into micro-batches.

Chosen per micro-batch they would hang on the split. What is compared are the policy's scores before the update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lightrl.algorithms.registry import SELECTING, parameters_of
from lightrl.algorithms.selection import (
    clip_cov_candidates,
    covariance_sums,
    covariances,
    select_clip_cov,
    select_top,
    token_uniforms,
    top_threshold,
)
from lightrl.comm import Comm
from lightrl.config import AlgorithmConfig, named_values
from lightrl.data.packing import TokenMasks, TokenValues
from lightrl.metrics import Statistics
from lightrl.records import Experience
from lightrl.seeding import mix_seed

_SELECTION_STREAM = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _UpdateTokens:
    """This rank's response tokens of one update, sample after sample."""

    logprobs: Tensor  # [N] float32
    entropy: Tensor  # [N] float32
    advantages: Tensor  # [N] float32
    mask: Tensor  # [N] bool
    sequence_ids: Tensor  # [N] int64, of the sample on any rank
    positions: Tensor  # [N] int64, in the response
    seed: int
    comm: Comm

    def covariances(self) -> Tensor:
        sums = self.comm.all_reduce(covariance_sums(self.logprobs, self.advantages, self.mask), "sum")
        return covariances(self.logprobs, self.advantages, self.mask, sums)

    def top(self, values: Tensor, fraction: float) -> Tensor:
        """[N] bool: the largest `fraction` of the values of all ranks' trained tokens."""
        everywhere = self.comm.all_gather(values[self.mask])
        return select_top(values, self.mask, top_threshold(everywhere, fraction))


class TokenSelector:
    """Built before anything expensive, so that a wrong parameter costs nothing."""

    def __init__(self, config: AlgorithmConfig) -> None:
        given = named_values(config.selection_args, "algorithm.selection_args")
        self._entropy_fraction = config.entropy_fraction
        self._select: Callable[[_UpdateTokens], Tensor] | None = None
        if config.loss in SELECTING:
            self._select = _with_parameters(_SELECTIONS[config.loss], config.loss, given)
        elif given:
            raise ValueError(
                f"--algorithm.selection_args are given, but --algorithm.loss {config.loss} selects no tokens: only "
                f"{' and '.join(sorted(SELECTING))} do."
            )

    @property
    def is_needed(self) -> bool:
        """Whether choose() must be given the scores of the policy before the update."""
        return self._select is not None or self._entropy_fraction < 1

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
        """Of this rank's samples of one update, by pack()'s names; every rank calls it, with no sample too.

        Args:
            logprobs, entropy: of the policy before the update.
            seed: of the run and the step.
        """
        tokens = _tokens_of(experience, logprobs, entropy, mix_seed(_SELECTION_STREAM, seed), comm)
        found: dict[str, Tensor] = {}
        if self._select is not None:
            found["selected"] = self._select(tokens)
        if self._entropy_fraction < 1:
            found["in_policy_loss"] = tokens.top(tokens.entropy, self._entropy_fraction)
        for name, chosen in found.items():
            statistics.mean(f"selection/{name}", float(chosen.sum()), float(tokens.mask.sum()))
        return {name: _by_sample(experience, chosen) for name, chosen in found.items()}


def _clip_cov(tokens: _UpdateTokens, *, fraction: float = 2e-4, low: float = 1.0, high: float = 5.0) -> Tensor:
    candidates = clip_cov_candidates(tokens.covariances(), tokens.mask, low=low, high=high)
    counts = tokens.comm.all_reduce({"candidates": int(candidates.sum()), "tokens": int(tokens.mask.sum())}, "sum")
    return select_clip_cov(
        candidates,
        token_uniforms(tokens.sequence_ids, tokens.positions, seed=tokens.seed),
        num_candidates=counts["candidates"],
        num_tokens=counts["tokens"],
        fraction=fraction,
    )


def _kl_cov(tokens: _UpdateTokens, *, fraction: float = 2e-3) -> Tensor:
    return tokens.top(tokens.covariances(), fraction)


_SELECTIONS: dict[str, Callable[..., Tensor]] = {"clip_cov": _clip_cov, "kl_cov": _kl_cov}


def _with_parameters(
    function: Callable[..., Tensor], loss: str, given: dict[str, float]
) -> Callable[[_UpdateTokens], Tensor]:
    known = parameters_of(function)
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(
            f"--algorithm.selection_args: the selection of {loss} has no parameter {', '.join(unknown)}. "
            f"It has {', '.join(sorted(known))}."
        )
    if not 0 < given.get("fraction", known["fraction"]) <= 1:
        raise ValueError(
            f"--algorithm.selection_args: fraction is {given['fraction']}, a share of the tokens: it must be more "
            "than 0 and at most 1."
        )
    return partial(function, **given)


def _tokens_of(
    experience: Sequence[Experience], logprobs: TokenValues, entropy: TokenValues, seed: int, comm: Comm
) -> _UpdateTokens:
    keys = [item.key for item in experience]
    lengths = torch.tensor([len(logprobs[key]) for key in keys], dtype=torch.int64)

    def per_sample(values: list[float] | list[bool] | list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).repeat_interleave(lengths)

    def per_token(values: TokenValues) -> Tensor:
        return torch.tensor([value for key in keys for value in values[key]], dtype=torch.float32)

    return _UpdateTokens(
        logprobs=per_token(logprobs),
        entropy=per_token(entropy),
        advantages=per_sample([item.advantage for item in experience], torch.float32),
        mask=per_sample([item.is_trained for item in experience], torch.bool),
        sequence_ids=per_sample([mix_seed(*key) for key in keys], torch.int64),
        positions=torch.cat([torch.arange(0), *(torch.arange(int(length)) for length in lengths)]),
        seed=seed,
        comm=comm,
    )


def _by_sample(experience: Sequence[Experience], mask: Tensor) -> TokenMasks:
    parts = mask.split([len(item.sample.response_ids) for item in experience]) if experience else ()
    return {item.key: part.tolist() for item, part in zip(experience, parts, strict=True)}
