"""Drives SGLang's samples, each a request of its own, on the rank that owns the engine."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightrl.engines.base import Completion, EnginePrompt, SamplingParams
from lightrl.engines.sglang.process import SGLangProcess
from lightrl.models.multimodal import VIDEO_FPS, MediaProcessor
from lightrl.records import FinishReason
from lightrl.seeding import mix_seed

_STEP_S = 0.2  # longest wait of a step for a sample to finish
_ABORT_AGAIN_S = 0.5  # an abort is lost while the request is on its way to the scheduler
_ABORT_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample of a request."""

    request_id: int
    index: int
    prompt_ids: tuple[int, ...]  # each placeholder repeated for the features of its image or video
    params: SamplingParams
    features: dict[str, Any] | None = None  # images and videos in SGLang's form

    @property
    def rid(self) -> str:
        """SGLang's id, of fixed width, because SGLang aborts every request whose id begins with the given one."""
        return f"{self.request_id:012d}-{self.index:08d}"


def is_cut(params: SamplingParams) -> bool:
    """Returns whether top-p or top-k leave less than the whole vocabulary."""
    return params.top_p < 1 or params.top_k > 0


def media_features(media: MediaProcessor, prompt: EnginePrompt) -> dict[str, Any] | None:
    """Returns the patches of a prompt's images and videos under its processor's names."""
    if not (prompt.images or prompt.videos):
        return None
    encoded = media.encode(prompt.token_ids, prompt.images, prompt.videos)
    assert encoded.pixel_values is not None
    assert encoded.grid_thw is not None
    grids = encoded.grid_thw
    patches = encoded.pixel_values.split(grids.prod(1).tolist())
    is_video = [token == media.video_token_id for token in prompt.token_ids if token in _placeholders(media)]
    features: dict[str, Any] = {"format": "processor_output"}
    if prompt.images:
        features["pixel_values"], features["image_grid_thw"] = _chosen_patches(
            patches, grids, [not video for video in is_video]
        )
    if prompt.videos:
        features["pixel_values_videos"], features["video_grid_thw"] = _chosen_patches(patches, grids, is_video)
        merged = float(media.config.vision_config.temporal_patch_size)
        features["second_per_grid_ts"] = torch.full((len(prompt.videos),), merged / VIDEO_FPS)
    return features


def _placeholders(media: MediaProcessor) -> tuple[int, int]:
    return media.image_token_id, media.video_token_id


def _chosen_patches(patches: Sequence[Tensor], grids: Tensor, chosen: list[bool]) -> tuple[Tensor, Tensor]:
    return torch.cat([part for part, is_one in zip(patches, chosen, strict=True) if is_one]), grids[chosen]


class SampleTasks:
    """Waiting and running samples; the schedulers go on with them even while nobody waits here."""

    def __init__(
        self,
        process: SGLangProcess,
        *,
        eos_ids: Sequence[int],
        vocab_size: int,
        is_deterministic: bool,
        asked_for: Callable[[SamplingParams], Mapping[str, Any]],
    ) -> None:
        """Takes `asked_for`, which returns additional arguments of a request."""
        self.version = 0  # of the weights with which new samples start
        self._process = process
        self._eos_ids = set(eos_ids)
        self._vocab_size = vocab_size
        self._is_deterministic = is_deterministic
        self._asked_for = asked_for
        self._waiting: list[Sample] = []
        self._running: dict[asyncio.Task[Any], Sample] = {}

    def add(self, samples: Sequence[Sample]) -> None:
        """Queues samples; the next step() starts them."""
        self._waiting += samples

    def step(self) -> list[Completion]:
        """Starts waiting samples; returns finished ones, after a short wait for the first."""
        self._process.run(self._start_waiting())
        self._process.run(self._wait_for_first())
        return self._collect()

    def abort(self, request_ids: set[int]) -> list[Completion]:
        """Stops the requests and returns their samples so far; one that ended meanwhile keeps its own reason."""
        done = [_not_started(sample) for sample in self._waiting if sample.request_id in request_ids]
        self._waiting = [sample for sample in self._waiting if sample.request_id not in request_ids]
        own = {task: sample for task, sample in self._running.items() if sample.request_id in request_ids}
        for task in own:
            del self._running[task]
        self._process.run(self._stop(own))
        # One that SGLang gave up meanwhile starts again if it is continued, and then step() raises its error.
        done += [
            _not_started(sample) if task.exception() else self._completion(sample, task.result())
            for task, sample in own.items()
        ]
        return sorted(done, key=_order)

    async def _start_waiting(self) -> None:
        for sample in self._waiting:
            self._running[asyncio.ensure_future(self._generate(sample))] = sample
        self._waiting.clear()

    async def _wait_for_first(self) -> None:
        if self._running:
            await asyncio.wait(self._running, timeout=_STEP_S, return_when=asyncio.FIRST_COMPLETED)

    def _collect(self) -> list[Completion]:
        """Returns the samples that have ended; raises the first error among them."""
        ended = [(task, sample) for task, sample in self._running.items() if task.done()]
        for task, _ in ended:
            del self._running[task]
        return sorted((self._completion(sample, task.result()) for task, sample in ended), key=_order)

    async def _stop(self, own: dict[asyncio.Task[Any], Sample]) -> None:
        manager, give_up = self._process.manager, time.monotonic() + _ABORT_TIMEOUT_S
        left = set(own)
        while left:
            for task in left:
                state = manager.rid_to_state.get(own[task].rid)
                if state is not None:
                    state.abort_sent = False
                    manager.abort_request(rid=own[task].rid)
            _, left = await asyncio.wait(left, timeout=_ABORT_AGAIN_S)
            if left and time.monotonic() > give_up:
                raise RuntimeError(f"SGLang did not stop {len(left)} samples within {_ABORT_TIMEOUT_S:.0f} s.")

    async def _generate(self, sample: Sample) -> Any:
        from sglang.srt.managers.io_struct import GenerateReqInput

        request = GenerateReqInput(
            rid=sample.rid,
            input_ids=list(sample.prompt_ids),
            sampling_params=self._sampling(sample),
            return_logprob=True,
            # Keys and values are shared only among requests of the same weight version, even if no flush was possible.
            cache_salt=str(self.version),
            **({"return_sampling_mask": True} if is_cut(sample.params) else {}),
            **self._asked_for(sample.params),
        )
        if sample.features is not None:
            request.image_data = [dict(sample.features)]
        return await self._process.manager.generate_request(request, None).__anext__()

    def _sampling(self, sample: Sample) -> dict[str, Any]:
        params = sample.params
        wanted: dict[str, Any] = {
            "max_new_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or (self._vocab_size if is_cut(params) else -1),
            "ignore_eos": params.ignore_eos,
        }
        if not params.ignore_eos:
            wanted["stop_token_ids"] = sorted({*self._eos_ids, *params.stop_token_ids})
        if self._is_deterministic:  # used only then; the position counts from the prompt's start, even if resumed
            wanted["sampling_seed"] = mix_seed(params.seed or 0, sample.index) % 2**31
        return wanted

    def _completion(self, sample: Sample, result: dict[str, Any]) -> Completion:
        meta, params = result["meta_info"], sample.params
        logprobs = [item[0] for item in meta.get("output_token_logprobs") or ()]
        if is_cut(params) and params.temperature:
            logprobs = list(meta.get("output_token_sampling_logprobs") or ())
        if any(math.isnan(value) for value in logprobs):
            raise RuntimeError(f"The engine's logits are not finite (weight version {self.version}).")
        tokens = list(result["output_ids"])[: len(logprobs)]
        tokens, reason = self._ended(params, tokens, (meta["finish_reason"] or {}).get("type"))
        return Completion(
            request_id=sample.request_id,
            sample_index=sample.index,
            prompt_token_ids=sample.prompt_ids,
            output_token_ids=tuple(tokens),
            logprobs=tuple(logprobs[: len(tokens)]),
            versions=_versions(meta, len(tokens), self.version),
            finish_reason=reason,
        )

    def _ended(self, params: SamplingParams, tokens: list[int], said: str | None) -> tuple[list[int], FinishReason]:
        """Returns the tokens that count and why they end; SGLang reports "abort" even if the last step found an end."""
        # With ignore_eos, SGLang also goes on past the requested number of tokens.
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else self._eos_ids)
        place = next((i for i, token in enumerate(tokens) if token in stops), None)
        if place is not None:
            return tokens[: place + 1], "stop"
        if len(tokens) >= params.max_new_tokens:
            return tokens, "length"
        if said != "abort":
            raise RuntimeError(f"SGLang ended a sample after {len(tokens)} of {params.max_new_tokens} tokens: {said}.")
        return tokens, "abort"


def _order(item: Completion) -> tuple[int, int]:
    return item.request_id, item.sample_index


def _versions(meta: dict[str, Any], count: int, current: int) -> tuple[int, ...]:
    versions = [current] * count
    for span in meta.get("weight_versions") or ():
        if str(span["version"]).isdigit():
            end = min(int(span["end"]), count)
            versions[span["start"] : end] = [int(span["version"])] * max(0, end - span["start"])
    return tuple(versions)


def _not_started(sample: Sample) -> Completion:
    return Completion(
        request_id=sample.request_id,
        sample_index=sample.index,
        prompt_token_ids=sample.prompt_ids,
        output_token_ids=(),
        logprobs=(),
        versions=(),
        finish_reason="abort",
    )
