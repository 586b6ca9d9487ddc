"""Sends a weight sync to SGLang's schedulers in buckets of bounded size, and collects their reports.

Updates run between begin_weight_update and end_weight_update if SGLang has them (0.5.23 does). It refuses with a return
value, never with an exception:
https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/managers/scheduler_components/weight_updater.py
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightrl.engines.base import EngineGroup
from lightrl.engines.sglang.loader import Bucket, read_reports
from lightrl.engines.sglang.process import SGLangProcess

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The way of weights to the schedulers."""

    process: SGLangProcess | None  # None on the ranks that do not own the engine
    group: EngineGroup
    device: torch.device
    loader: str  # import path of the function that the schedulers call
    reports: Path  # folder to which they write
    max_bytes: int  # per bucket; a larger tensor is sent alone


class WeightSender:
    """Sends the weights of one version. The owner keeps an error until the end, so that every rank gets there."""

    def __init__(self, route: Route, version: int, *, is_busy: bool) -> None:
        """Takes `is_busy`, whether there are unfinished requests: these pause, and keep their keys and values."""
        self._route, self._version = route, version
        self._bucket = Bucket()
        self._problems: list[str] = []
        self._is_first, self._is_open, self._is_paused = True, False, False
        self._sent: Any = None  # tensors that a scheduler may still read
        self._on_owner(lambda process: self._begin(process, is_busy))

    def add(self, name: str, tensor: Tensor) -> None:
        """Adds a tensor; first sends the current bucket if the tensor does not fit into it."""
        size = tensor.numel() * tensor.element_size()
        if self._bucket.tensors and self._bucket.num_bytes + size > self._route.max_bytes:
            self._send(is_last=False)
        self._bucket.add(name, tensor)

    def finish(self) -> list[str]:
        """Sends the rest, ends the session, and returns the problems on every rank."""
        self._send(is_last=True)
        self._on_owner(self._end, even_after_errors=True)
        problems = self._route.group.broadcast(self._problems)
        self._sent = None
        return problems

    def _on_owner(self, work: Callable[[SGLangProcess], None], *, even_after_errors: bool = False) -> None:
        if self._route.process is None or (self._problems and not even_after_errors):
            return
        try:
            work(self._route.process)
        except Exception as error:
            self._problems.append(f"{type(error).__name__}: {error}")

    def _begin(self, process: SGLangProcess, is_busy: bool) -> None:
        from sglang.srt.managers import io_struct

        if is_busy:  # otherwise the update waits for every request to end
            pause = io_struct.PauseGenerationReqInput(mode="in_place")
            process.run(_ask(lambda: process.manager.pause_generation(pause)))
            self._is_paused = True
        begin = io_struct.BeginWeightUpdateReqInput()
        _require(process.run(_ask(lambda: process.manager.begin_weight_update(begin, None))))
        self._is_open = True

    def _end(self, process: SGLangProcess) -> None:
        from sglang.srt.managers import io_struct

        try:
            if self._is_open:
                self._is_open = False
                end = io_struct.EndWeightUpdateReqInput()
                _require(process.run(_ask(lambda: process.manager.end_weight_update(end, None))))
        finally:
            if self._is_paused:
                go_on = io_struct.ContinueGenerationReqInput()
                process.run(_ask(lambda: process.manager.continue_generation(go_on)))

    def _send(self, *, is_last: bool) -> None:
        payloads = self._payloads(is_last=is_last)
        self._on_owner(lambda process: self._update(process, payloads, is_last))

    def _payloads(self, *, is_last: bool) -> list[bytes]:
        """Returns the packed bucket, serialised once for each scheduler of the group.

        On GPUs, each rank gives its scheduler a handle to its own copy. On the CPU, the owner makes all of them, since
        memory cannot be passed between processes of different parents.
        """
        route, bucket, is_first = self._route, self._bucket, self._is_first
        self._bucket, self._is_first = Bucket(), False
        is_cuda = route.device.type == "cuda"
        if route.process is None and not is_cuda:
            return []
        tensors = bucket.pack(report=str(route.reports), is_first=is_first, is_last=is_last, device=route.device)
        payloads = [serialized(tensors) for _ in range(1 if is_cuda else route.group.size)]
        if is_cuda:
            torch.cuda.synchronize(route.device)
            payloads = [part for parts in route.group.gather(payloads) for part in parts]
        self._sent = tensors
        return payloads

    def _update(self, process: SGLangProcess, payloads: list[bytes], is_last: bool) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads,
            load_format=self._route.loader,
            # Refused while requests are running; the salt of each version separates their cached prompts.
            flush_cache=is_last and not self._is_paused,
            weight_version=str(self._version) if is_last else None,
        )
        _require(process.run(_ask(lambda: process.manager.update_weights_from_tensor(request, None))))
        if is_last:
            problems, unread = read_reports(self._route.reports, self._route.group.size)
            self._problems += problems
            if unread:
                logger.info("%d weights cannot be read back from SGLang: %s", len(unread), ", ".join(unread[:10]))


async def _ask(call: Callable[[], Awaitable[T]]) -> T:
    """Makes the call on the event loop, which some of the manager's methods look up before they wait."""
    return await call()


def _require(outcome: tuple[bool, str]) -> None:
    """Raises an error if SGLang refused, for which SGLang itself only returns (False, message)."""
    is_done, message = outcome
    if not is_done:
        raise RuntimeError(f"SGLang: {message}")


def serialized(tensors: Any) -> bytes:
    """Serialises a list or dictionary of tensors for a scheduler."""
    from sglang.srt.utils import MultiprocessingSerializer

    payload: bytes = MultiprocessingSerializer.serialize(tensors)
    return payload
