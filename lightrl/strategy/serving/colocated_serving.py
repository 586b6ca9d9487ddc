"""ColocatedServing: the inference engine beside the trainer, from its set-up to proven weight syncs."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightrl.comm import Comm
from lightrl.config import StrategyOptions
from lightrl.engines.base import (
    Completion,
    EngineGroup,
    EnginePrompt,
    Factory,
    InferenceEngine,
    NamedTensors,
    SamplingParams,
    WeightSyncError,
    check_engine_name,
    create_engine,
    create_recording_engine,
)
from lightrl.engines.colocated import ColocatedEngine, SyncReport
from lightrl.engines.weights.account import RankAgreement, raise_problems, require_same_names
from lightrl.engines.weights.fingerprint import KnownWeights
from lightrl.models.multimodal import MediaProcessor
from lightrl.models.policy import Policy, predicting_positions, response_batch
from lightrl.records import EncodedPrompt
from lightrl.strategy.serving.residency import Residency

_NUM_PROMPTS = 2  # the same number on every rank, as a sharded forward is a collective
_NUM_TOKENS = 8
_FIRST_LENGTHS = (5, 9)  # length of prompts that are made up before any was seen
_ALLOWED = {torch.float32: 1e-3, torch.bfloat16: 0.25}  # float32 engines are within 5e-5, bfloat16 ones within 0.15


class WeightSource(Protocol):
    """The source of a model's weights for a sync, and of the fingerprints that prove them."""

    def full_parameters(self, model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]: ...

    def weight_fingerprints(self, model: nn.Module, dtype: torch.dtype | None) -> KnownWeights | None: ...


class ServedStrategy(WeightSource, Protocol):
    """The members of a strategy that serving its model needs."""

    @property
    def global_step(self) -> int: ...

    @property
    def media(self) -> MediaProcessor | None: ...

    def forward(self, data: Sequence[Any], *, model: nn.Module | None = None) -> list[Any]: ...

    def after_forward_only(self, model: nn.Module) -> None: ...

    def unwrap_model(self, model: Any) -> nn.Module: ...


class ColocatedServing:
    """Generates on the engine that this rank's group shares, and keeps the trainer's weights in the engine."""

    _newest = 0  # version of the newest weights, whether they have arrived or not

    def __init__(self, strategy: ServedStrategy, options: StrategyOptions) -> None:
        self.group = EngineGroup()  # the ranks that drive one engine; set when the strategy has joined the world
        self.engine: ColocatedEngine | None = None
        self.last_sync: SyncReport | None = None
        self.num_syncs = 0
        self.canary = Canary(strategy)
        self.factories: dict[str, Factory] = {}  # replacements of engines, by name
        self.source: WeightSource = strategy  # yields the weights of a sync and their fingerprints
        self._strategy = strategy
        self._options = options
        self._model: nn.Module | None = None  # the model whose weights the engine has
        self._is_kept_awake = False

    def start(
        self, engine_type: str, *, model: nn.Module | None, tokenizer: Any, options: StrategyOptions
    ) -> InferenceEngine:
        """Builds the engine, replacing an earlier one, and gives it the model's weights if there is a model."""
        check_engine_name(engine_type)
        source = self._strategy.unwrap_model(model) if model is not None else None
        self.close()
        make = create_recording_engine if options.routing.replay else create_engine
        parts = {"source": source, "tokenizer": tokenizer, "options": options, "group": self.group}
        engine = make(self.factories.get(engine_type, engine_type), device=self.group.comm.device, **parts)
        self.engine, self._model, self.num_syncs = ColocatedEngine(engine, tokenizer), None, 0
        if model is not None:
            self.sync_weights(model)
        return engine

    def require_engine(self) -> ColocatedEngine:
        """Returns the engine; raises NotImplementedError if none was started."""
        if self.engine is None:
            raise NotImplementedError("There is no inference engine. Call setup_inference_engine(...) first.")
        return self.engine

    def generate(
        self, prompts: Sequence[EnginePrompt], params: Sequence[SamplingParams], *, sleep_engine: bool = True
    ) -> list[Completion]:
        """Returns n completions for each of this rank's prompts, in order; a collective.

        A rank may have no prompt. An error on one rank is raised on all. The engine sleeps afterwards unless
        sleep_engine is False, which lets the next call begin without another wake-up.
        """
        if self.group.size > 1:
            return self._generate_together(prompts, params, sleep_engine)
        with self._lent(sleep_engine) as engine, self.group.comm.phase("generate", local=True):
            self.wake()
            completions = engine.generate(prompts, params)
            self.canary.keep(prompts)
        return completions

    def _generate_together(
        self, prompts: Sequence[EnginePrompt], params: Sequence[SamplingParams], sleep_engine: bool
    ) -> list[Completion]:
        """Generates if several ranks drive one engine: each submits the prompts of all and takes its own samples."""
        with self.session(sleep_engine=sleep_engine) as engine:
            parts = self.group.gather((prompts, params))
            with self.group.comm.phase("generate", local=True):
                together = [prompt for part, _ in parts for prompt in part]
                completions = engine.generate(together, [param for _, part in parts for param in part])
                self.canary.keep(together)
        counts = [sum(param.n for param in part) for _, part in parts]
        start = sum(counts[: self.group.rank])
        return completions[start : start + counts[self.group.rank]]

    @contextmanager
    def session(self, *, sleep_engine: bool = True) -> Iterator[ColocatedEngine]:
        """Lends the engine, awake and with the trainer's weights; a collective. By default, it sleeps afterwards."""
        with self._lent(sleep_engine) as engine:
            with self.group.comm.phase("generate", local=True):
                self.wake()
            yield engine

    @contextmanager
    def _lent(self, sleep_engine: bool) -> Iterator[ColocatedEngine]:
        engine = self.require_engine()
        try:
            if engine.needs_weights:  # after sleep level 2; the same on every rank
                self._send_again()
            yield engine
        finally:
            if sleep_engine and not self._is_kept_awake:
                self.sleep()

    def _send_again(self) -> None:
        if self._model is not None:
            with self.group.comm.phase("generate"):
                self.sync_weights(self._model, is_new=False)

    @contextmanager
    def kept_awake(self) -> Iterator[None]:
        """Leaves the engine awake between the calls in the body, and puts it to sleep at the end."""
        self._is_kept_awake = True
        try:
            yield
        finally:
            self._is_kept_awake = False
            self.sleep()

    def sync_weights(self, model: nn.Module, *, is_new: bool = True) -> SyncReport:
        """Sends the model's weights to the engine, stamped with the global step, and proves that they arrived.

        If nobody sets the step, syncs of new weights are counted instead. A sleeping engine wakes up only to hold
        weights. If the canary is due, the engine generates for it and is awake afterwards.
        """
        engine, comm = self.require_engine(), self.group.comm
        dtype = torch.bfloat16 if self._options.dtype == "bfloat16" else torch.float32
        expected = self.fingerprints(model, dtype)
        version = self._strategy.global_step or (self._count(self.last_sync.version, is_new) if self.last_sync else 0)
        update = engine.update_weights if comm.world == 1 else self._update_alike
        with comm.phase("weight sync", late=WeightSyncError):  # raised only after all pairs were consumed
            report = update(self.source.full_parameters(model, dtype), version, expected=expected)
        self._model, engine.version = model, version  # only now that every rank has them
        if (every := self._options.canary_every) and self.num_syncs % every == 0 and can_score(model):
            report = replace(report, canary=self.canary.check(engine, model, dtype, comm))
        self.num_syncs += 1
        self.last_sync = report
        return report

    def _count(self, last: int, is_new: bool) -> int:
        """Returns the version of the weights to send: new ones count, also those whose first sync failed."""
        self._newest = last + 1 if is_new else max(self._newest, last)
        return self._newest

    def _update_alike(self, weights: NamedTensors, version: int, *, expected: KnownWeights | None) -> SyncReport:
        """Updates the engine's weights, and proves that all ranks sent the same ones."""
        if not self.num_syncs:  # a step has few collectives, so later syncs do without
            require_same_names(self.group.comm, expected)
        engine, agreement = self.require_engine(), RankAgreement(self.group.comm, expected)
        watched = agreement.watched(weights)
        try:
            report = engine.update_weights(watched, version, expected=expected)
        except WeightSyncError:
            deque(watched, maxlen=0)  # every rank has to read all weights: reading them is a collective
            agreement.problems()  # which is one too
            raise
        problems = agreement.problems()
        engine.version = None  # until it is known that all ranks have the weights: they generate together
        raise_problems(problems, f"Weight sync to version {version}")
        return report

    def fingerprints(self, model: nn.Module, dtype: torch.dtype) -> KnownWeights | None:
        """Returns the fingerprints of the weights that are sent next, which prove those of the engine."""
        return self.source.weight_fingerprints(model, dtype)

    def sleep(self) -> None:
        """Frees the engine's memory as far as --engine_sleep_level says; without an engine it does nothing."""
        if self.engine is not None and self._options.engine_sleep_level:
            self.engine.sleep(self._options.engine_sleep_level)

    def wake(self) -> None:
        """Makes the engine ready to generate; without an engine it does nothing."""
        if self.engine is not None:
            torch.cuda.empty_cache()  # does nothing where CUDA is not in use
            self.engine.wake()

    def close(self) -> None:
        """Ends the engine, if there is one."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None


class OffloadingServing(ColocatedServing):
    """Serving with the trainer in host memory while the engine is awake (--offload_while_generating)."""

    def __init__(self, strategy: ServedStrategy, options: StrategyOptions, residency: Residency) -> None:
        super().__init__(strategy, options)
        self._residency = residency

    def wake(self) -> None:
        """Moves the trainer to host memory, then wakes the engine."""
        if self.engine is not None:
            self._residency.leave_device()
        super().wake()

    def sleep(self) -> None:
        """Puts the engine to sleep, then brings the trainer back, even if the engine cannot sleep."""
        try:
            super().sleep()
        finally:
            if self.engine is not None:
                self._residency.return_to_device()

    def sync_weights(self, model: nn.Module, *, is_new: bool = True) -> SyncReport:
        """Brings the trainer back, whose weights must be read, and sends them."""
        self.require_engine()
        self._residency.return_to_device()
        return super().sync_weights(model, is_new=is_new)


# ---- The canary --------------------------------------------------------------------------------------------------


class Canary:
    """Compares a few logprobs of the engine with the trainer's, to prove a weight sync from end to end.

    It finds errors that a comparison of weights cannot: caches of older weights, weights that an engine keeps in
    another layout, another temperature, another position of an image. Its prompts are those of the last rollout.
    """

    def __init__(self, strategy: ServedStrategy) -> None:
        self._strategy = strategy
        self._prompts: list[EnginePrompt] = []

    def keep(self, prompts: Sequence[EnginePrompt]) -> None:
        """Keeps the first prompts, preferring those with images or videos, with which more can go wrong."""
        chosen = sorted(prompts, key=lambda prompt: not (prompt.images or prompt.videos))[:_NUM_PROMPTS]
        self._prompts = chosen or self._prompts

    def check(self, engine: ColocatedEngine, model: nn.Module, dtype: torch.dtype, comm: Comm) -> float:
        """Returns the largest difference over the ranks; raises WeightSyncError on every rank if it is too large."""
        with comm.phase("canary", local=True):
            engine.wake()
            prompts = self._usable(model) or made_up_prompts(engine.engine)
            with engine.set_aside():
                completions = engine.generate(prompts, [_params(engine.engine, prompt) for prompt in prompts])
            scored = [(prompts[i % len(prompts)], completions[i % len(prompts)]) for i in range(_NUM_PROMPTS)]
            encoded = None if self._strategy.media is None else _encoded(self._strategy.media, scored)
        ours = self._logprobs(model, [completion for _, completion in scored], encoded, comm.device)
        largest = float(comm.all_reduce(_difference(ours, completions, dtype), "max"))
        if largest > _ALLOWED[dtype]:
            _refuse_weights(engine, largest, _ALLOWED[dtype])
        return largest

    def _usable(self, model: nn.Module) -> list[EnginePrompt]:
        """Returns the prompts that the trainer can score; those with images or videos need a processor."""
        can_score_media = isinstance(model, Policy) and self._strategy.media is not None
        return [item for item in self._prompts if can_score_media or not (item.images or item.videos)]

    def _logprobs(
        self, model: nn.Module, items: list[Completion], encoded: list[EncodedPrompt] | None, device: torch.device
    ) -> list[Tensor]:
        """Returns the trainer's logprobs of the tokens that the engine generated."""
        if not isinstance(model, Policy):
            return self._logprobs_of_causal_lm(model, items, device)
        pairs = [(item.prompt_token_ids, item.output_token_ids) for item in items]
        (scores,) = self._strategy.forward([response_batch(pairs, encoded=encoded).to(device)], model=model)
        return list(scores.logprobs.float().split([len(response) for _, response in pairs]))

    def _logprobs_of_causal_lm(self, model: nn.Module, items: list[Completion], device: torch.device) -> list[Tensor]:
        results = [_scores_of_causal_lm(model, item.prompt_token_ids, item.output_token_ids, device) for item in items]
        self._strategy.after_forward_only(model)
        return results


def _refuse_weights(engine: ColocatedEngine, largest: float, allowed: float) -> NoReturn:
    version, engine.version = engine.version, None  # such weights must not generate
    raise WeightSyncError(
        f"After the weight sync to version {version} a logprob of the engine differs from the trainer's by "
        f"{largest:.3g} ({allowed:g} is allowed), though every parameter was handed over as the trainer has it: the "
        "engine serves a cache of older weights, or computes something else."
    )


def can_score(model: nn.Module) -> bool:
    """Returns whether the trainer can compute logprobs with a model, by lightrl's or transformers' forward."""
    return isinstance(model, Policy | PreTrainedModel) or hasattr(model, "get_base_model")  # the last is PEFT's


def made_up_prompts(engine: InferenceEngine) -> list[EnginePrompt]:
    """Returns prompts of token ids from all over the vocabulary, without placeholders."""
    special = {engine.image_token_id, engine.video_token_id}
    ids = [index * 7919 % engine.vocab_size for index in range(1, 40)]
    usable = [token for token in ids if token not in special]
    return [EnginePrompt(token_ids=tuple(usable[i : i + length])) for i, length in enumerate(_FIRST_LENGTHS)]


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


def _scores_of_causal_lm(model: Any, prompt: Sequence[int], response: Sequence[int], device: torch.device) -> Tensor:
    """Scores one response with a plain transformers model that is trained without a Policy around it."""
    ids = torch.tensor([[*prompt, *response]], device=device)
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    logits = logits[predicting_positions((0, ids.shape[1]), [len(response)])]
    chosen = torch.tensor(response, device=device)
    return logits.float().log_softmax(-1).gather(1, chosen[:, None])[:, 0]


def _difference(theirs: list[Tensor], completions: list[Completion], dtype: torch.dtype) -> float:
    """Returns the largest difference in float32 but the mean in bfloat16, which rounds single logits coarsely.

    A NaN counts as an infinite difference.
    """
    parts = [
        (scores.cpu() - torch.tensor(item.logprobs)).abs()
        for scores, item in zip(theirs, completions, strict=False)
        if item.logprobs
    ]
    if not parts:
        return 0.0
    gaps = torch.cat(parts).nan_to_num(nan=math.inf, posinf=math.inf)
    return float(gaps.max() if dtype == torch.float32 else gaps.mean())
