"""What an inference engine is to the rest of lightrl. One file per engine implements it; nothing else knows which."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from lightrl.records import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. The draw of token t of sample i depends on (seed, i, t) alone."""

    max_new_tokens: int = 16
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps the whole vocabulary
    n: int = 1  # samples for the prompt
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()  # in addition to the model's own end tokens
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}: it must be at least 1.")
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}: it must be 0 (greedy) or above.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: it must be above 0 and at most 1.")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}: it must be 0 (off) or above.")
        if self.n < 1:
            raise ValueError(f"n is {self.n}: it must be at least 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished (or aborted) sample of a request."""

    request_id: int
    sample_index: int
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]  # the end token included, when it stopped by one
    logprobs: tuple[float, ...]  # of the distribution sampled from: after temperature, top-k and top-p
    versions: tuple[int, ...]  # weight version that produced each token
    finish_reason: FinishReason


class InferenceEngine(ABC):
    """An engine that lives in the trainer's process. The caller guards its state (see colocated.py)."""

    max_model_len: int  # prompt + new tokens
    vocab_size: int

    @abstractmethod
    def submit(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> int:
        """Queues a request and returns its id; ids count up from 0 in the order of submission."""

    @abstractmethod
    def step(self) -> list[Completion]:
        """Runs one scheduling step and returns the samples that it finished."""

    @abstractmethod
    def has_unfinished(self) -> bool:
        """Whether any submitted sample is still waiting or running."""

    @abstractmethod
    def abort(self, request_ids: Iterable[int] | None = None) -> list[Completion]:
        """Stops the requests (None: all) and returns what each unfinished sample has so far, reason "abort"."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Consumes (HF name, full tensor) pairs; raises ValueError naming any name missing, unknown or misshapen."""

    @abstractmethod
    def sleep(self) -> int:
        """Frees the KV cache; returns the bytes freed. Refused while requests are unfinished."""

    @abstractmethod
    def wake(self) -> None:
        """Makes the engine ready to generate again."""

    @abstractmethod
    def close(self) -> None:
        """Frees everything; the engine cannot be used after."""

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Completion]:
        """Runs the prompts to their end: n completions a prompt, flattened in the order given."""
        order = {self.submit(prompt, param): i for i, (prompt, param) in enumerate(zip(prompts, params, strict=True))}
        done: list[Completion] = []
        while self.has_unfinished():
            done.extend(self.step())
        return sorted(done, key=lambda item: (order[item.request_id], item.sample_index))
