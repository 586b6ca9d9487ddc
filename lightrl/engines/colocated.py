"""The one state machine around an engine: what of it is awake, its weight version, its requests, and every guard."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch

from lightrl.engines.base import (
    AnyPrompt,
    Completion,
    EnginePart,
    EnginePrompt,
    InferenceEngine,
    SamplingParams,
    as_prompt,
)
from lightrl.engines.weight_sync import Fingerprint, WeightProof

logger = logging.getLogger(__name__)


class EngineStatus(Enum):
    """Whether the engine can generate now."""

    SLEEPED = 0
    WAKEUP = 1


class _Phase(Enum):
    ASLEEP = "asleep"
    WEIGHTS_AWAKE = "weights awake, KV cache asleep"  # between a weight sync and the next generation
    AWAKE = "awake"


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """What a weight sync did on this rank."""

    version: int
    num_bytes: int
    seconds: float
    canary: float | None = None  # largest difference of a logprob, engine against trainer, where it was looked at

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / 1e9 / max(self.seconds, 1e-9)


@dataclass(frozen=True, slots=True)
class _Request:
    """What the caller submitted. An engine's own request may be a later part of it."""

    request_id: int  # the caller's
    prompt: EnginePrompt
    params: SamplingParams
    partial: Completion | None = None  # what was generated of it before


class ColocatedEngine:
    """An engine beside the trainer in one process. Transitions are idempotent; a failure leaves it resumable."""

    def __init__(self, engine: InferenceEngine) -> None:
        self.engine = engine
        self.version: int | None = None  # of the weights it holds; None: it holds none that may generate
        self.freed_bytes = 0  # by the last sleep
        self._phase = _Phase.AWAKE
        self._running: dict[int, _Request] = {}  # by the engine's request id
        self._num_left: dict[int, int] = {}  # unfinished samples of each
        self._next_request_id = 0
        self._ended: list[Completion] = []  # by themselves, while the rest was set aside for new weights

    @property
    def status(self) -> EngineStatus:
        return EngineStatus.WAKEUP if self._phase is _Phase.AWAKE else EngineStatus.SLEEPED

    @property
    def needs_weights(self) -> bool:
        """Whether the next generation would be refused for want of weights, as after a sleep of level 2."""
        return self.version is None

    # ---- Requests ----------------------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[AnyPrompt], params: Sequence[SamplingParams]) -> list[Completion]:
        """n completions a prompt, flattened in the order given; checked first, so that a bad prompt costs nothing."""
        if len(prompts) != len(params):
            raise ValueError(f"{len(prompts)} prompts but {len(params)} sampling parameters.")
        self._require_ready()
        if self.has_unfinished():
            raise RuntimeError("The engine still has requests of an earlier call. Abort them first.")
        asked = [as_prompt(prompt) for prompt in prompts]
        for place, (prompt, param) in enumerate(zip(asked, params, strict=True)):
            self._check_prompt(f"prompt {place}", prompt, param)
        try:
            order = {self._start(prompt, param): i for i, (prompt, param) in enumerate(zip(asked, params, strict=True))}
            done: list[Completion] = []
            while self.has_unfinished():
                done.extend(self.step())
        except BaseException:
            self.abort()  # left-over requests would join the next call
            raise
        wanted = sum(param.n for param in params)
        if len(done) != wanted:
            raise RuntimeError(f"{type(self.engine).__name__} gave {len(done)} completions for {wanted} samples.")
        return sorted(done, key=lambda item: (order[item.request_id], item.sample_index))

    def submit(self, prompt: AnyPrompt, params: SamplingParams, partial: Completion | None = None) -> int:
        """Queues a request and returns its id. partial, of an aborted sample, makes that sample go on where it stopped.

        A resumed sample is one sample: give the parameters that the request began with.
        """
        self._require_ready()
        asked = as_prompt(prompt)
        self._check_prompt(f"the prompt of request {self._next_request_id}", asked, params)
        return self._start(asked, params, partial)

    def step(self) -> list[Completion]:
        """Runs one scheduling step; returns the samples that it finished."""
        self._require_ready()
        ended, self._ended = self._ended, []
        finished = self.engine.step()
        found = ended + [self._as_asked(item) for item in finished]
        for item in finished:
            self._num_left[item.request_id] -= 1
            if not self._num_left[item.request_id]:
                del self._running[item.request_id], self._num_left[item.request_id]
        return found

    def has_unfinished(self) -> bool:
        return bool(self._ended) or self.engine.has_unfinished()

    def abort(self, request_ids: Iterable[int] | None = None) -> list[Completion]:
        """Stops the requests (None: all); returns what each unfinished sample has, with the reason "abort".

        A sample that an engine on its own processes had ended by then comes with the reason why.
        """
        chosen = None if request_ids is None else set(request_ids)
        own = [key for key, item in self._running.items() if chosen is None or item.request_id in chosen]
        stopped = [self._as_asked(item) for item in self.engine.abort(None if chosen is None else own)]
        for key in own:
            del self._running[key], self._num_left[key]
        ended = [item for item in self._ended if chosen is None or item.request_id in chosen]
        self._ended = [item for item in self._ended if item not in ended]
        return ended + stopped

    def _start(self, prompt: EnginePrompt, params: SamplingParams, partial: Completion | None = None) -> int:
        request = _Request(self._next_request_id, prompt, params, partial)
        self._next_request_id += 1
        self._enter(request)
        return request.request_id

    def _enter(self, request: _Request) -> None:
        prompt, params, partial = request.prompt, request.params, request.partial
        if partial is not None:
            done = len(partial.output_token_ids)
            prompt = replace(prompt, token_ids=prompt.token_ids + partial.output_token_ids)
            params = replace(
                params,
                n=1,
                first_sample=partial.sample_index,
                first_token=params.first_token + done,
                max_new_tokens=params.max_new_tokens - done,
            )
        own_id = self.engine.submit(prompt, params)
        self._running[own_id], self._num_left[own_id] = request, params.n

    def _as_asked(self, item: Completion) -> Completion:
        """The engine's completion as one of the caller's request, checked, with what was generated of it before."""
        lengths = (len(item.output_token_ids), len(item.logprobs), len(item.versions))
        if len(set(lengths)) > 1:
            raise RuntimeError(
                f"{type(self.engine).__name__}: a completion has tokens, logprobs and versions of lengths {lengths}."
            )
        request = self._running[item.request_id]
        item = self._without_placeholders(replace(item, request_id=request.request_id))
        partial = request.partial
        if partial is None:
            return item
        return replace(
            item,
            prompt_token_ids=item.prompt_token_ids[: len(item.prompt_token_ids) - len(partial.output_token_ids)],
            output_token_ids=partial.output_token_ids + item.output_token_ids,
            logprobs=partial.logprobs + item.logprobs,
            versions=partial.versions + item.versions,
        )

    def _without_placeholders(self, item: Completion) -> Completion:
        """Cut before the first sampled image or video placeholder: a trainer would look for the image behind it."""
        special = {self.engine.image_token_id, self.engine.video_token_id} - {None}
        place = next((i for i, token in enumerate(item.output_token_ids) if token in special), None)
        if place is None:
            return item
        return replace(
            item,
            output_token_ids=item.output_token_ids[:place],
            logprobs=item.logprobs[:place],
            versions=item.versions[:place],
            finish_reason="length",
        )

    # ---- Guards ------------------------------------------------------------------------------------------------

    def _require_ready(self) -> None:
        if self._phase is not _Phase.AWAKE:
            raise RuntimeError(
                f"The engine is asleep ({self._phase.value}). Call wakeup_inference_engine() before generating."
            )
        if self.version is None:
            raise RuntimeError("The engine has no weights yet. Call update_engine_weights(actor) before generating.")

    def _check_prompt(self, name: str, prompt: EnginePrompt, params: SamplingParams) -> None:
        """Each of these would hang or kill one engine or another."""
        engine, ids = self.engine, prompt.token_ids
        if not ids:
            raise ValueError(f"{name} is empty: it needs at least one token.")
        if min(ids) < 0 or max(ids) >= engine.vocab_size:
            bad = next(token for token in ids if not 0 <= token < engine.vocab_size)
            raise ValueError(f"{name} holds token id {bad}, outside the model's vocabulary of {engine.vocab_size}.")
        self._check_media(name, "image", prompt.images, ids, engine.image_token_id)
        self._check_media(name, "video", prompt.videos, ids, engine.video_token_id)
        length = engine.num_prompt_tokens(prompt)
        if length + params.max_new_tokens > engine.max_model_len:
            raise ValueError(
                f"{name} has {length} tokens; with max_new_tokens {params.max_new_tokens} that is "
                f"beyond the context of {engine.max_model_len}. Shorten it or lower max_new_tokens."
            )

    def _check_media(
        self, name: str, kind: str, items: Sequence[object], ids: tuple[int, ...], token_id: int | None
    ) -> None:
        if items and token_id is None:
            raise ValueError(f"{name} comes with {kind}s, which this engine's model does not take.")
        count = 0 if token_id is None else ids.count(token_id)
        if count != len(items):
            raise ValueError(
                f"{name} has {count} {kind} placeholders (token id {token_id}) and {len(items)} {kind}s. It needs one "
                f"placeholder for each {kind}."
            )

    # ---- Weights -----------------------------------------------------------------------------------------------

    def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        version: int,
        *,
        expected: Mapping[str, Fingerprint] | None = None,
        recompute_kv: bool = True,
    ) -> SyncReport:
        """Loads (HF name, full tensor) pairs and stamps what follows with the version.

        A sleeping engine wakes up to hold weights only. expected proves that the pairs are the trainer's. Requests
        under way go on with the new weights: recompute_kv computes what they have anew, else they keep the keys and
        values of the older weights.
        """
        started = time.perf_counter()
        self._wake_to(_Phase.WEIGHTS_AWAKE)
        set_aside = self._set_aside() if recompute_kv and self._running else []
        self.version = None  # a sync that breaks half way leaves weights that must not generate
        proof = WeightProof(expected)
        self.engine.load_weights(proof.watched(weights), version)
        proof.finish(version)
        self.version = version
        for request in set_aside:
            self._enter(request)
        return SyncReport(version=version, num_bytes=proof.num_bytes, seconds=time.perf_counter() - started)

    def _set_aside(self) -> list[_Request]:
        """Takes every sample under way out of the engine; each becomes a request of its own.

        An engine that goes on by itself may find that some ended meanwhile: the next step() gives them.
        """
        asked = {item.request_id: item for item in self._running.values()}
        stopped = self.abort()
        self._ended += [item for item in stopped if item.finish_reason != "abort"]
        return [replace(asked[item.request_id], partial=item) for item in stopped if item.finish_reason == "abort"]

    # ---- Sleep -------------------------------------------------------------------------------------------------

    def sleep(self, level: int = 1) -> int:
        """Frees the KV cache, and with level 2 the weights too; returns the bytes freed."""
        if level not in self.engine.sleep_levels:
            valid = ", ".join(map(str, self.engine.sleep_levels))
            raise ValueError(f"{type(self.engine).__name__} has no sleep level {level}. It has: {valid}.")
        if self._phase is _Phase.ASLEEP:
            return 0
        if self.has_unfinished():
            self.abort()
        if self._phase is _Phase.WEIGHTS_AWAKE:  # engines sleep as a whole, from awake only
            self._wake_to(_Phase.AWAKE)
        if level == 2:
            self.version = None
        self.freed_bytes = self.engine.sleep(level)
        self._phase = _Phase.ASLEEP
        logger.debug("engine asleep at level %d, %d bytes freed", level, self.freed_bytes)
        return self.freed_bytes

    def wake(self) -> None:
        self._wake_to(_Phase.AWAKE)

    def _wake_to(self, phase: _Phase) -> None:
        if self._phase is _Phase.ASLEEP:
            self._wake_part("weights")
            self._phase = _Phase.WEIGHTS_AWAKE
        if phase is _Phase.AWAKE and self._phase is _Phase.WEIGHTS_AWAKE:
            self._wake_part("kv_cache")
            self._phase = _Phase.AWAKE

    def _wake_part(self, part: EnginePart) -> None:
        """Tries again once, since the trainer's cached memory is given back only when asked."""
        try:
            self.engine.wake(part)
        except (torch.OutOfMemoryError, MemoryError) as error:
            logger.warning("no memory to wake the engine's %s (%s); clearing caches and trying again", part, error)
            clear_caches()
            try:
                self.engine.wake(part)
            except (torch.OutOfMemoryError, MemoryError) as again:
                hint = self.engine.wake_hint or "--engine_mem_fraction"
                raise RuntimeError(
                    f"There is no memory to wake the engine's {part}: {again}. Lower {hint}, or let the trainer hold "
                    "less while the engine runs."
                ) from again

    def close(self) -> None:
        self._running.clear()
        self._num_left.clear()
        self._ended.clear()
        self.engine.close()


def clear_caches() -> None:
    """Gives memory that is only cached back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
