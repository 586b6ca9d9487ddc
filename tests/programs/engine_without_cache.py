"""The shortest engine after docs/adding_an_engine.md: one token of every sample a step, from the whole context."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from test_doc_blocks import blocks
from transformers import AutoModelForCausalLM

from lightrl.engines.base import Completion, InferenceEngine, SamplingParams, as_prompt, eos_ids
from lightrl.seeding import mix_seed

PAGE = Path(__file__).parents[2] / "docs/adding_an_engine.md"
SHOWN: dict[str, Any] = {}
exec(next(code for code in blocks(PAGE, "python") if "def load_weights" in code), SHOWN)


@dataclass
class Sample:
    request_id: int
    index: int
    prompt: tuple[int, ...]
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def completion(self, reason: Any) -> Completion:
        return Completion(
            request_id=self.request_id,
            sample_index=self.index,
            prompt_token_ids=self.prompt,
            output_token_ids=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            finish_reason=reason,
        )


class EngineWithoutCache(InferenceEngine):
    def __init__(self, *, source: Any, tokenizer: Any, options: Any, device: torch.device, group: Any) -> None:
        config = copy.deepcopy(source.config)
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(device).eval()
        self.ends, self.device = set(eos_ids(source)), device
        self.max_model_len, self.vocab_size = config.max_position_embeddings, config.vocab_size
        self.version = self.num_requests = 0
        self.samples: list[Sample] = []

    def submit(self, prompt: Any, params: SamplingParams) -> int:
        params.require_trainable()  # it draws at the temperature alone
        ids, request_id = as_prompt(prompt).token_ids, self.num_requests
        self.num_requests += 1
        self.samples += [Sample(request_id, params.first_sample + i, ids, params) for i in range(params.n)]
        return request_id

    @torch.no_grad()
    def step(self) -> list[Completion]:
        finished = [(sample, reason) for sample in self.samples if (reason := self._draw(sample))]
        self.samples = [sample for sample in self.samples if sample not in [ended for ended, _ in finished]]
        return [sample.completion(reason) for sample, reason in finished]

    def _draw(self, sample: Sample) -> str:
        params, place = sample.params, sample.params.first_token + len(sample.tokens)
        ids = torch.tensor([[*sample.prompt, *sample.tokens]], device=self.device)
        logits = self.model(ids).logits[0, -1].float()
        logprobs = (logits / (params.temperature or 1)).log_softmax(-1)
        random = torch.Generator().manual_seed(mix_seed(params.seed or 0, sample.index, place))
        token = int(logits.argmax() if not params.temperature else logprobs.exp().multinomial(1, generator=random))
        sample.tokens.append(token)
        sample.logprobs.append(float(logprobs[token]))
        sample.versions.append(self.version)
        if token in params.stop_token_ids or (token in self.ends and not params.ignore_eos):
            return "stop"
        return "length" if len(sample.tokens) == params.max_new_tokens else ""

    def has_unfinished(self) -> bool:
        return bool(self.samples)

    def abort(self, request_ids: Any = None) -> list[Completion]:
        stopped = [item for item in self.samples if request_ids is None or item.request_id in set(request_ids)]
        self.samples = [item for item in self.samples if item not in stopped]
        return [item.completion("abort") for item in stopped]

    load_weights = SHOWN["load_weights"]

    def sleep(self, level: int = 1) -> int:
        return 0

    def wake(self, part: Any) -> None: ...

    def close(self) -> None:
        self.samples = []
