"""Canary: the end-to-end check of a weight sync.

The engine generates a few tokens, and the trainer must give them the same logprobs. This sees what a comparison of
weights cannot: caches that older weights filled, weights that an engine keeps in another layout, another temperature,
another position of an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightrl.comm import Comm
from lightrl.engines.base import Completion, EnginePrompt, InferenceEngine, SamplingParams, WeightSyncError
from lightrl.engines.colocated import ColocatedEngine
from lightrl.models.multimodal import MediaProcessor
from lightrl.models.policy import Policy, predicting_positions, response_batch
from lightrl.records import EncodedPrompt

_NUM_PROMPTS = 2  # every rank scores as many: a sharded forward is a collective
_NUM_TOKENS = 8
_FIRST_LENGTHS = (5, 9)  # of the prompts made up before any was seen
_ALLOWED = {torch.float32: 1e-3, torch.bfloat16: 0.25}  # float32 engines are within 5e-5, bfloat16 ones within 0.15


class Scorer(Protocol):
    """What the canary needs of the trainer; a strategy is one."""

    @property
    def media(self) -> MediaProcessor | None: ...

    def forward(self, data: Sequence[Any], *, model: nn.Module | None = None) -> list[Any]: ...

    def after_forward_only(self, model: nn.Module) -> None: ...


class Canary:
    """Keeps a few prompts of the last rollout to generate from after a sync."""

    def __init__(self) -> None:
        self._prompts: list[EnginePrompt] = []

    def keep(self, prompts: Sequence[EnginePrompt]) -> None:
        """Keeps the first prompts, and before them those with images or videos, since more can go wrong there."""
        chosen = sorted(prompts, key=lambda prompt: not (prompt.images or prompt.videos))[:_NUM_PROMPTS]
        self._prompts = chosen or self._prompts

    def check(
        self, engine: ColocatedEngine, scorer: Scorer, model: nn.Module, *, dtype: torch.dtype, comm: Comm
    ) -> float:
        """Returns the largest difference over the ranks; raises WeightSyncError on every rank if it is too large."""
        with comm.phase("canary", local=True):
            can_score_media = isinstance(model, Policy) and scorer.media is not None
            usable = [item for item in self._prompts if can_score_media or not (item.images or item.videos)]
            prompts = usable or made_up_prompts(engine.engine)
            completions = engine.generate(prompts, [_params(engine.engine, prompt) for prompt in prompts])
            scored = [(prompts[i % len(prompts)], completions[i % len(prompts)]) for i in range(_NUM_PROMPTS)]
            encoded = None if scorer.media is None else _encoded(scorer.media, scored)
        chosen = [completion for _, completion in scored]
        ours = _trainer_logprobs(scorer, model, chosen, encoded, comm.device)
        largest = float(comm.all_reduce(_nan_to_inf(_difference(ours, completions, dtype)), "max"))
        if largest > _ALLOWED[dtype]:
            raise WeightSyncError(
                f"After the weight sync to version {engine.version} a logprob of the engine differs from the "
                f"trainer's by {largest:.3g} ({_ALLOWED[dtype]:g} is allowed), though every parameter was handed over "
                "as the trainer has it: the engine serves a cache of older weights, or computes something else."
            )
        return largest


def made_up_prompts(engine: InferenceEngine) -> list[EnginePrompt]:
    """Returns prompts of token ids from all over the vocabulary, placeholders left out."""
    special = {engine.image_token_id, engine.video_token_id}
    ids = [index * 7919 % engine.vocab_size for index in range(1, 40)]
    usable = [token for token in ids if token not in special]
    return [
        EnginePrompt(token_ids=tuple(usable[start : start + length])) for start, length in enumerate(_FIRST_LENGTHS)
    ]


def _params(engine: InferenceEngine, prompt: EnginePrompt) -> SamplingParams:
    room = engine.max_model_len - engine.num_prompt_tokens(prompt)
    return SamplingParams(max_new_tokens=max(1, min(_NUM_TOKENS, room)), ignore_eos=True)


def _encoded(media: MediaProcessor, scored: list[tuple[EnginePrompt, Completion]]) -> list[EncodedPrompt]:
    result = [media.encode(prompt.token_ids, prompt.images, prompt.videos) for prompt, _ in scored]
    for ours, (_, theirs) in zip(result, scored, strict=True):
        if ours.token_ids != theirs.prompt_token_ids:
            raise ValueError(
                f"A prompt has {len(theirs.prompt_token_ids)} tokens in the engine and {len(ours.token_ids)} in the "
                "trainer: they expand its images in different ways. Give both the same processor settings."
            )
    return result


def _trainer_logprobs(
    scorer: Scorer,
    model: nn.Module,
    completions: list[Completion],
    encoded: list[EncodedPrompt] | None,
    device: torch.device,
) -> list[Tensor]:
    pairs = [(item.prompt_token_ids, item.output_token_ids) for item in completions]
    if isinstance(model, Policy):
        batch = response_batch(pairs, encoded=encoded).to(device)
        (scores,) = scorer.forward([batch], model=model)
        return list(scores.logprobs.float().split([len(response) for _, response in pairs]))
    results = [_scores_of_causal_lm(model, *pair, device) for pair in pairs]
    scorer.after_forward_only(model)
    return results


def _scores_of_causal_lm(model: Any, prompt: Sequence[int], response: Sequence[int], device: torch.device) -> Tensor:
    """Scores one response with a transformers model that is trained as it is, without a Policy around it."""
    ids = torch.tensor([[*prompt, *response]], device=device)
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    logits = logits[predicting_positions((0, ids.shape[1]), [len(response)])]
    chosen = torch.tensor(response, device=device)
    return logits.float().log_softmax(-1).gather(1, chosen[:, None])[:, 0]


def _difference(theirs: list[Tensor], completions: list[Completion], dtype: torch.dtype) -> float:
    """Returns the largest of any logprob in float32; in bfloat16 the mean, since large logits round single ones far."""
    parts = [
        (scores.cpu() - torch.tensor(item.logprobs)).abs()
        for scores, item in zip(theirs, completions, strict=False)
        if item.logprobs
    ]
    if not parts:
        return 0.0
    return float(torch.cat(parts).max() if dtype == torch.float32 else torch.cat(parts).mean())


def _nan_to_inf(value: float) -> float:
    return value if value == value else float("inf")
