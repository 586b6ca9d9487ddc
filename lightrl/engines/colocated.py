"""The one state machine around an engine: its status, its weight version, and every guard."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from lightrl.engines.base import Completion, InferenceEngine, SamplingParams

logger = logging.getLogger(__name__)


class EngineStatus(Enum):
    """Whether the engine can generate now."""

    SLEEPED = 0
    WAKEUP = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """What a weight sync did on this rank."""

    version: int
    num_bytes: int
    seconds: float


class ColocatedEngine:
    """An engine beside the trainer in one process. Transitions are idempotent; a failure leaves it resumable."""

    def __init__(self, engine: InferenceEngine) -> None:
        self.engine = engine
        self.status = EngineStatus.WAKEUP
        self.version: int | None = None  # of the weights it holds; None before the first sync

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Completion]:
        """n completions a prompt, flattened in the order given; checked first, so that a bad prompt costs nothing."""
        if self.status is EngineStatus.SLEEPED:
            raise RuntimeError("The engine is asleep. Call wakeup_inference_engine() before generating.")
        if self.version is None:
            raise RuntimeError("The engine has no weights yet. Call update_engine_weights(actor) before generating.")
        self._check_prompts(prompts, params)
        try:
            completions = self.engine.generate(prompts, params)
        except BaseException:
            self.engine.abort()  # left-over requests would join the next call
            raise
        self._check_completions(completions, sum(param.n for param in params))
        return completions

    def _check_completions(self, completions: Sequence[Completion], wanted: int) -> None:
        name = type(self.engine).__name__
        if len(completions) != wanted:
            raise RuntimeError(f"{name} gave {len(completions)} completions for {wanted} samples.")
        for place, item in enumerate(completions):
            lengths = (len(item.output_token_ids), len(item.logprobs), len(item.versions))
            if len(set(lengths)) > 1:
                raise RuntimeError(
                    f"{name}: completion {place} has tokens, logprobs and versions of lengths {lengths}."
                )

    def _check_prompts(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> None:
        if len(prompts) != len(params):
            raise ValueError(f"{len(prompts)} prompts but {len(params)} sampling parameters.")
        if self.engine.has_unfinished():
            raise RuntimeError("The engine still has requests of an earlier call. Abort them first.")
        for place, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            if not len(prompt):
                raise ValueError(f"prompt {place} is empty: it needs at least one token.")
            if min(prompt) < 0 or max(prompt) >= self.engine.vocab_size:
                bad = next(token for token in prompt if not 0 <= token < self.engine.vocab_size)
                raise ValueError(
                    f"prompt {place} holds token id {bad}, outside the model's vocabulary of {self.engine.vocab_size}."
                )
            if len(prompt) + param.max_new_tokens > self.engine.max_model_len:
                raise ValueError(
                    f"prompt {place} has {len(prompt)} tokens; with max_new_tokens {param.max_new_tokens} that is "
                    f"beyond the context of {self.engine.max_model_len}. Shorten it or lower max_new_tokens."
                )

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> SyncReport:
        """Loads (HF name, full tensor) pairs and stamps what follows with the version."""
        started = time.perf_counter()
        num_bytes = 0

        def counted() -> Iterable[tuple[str, torch.Tensor]]:
            nonlocal num_bytes
            for name, tensor in weights:
                num_bytes += tensor.numel() * tensor.element_size()
                yield name, tensor

        self.version = None  # a sync that breaks half way leaves weights that must not generate
        self.engine.load_weights(counted(), version)
        self.version = version
        return SyncReport(version=version, num_bytes=num_bytes, seconds=time.perf_counter() - started)

    def sleep(self) -> int:
        """Frees the KV cache; returns the bytes freed."""
        if self.status is EngineStatus.SLEEPED:
            return 0
        if self.engine.has_unfinished():
            self.engine.abort()
        freed = self.engine.sleep()
        self.status = EngineStatus.SLEEPED
        logger.debug("engine asleep, %d bytes freed", freed)
        return freed

    def wake(self) -> None:
        if self.status is EngineStatus.SLEEPED:
            self.engine.wake()
            self.status = EngineStatus.WAKEUP

    def close(self) -> None:
        self.engine.close()
