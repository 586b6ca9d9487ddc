"""ColocatedEngine: the state machine around an engine, with its weight version, its requests and all checks."""

from __future__ import annotations

import gc
import logging
import math
import operator
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch

from lightrl.engines.base import (
    AnyPrompt,
    Completion,
    EnginePart,
    EnginePrompt,
    InferenceEngine,
    NamedTensors,
    SamplingParams,
    as_prompt,
)
from lightrl.engines.stop_strings import check_stop, cut_after_stop, cut_to
from lightrl.engines.unusable import FINISH_REASONS, describe_unusable, wrong_number
from lightrl.engines.weights.account import WeightProof
from lightrl.engines.weights.fingerprint import KnownWeights

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
    """The result of a weight sync on this rank."""

    version: int
    num_bytes: int
    seconds: float
    canary: float | None = None  # largest difference between logprobs of engine and trainer, if checked

    @property
    def gb_per_s(self) -> float:
        """The rate of the transfer, in GB per second."""
        return self.num_bytes / 1e9 / max(self.seconds, 1e-9)


@dataclass(frozen=True, slots=True)
class _Request:
    """A request of the caller; the engine's own request may be only the rest of it."""

    request_id: int  # the caller's
    prompt: EnginePrompt
    params: SamplingParams
    partial: Completion | None = None  # what was generated before

    def rest(self, partial: Completion) -> tuple[EnginePrompt, SamplingParams]:
        """Returns the request with which the engine continues after a partial completion."""
        num_done = len(partial.output_token_ids)
        if self.params.has_penalties and num_done:
            raise ValueError("A sample with penalties cannot go on after it was stopped: they count its first tokens.")
        params = replace(
            self.params,
            n=1,
            first_sample=partial.sample_index,
            first_token=self.params.first_token + num_done,
            max_new_tokens=self.params.max_new_tokens - num_done,
            min_new_tokens=max(0, self.params.min_new_tokens - num_done),
        )
        token_ids = self.prompt.token_ids + partial.output_token_ids
        return replace(self.prompt, token_ids=token_ids, kept=partial.kept), params


class ColocatedEngine:
    """An engine in the trainer's process. Its transitions are idempotent and can be repeated after a failure."""

    def __init__(self, engine: InferenceEngine, tokenizer: Any = None) -> None:
        self.engine = engine
        self.tokenizer = tokenizer  # decodes completions of requests with stop strings
        self.version: int | None = None  # of the weights it holds; None: no usable weights
        self.freed_bytes = 0  # in the last sleep
        self._phase = _Phase.AWAKE
        self._running: dict[int, _Request] = {}  # keyed by the engine's request id
        self._num_left: dict[int, int] = {}  # unfinished samples of each request
        self._next_request_id = 0
        self._ended: list[Completion] = []  # ended on their own, while others were set aside for new weights
        self._parked: list[_Request] = []  # unfinished samples that wait for the engine to wake up
        self._placeholder_ids = {engine.image_token_id, engine.video_token_id} - {None}  # of images and videos

    @property
    def status(self) -> EngineStatus:
        """Whether the engine can generate now."""
        return EngineStatus.WAKEUP if self._phase is _Phase.AWAKE else EngineStatus.SLEEPED

    @property
    def needs_weights(self) -> bool:
        """Whether a weight sync must come before the next generation, as after a sleep of level 2."""
        return self.version is None

    # ---- Requests ----------------------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[AnyPrompt], params: Sequence[SamplingParams]) -> list[Completion]:
        """Returns n completions per prompt, in order. A bad prompt is refused before anything is submitted."""
        if len(prompts) != len(params):
            raise ValueError(f"{len(prompts)} prompts but {len(params)} sampling parameters.")
        self._require_ready()
        if self.has_unfinished():
            raise RuntimeError("The engine still has requests of an earlier call. Abort them first.")
        checked = list(map(as_prompt, prompts))
        for index, prompt in enumerate(checked):
            self.check_prompt(f"prompt {index}", prompt, params[index])
        done: list[Completion] = []
        try:
            requests = list(map(_Request, range(len(checked)), checked, params))
            running = {self.engine.submit(request.prompt, request.params): request for request in requests}
            while self.engine.has_unfinished():
                done.extend(self._as_requested(item, running) for item in self._step())
        except BaseException:
            self.engine.abort()  # left-over requests would join the next call
            raise
        if len(done) != (wanted := sum(param.n for param in params)):
            raise RuntimeError(wrong_number(type(self.engine).__name__, len(done), wanted))
        return sorted(done, key=lambda item: (item.request_id, item.sample_index))

    def submit(self, prompt: AnyPrompt, params: SamplingParams, partial: Completion | None = None) -> int:
        """Queues a request and returns its id; ids count up.

        With the partial completion of an aborted sample, that sample is continued where it stopped. It is still one
        sample: give the parameters with which the request began.
        """
        self._require_ready()
        checked = as_prompt(prompt)
        self.check_prompt(f"the prompt of request {self._next_request_id}", checked, params)
        return self._start(checked, params, partial)

    def step(self) -> list[Completion]:
        """Runs one scheduling step; returns the samples that it finished."""
        self._require_ready()
        finished = self._step()
        completions, self._ended = self._ended, []
        for item in finished:
            completions.append(self._as_requested(item, self._running))
            self._num_left[item.request_id] -= 1
            if not self._num_left[item.request_id]:
                del self._running[item.request_id], self._num_left[item.request_id]
        return completions

    def has_unfinished(self) -> bool:
        """Returns whether step() still has something to return, now or later."""
        return bool(self._ended or self._parked) or self.engine.has_unfinished()

    def abort(self, request_ids: Iterable[int] | None = None) -> list[Completion]:
        """Stops the requests (None: all); returns each unfinished sample so far, with the reason "abort".

        An engine in processes of its own may have ended a sample by then, which keeps its own reason.
        """
        chosen = None if request_ids is None else set(request_ids)
        own = [key for key, item in self._running.items() if chosen is None or item.request_id in chosen]
        stopped = self.engine.abort(None if chosen is None else own)
        stopped = [self._as_requested(item, self._running) for item in stopped]
        for key in own:
            del self._running[key], self._num_left[key]
        ended = [item for item in self._ended if chosen is None or item.request_id in chosen]
        self._ended = [item for item in self._ended if item not in ended]
        parked = [item for item in self._parked if chosen is None or item.request_id in chosen]
        self._parked = [item for item in self._parked if item not in parked]
        return ended + [item.partial for item in parked if item.partial is not None] + stopped

    def _step(self) -> list[Completion]:
        if not isinstance(finished := self.engine.step(), list):
            raise RuntimeError(f"{type(self.engine).__name__}.step() returned {finished!r:.80}: no list of Completion.")
        return finished

    def _start(self, prompt: EnginePrompt, params: SamplingParams, partial: Completion | None = None) -> int:
        request = _Request(self._next_request_id, prompt, params, partial)
        self._next_request_id += 1
        self._enter(request)
        return request.request_id

    def _enter(self, request: _Request) -> None:
        prompt, params = request.prompt, request.params
        if request.partial is not None:
            prompt, params = request.rest(request.partial)
        engine_id = self.engine.submit(prompt, params)
        self._running[engine_id], self._num_left[engine_id] = request, params.n

    def _as_requested(self, item: Completion, running: Mapping[int, _Request]) -> Completion:
        """Checks the engine's completion and maps it to the caller's request; running: requests by engine id."""
        if problem := _problem_of(item, running, self.engine.vocab_size):
            raise RuntimeError(f"{type(self.engine).__name__} returned {problem}.")
        request = running[item.request_id]
        item = replace(item, request_id=request.request_id)
        if self._placeholder_ids:
            item = _cut_before(self._placeholder_ids, item)
        item = item if request.partial is None else _joined(request.partial, item)
        params = request.params
        return cut_after_stop(item, params.stop, self.tokenizer, params.min_new_tokens) if params.stop else item

    # ---- Checks of a prompt, the only ones, for every engine -------------------------------------------------------

    def _require_ready(self) -> None:
        if self._phase is not _Phase.AWAKE or self.version is None:
            raise RuntimeError(_describe_not_ready(self._phase))

    def check_prompt(self, name: str, prompt: EnginePrompt, params: SamplingParams) -> None:
        """Raises ValueError for a prompt that would hang or kill one engine or another."""
        engine, ids, named = self.engine, prompt.token_ids, (*prompt.token_ids, *params.stop_token_ids)
        if not ids or min(named) < 0 or max(named) >= engine.vocab_size:
            raise ValueError(_describe_bad_ids(name, ids, params.stop_token_ids, engine.vocab_size))
        if prompt.images or prompt.videos or self._placeholder_ids:
            _check_media(name, prompt, engine)
        if params.stop:
            check_stop(params.stop, self.tokenizer)
        if params.adapter not in engine.adapters:
            raise ValueError(_describe_unknown_adapter(name, params.adapter, engine.adapters))
        length = engine.num_prompt_tokens(prompt)
        if length + params.max_new_tokens > engine.max_model_len:
            raise ValueError(_describe_too_long(name, length, params.max_new_tokens, engine.max_model_len))

    # ---- Weights -----------------------------------------------------------------------------------------------

    def update_weights(
        self, weights: NamedTensors, version: int, *, expected: KnownWeights | None = None, recompute_kv: bool = True
    ) -> SyncReport:
        """Loads (HF name, full tensor) pairs; tokens generated from now on carry the version.

        A sleeping engine wakes up only to hold weights, and unfinished requests go on with the new weights.

        Args:
            weights: the pairs, consumed to the end.
            expected: the trainer's fingerprints, which prove that the pairs are the trainer's; None skips the proof.
            recompute_kv: False lets unfinished requests keep the keys and values of the older weights.
        """
        started = time.perf_counter()
        self._wake_weights()
        # A sync that fails leaves them parked for the next one.
        self._parked = self._take_out() if recompute_kv and self._running else self._parked
        self.version = None  # a sync that breaks halfway leaves weights that must not generate
        proof = WeightProof(expected)
        self.engine.load_weights(proof.watched(weights), version)
        proof.finish(version)
        self.version = version
        if self._parked and self._phase is _Phase.AWAKE:
            self._go_on()
        return SyncReport(version=version, num_bytes=proof.num_bytes, seconds=time.perf_counter() - started)

    def _take_out(self) -> list[_Request]:
        """Takes all unfinished samples out of the engine, each as a request that is computed again from its prompt.

        In an engine that runs on its own, some may have ended meanwhile; the next step() returns them.
        """
        if any(item.params.has_penalties for item in self._running.values()):
            raise RuntimeError(
                "Samples with penalties cannot go on after a sleep or a weight sync: they count their first tokens. "
                "Call abort() before."
            )
        requests = {item.request_id: item for item in (*self._running.values(), *self._parked)}
        stopped = [replace(item, kept=None) for item in self.abort()]
        self._ended += [item for item in stopped if item.finish_reason != "abort"]
        return [replace(requests[item.request_id], partial=item) for item in stopped if item.finish_reason == "abort"]

    def set_aside(self) -> AbstractContextManager[None]:
        """Takes all requests out of the engine while the body runs, which may generate; then continues them."""
        return self._without_requests() if self._running or self._ended else nullcontext()

    @contextmanager
    def _without_requests(self) -> Iterator[None]:
        requests = self._take_out() if self._running else []
        ended, self._ended = self._ended, []
        try:
            yield
        finally:
            self._ended = ended
            for request in requests:
                self._enter(request)

    # ---- Sleep -------------------------------------------------------------------------------------------------

    def sleep(self, level: int = 1) -> int:
        """Frees the KV cache, and with level 2 the weights too; returns the bytes freed.

        Unfinished requests keep what they have, and go on when the engine is awake again.
        """
        if level not in self.engine.sleep_levels:
            known = ", ".join(map(str, self.engine.sleep_levels))
            raise ValueError(f"{type(self.engine).__name__} has no sleep level {level}. It has: {known}.")
        if self._phase is _Phase.ASLEEP:
            return 0
        self.wake()  # engines go to sleep as a whole, and only when awake
        if self._running:
            self._parked = self._take_out()
        if level == 2:
            self.version = None
        self.freed_bytes = int(self.engine.sleep(level))
        self._phase = _Phase.ASLEEP
        return self.freed_bytes

    def wake(self) -> None:
        """Makes the engine ready to generate: wakes the weights first, then the KV cache."""
        self._wake_weights()
        if self._phase is _Phase.WEIGHTS_AWAKE:
            self._wake_part("kv_cache", _Phase.AWAKE)
        if self._parked:
            self._go_on()

    def _wake_weights(self) -> None:
        if self._phase is _Phase.ASLEEP:
            self._wake_part("weights", _Phase.WEIGHTS_AWAKE)

    def _go_on(self) -> None:
        while self._parked:
            self._enter(self._parked[0])
            del self._parked[0]

    def _wake_part(self, part: EnginePart, phase: _Phase) -> None:
        try:
            self.engine.wake(part)
        except (torch.OutOfMemoryError, MemoryError) as error:
            self._wake_after_clearing(part, error)
        self._phase = phase

    def _wake_after_clearing(self, part: EnginePart, error: BaseException) -> None:
        """Wakes a part again after clearing caches, because the trainer's cached memory is freed only on request."""
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
        """Forgets every request and frees the engine."""
        self._running, self._num_left, self._ended, self._parked = {}, {}, [], []
        self.engine.close()


def _joined(partial: Completion, item: Completion) -> Completion:
    """Joins an earlier part of a sample and a later one."""
    return replace(
        item,
        prompt_token_ids=item.prompt_token_ids[: len(item.prompt_token_ids) - len(partial.output_token_ids)],
        output_token_ids=partial.output_token_ids + item.output_token_ids,
        logprobs=partial.logprobs + item.logprobs,
        versions=partial.versions + item.versions,
    )


def _cut_before(placeholder_ids: Collection[int | None], item: Completion) -> Completion:
    """Cuts before the first sampled image or video placeholder, whose image a trainer would look for."""
    end = next((i for i, token in enumerate(item.output_token_ids) if token in placeholder_ids), None)
    return item if end is None else cut_to(item, end, "length")


def _problem_of(item: Completion, running: Collection[int], vocab_size: int) -> str | None:
    """Describes what an engine must not return; running: the requests that still lack a sample."""
    if isinstance(item, Completion) and item.request_id in running and item.finish_reason in FINISH_REASONS:
        with suppress(TypeError, ValueError, RuntimeError):  # of None, other lengths, no numbers, and tensors
            parts = zip(item.output_token_ids or (), item.logprobs, item.versions, strict=True)
            if all(0 <= operator.index(token) < vocab_size and math.isfinite(value) for token, value, _ in parts):
                return None
    return describe_unusable(item, running, vocab_size)


def _describe_not_ready(phase: _Phase) -> str:
    if phase is not _Phase.AWAKE:
        return f"The engine is asleep ({phase.value}). Call wakeup_inference_engine() before generating."
    return "The engine has no weights yet. Call update_engine_weights(actor) before generating."


def _describe_bad_ids(name: str, ids: tuple[int, ...], stop_ids: Sequence[int], vocab_size: int) -> str:
    if not ids:
        return f"{name} is empty: it needs at least one token."
    bad = next(token for token in (*ids, *stop_ids) if not 0 <= token < vocab_size)
    where = f"{name} holds" if bad in ids else f"stop_token_ids of {name} holds"
    return f"{where} token id {bad}, outside the model's vocabulary of {vocab_size}."


def _describe_unknown_adapter(name: str, adapter: str, known: Sequence[str]) -> str:
    needed = "--lora.rank or --lora.path, --lora.engine unmerged, and their folders in --lora.others"
    hint = f"Add it by --lora.others {adapter}=FOLDER." if len(known) > 1 else f"Others need {needed}."
    return f"{name} asks for adapter {adapter!r}. This engine has {', '.join(known)}. {hint}"


def _describe_too_long(name: str, length: int, max_new_tokens: int, max_model_len: int) -> str:
    return (
        f"{name} has {length} tokens; with max_new_tokens {max_new_tokens} that is "
        f"beyond the context of {max_model_len}. Shorten it or lower max_new_tokens."
    )


def _check_media(name: str, prompt: EnginePrompt, engine: InferenceEngine) -> None:
    _check_placeholders(name, "image", prompt.images, prompt.token_ids, engine.image_token_id)
    _check_placeholders(name, "video", prompt.videos, prompt.token_ids, engine.video_token_id)


def _check_placeholders(
    name: str, kind: str, items: Sequence[object], ids: tuple[int, ...], token_id: int | None
) -> None:
    if items and token_id is None:
        raise ValueError(f"{name} comes with {kind}s, which this engine's model does not take.")
    count = 0 if token_id is None else ids.count(token_id)
    if count != len(items):
        raise ValueError(
            f"{name} has {count} {kind} placeholders (token id {token_id}) and {len(items)} {kind}s. It needs one "
            f"placeholder for each {kind}."
        )


def clear_caches() -> None:
    """Gives cached memory back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
