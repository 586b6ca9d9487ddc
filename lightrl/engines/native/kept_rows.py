"""The native engine of --rollout.keep_cache: a stopped sample is continued with the keys and values that it had.

The completion of a stopped sample holds a copy of its row, whose memory is freed with the completion; the cache itself
is freed as usual while the engine sleeps. The sample continues from its last token, whose key and value were not
computed yet, so nothing runs twice. If the weights have changed meanwhile, the new ones read keys and values of the old
ones: the logprobs are those with which the tokens were drawn, but a trainer that runs the whole sample with the new
weights computes different ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lightrl.engines.base import AnyPrompt, Completion, SamplingParams, as_prompt
from lightrl.engines.native.engine import ROOM_AHEAD, NativeEngine, build_native_engine
from lightrl.engines.native.own_cache import SampleCaches, num_bytes_of
from lightrl.engines.native.scheduler import Admission, Scheduler


class KeptRow:
    """The cached keys and values of a stopped sample, for all its tokens but the last."""

    def __init__(self, content: Any, length: int) -> None:
        """Takes `content`, the result of the cache's read_row(), and `length`, the number of tokens in it."""
        self._content = content
        self.length = length

    @property
    def num_bytes(self) -> int:
        """The bytes that are held; 0 after take()."""
        return num_bytes_of(self._content)

    @property
    def is_empty(self) -> bool:
        """Whether the content was taken, so that the sample must be computed from its beginning."""
        return self._content is None

    def take(self) -> Any:
        """Returns the content and empties this object, even if others still hold it."""
        content, self._content = self._content, None
        return content


class ReturningScheduler(Scheduler):
    """Scheduler that can admit some requests ahead of all others."""

    def admit_first(self, request_ids: Collection[int]) -> list[Admission]:
        """Gives free rows to these waiting requests first, in their order."""
        waiting = self._waiting
        self._waiting = deque(request for request in waiting if request.request_id in request_ids)
        admissions = self.admit()
        self._waiting.extend(request for request in waiting if request.request_id not in request_ids)
        return admissions


class KeepingEngine(NativeEngine):
    """Engine that returns each stopped sample with its row, and restores the row when the sample continues."""

    _scheduler: ReturningScheduler

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if self._media is not None:
            raise ValueError("--rollout.keep_cache does not go with a model that takes images: leave it out.")
        self._scheduler = ReturningScheduler(self.max_num_seqs, self._scheduler.eos_table)
        self._returning: dict[int, KeptRow] = {}  # by the id of the request that waits for a row

    def submit(self, prompt: AnyPrompt, params: SamplingParams) -> int:
        """Queues a request and returns its id; a prompt that brings its row is not computed again."""
        request_id = super().submit(prompt, params)
        source = as_prompt(prompt)
        if isinstance(source.kept, KeptRow) and not source.kept.is_empty:
            assert source.kept.length == len(source.token_ids) - 1, "the row is of other tokens"
            self._returning[request_id] = source.kept
        return request_id

    @torch.inference_mode()
    def abort(self, request_ids: Iterable[int] | None = None) -> list[Completion]:
        """Stops the requests and returns each unfinished sample so far, with its row."""
        rows, chosen = self._scheduler.rows, None if request_ids is None else frozenset(request_ids)
        kept: dict[tuple[int, int], KeptRow] = {}
        for row in range(self._scheduler.num_running):
            request_id, length = rows.request[row].request_id, int(rows.position[row])
            if chosen is None or request_id in chosen:
                kept[request_id, int(rows.sample[row])] = KeptRow(self._cache.read_row(row, length), length)
        stopped = super().abort(chosen)
        waited = {item.request_id: self._returning.pop(item.request_id, None) for item in stopped}
        return [
            replace(item, kept=kept.get((item.request_id, item.sample_index), waited[item.request_id]))
            for item in stopped
        ]

    def close(self) -> None:
        """Drops the requests, their rows, the cache and the model."""
        self._returning.clear()
        super().close()

    def _admit(self) -> list[Completion]:
        if self._returning:
            self._bring_back(self._scheduler.admit_first(self._returning))
        return super()._admit()

    def _bring_back(self, admissions: list[Admission]) -> None:
        """Restores kept rows; the next decoding step continues from each sample's last token."""
        if not admissions:
            return
        try:
            self._reserve(max(len(item.request.prompt) + ROOM_AHEAD for item in admissions))
            for item in admissions:
                kept = self._returning.pop(item.request.request_id)
                self._put_back(item.first_row, kept)
                self._scheduler.rows.token[item.first_row] = item.request.prompt[-1]
        except BaseException:
            self._scheduler.withdraw(admissions)  # whose row is gone already is computed from its beginning
            raise
        self._plan = None  # the running rows have changed

    def _put_back(self, row: int, kept: KeptRow) -> None:
        """Writes a row into the cache, which may have been freed since it was read."""
        content = kept.take()
        if isinstance(self._cache, SampleCaches):
            self._cache.write_rows(slice(row, row + 1), content, kept.length)
            return
        place = torch.tensor([row], device=self._device)
        self._cache.begin_prefill(place, torch.zeros_like(place))
        for index, layer in enumerate(content):
            if layer is not None:
                self._cache.store_prompts(layer.keys, layer.values, index)


build_keeping_engine = partial(build_native_engine, kind=KeepingEngine)
