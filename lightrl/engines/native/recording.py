"""The native engine for --routing.replay: it records the experts of each token in every layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightrl.engines.base import Completion
from lightrl.engines.native.engine import NativeEngine, build_native_engine
from lightrl.engines.native.sampler import SamplingPlan
from lightrl.engines.native.scheduler import Admission
from lightrl.models.routing import Router, routers_of

_Experts = NDArray[np.int16]
_Key = tuple[int, int]  # (request, sample)


class RouterTape:
    """Records the experts that the routers of a model chose since the tape was taken or cleared."""

    def __init__(self, model: nn.Module) -> None:
        self._routers = routers_of(model)
        self._kept: dict[int, list[Tensor]] = {}  # by router: one tensor per call of the model
        for index, router in enumerate(self._routers):
            router.module.register_forward_hook(partial(self._keep, index, router))

    def _keep(self, index: int, router: Router, module: nn.Module, args: Any, output: Any) -> None:
        self._kept.setdefault(index, []).append(router.experts(output))

    def clear(self) -> None:
        """Drops the recorded experts."""
        self._kept.clear()

    def take(self) -> _Experts | None:
        """Takes out the recorded experts, [tokens, layers, k]; None if there are none."""
        if not self._kept:
            return None
        layers = [torch.cat(self._kept[index]) for index in range(len(self._routers))]
        self._kept.clear()
        result: _Experts = torch.stack(layers, dim=1).to("cpu", torch.int16).numpy()
        return result


class RecordingEngine(NativeEngine):
    """Engine that returns with each completion the experts of all tokens that it ran, which is all but the last."""

    returns_routing = True

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._tape = RouterTape(self.model)
        self._prompts: dict[int, _Experts] = {}  # by request, until all its samples have entered
        self._samples: dict[_Key, list[_Experts]] = {}  # of the running samples: the prompt's, then one per token

    def abort(self, request_ids: Iterable[int] | None = None) -> list[Completion]:
        """Stops the requests and returns each unfinished sample so far."""
        chosen = None if request_ids is None else set(request_ids)
        for request_id in [*self._prompts] if chosen is None else chosen:
            self._prompts.pop(request_id, None)
        return self._with_routing(super().abort(chosen))

    def _prefill_group(self, admissions: list[Admission]) -> Tensor:
        self._tape.clear()
        logits = super()._prefill_group(admissions)
        experts = self._tape.take()
        assert experts is not None
        lengths = np.array([len(item.request.prompt) for item in admissions])
        width = int(lengths.max())
        # Prompts of one call are padded on the right; with a model's own cache, each is a call of its own.
        starts = np.arange(len(lengths)) * width if len(experts) == len(lengths) * width else lengths.cumsum() - lengths
        for item, start, length in zip(admissions, starts, lengths, strict=True):
            self._prompts[item.request.request_id] = experts[start : start + length].copy()
        return logits

    def _decode(self) -> list[Completion]:
        self._tape.clear()
        return super()._decode()

    def _draw(self, logits: Tensor, first_row: int, plan: SamplingPlan) -> list[Completion]:
        """Adds the experts of the preceding forward to the samples, then draws."""
        experts = self._tape.take()  # of one token per row; None after prompts, whose experts are kept already
        rows = self._scheduler.rows
        if experts is not None and len(experts) > self._scheduler.num_running:  # a model without a cache runs all again
            experts = experts[(rows.position[: self._scheduler.num_running] + 1).cumsum() - 1]
        for row in range(first_row, self._scheduler.num_running):
            request = rows.request[row]
            key = (request.request_id, int(rows.sample[row]))
            if experts is None:
                self._samples[key] = [self._prompts[request.request_id]]
            else:
                self._samples[key][rows.num_produced[row] :] = [experts[row, None]]  # once, if a step is repeated
        if experts is None:
            self._forget_entered(first_row)
        return self._with_routing(super()._draw(logits, first_row, plan))

    def _forget_entered(self, first_row: int) -> None:
        """Drops the prompts of requests whose samples have all entered."""
        for request in self._scheduler.rows.request[first_row : self._scheduler.num_running]:
            if request.num_admitted == request.params.n:
                self._prompts.pop(request.request_id, None)

    def _with_routing(self, done: list[Completion]) -> list[Completion]:
        parts = [self._samples.pop((item.request_id, item.sample_index), None) for item in done]
        return [
            item if experts is None else replace(item, routing=np.concatenate(experts))
            for item, experts in zip(done, parts, strict=True)
        ]


build_recording_engine = partial(build_native_engine, kind=RecordingEngine)
