"""The native engine for --top_p and --top_k in training: it reports the tokens that these left to draw from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightrl.engines.base import Completion
from lightrl.engines.native.engine import NativeEngine, build_native_engine
from lightrl.engines.native.sampler import SamplingPlan, keep_allowed

_Key = tuple[int, int]  # (request, sample)


class TruncatedEngine(NativeEngine):
    """Engine that returns with each completion the tokens that it could have drawn instead, as Sample.allowed."""

    reports_allowed = True

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._draw_from, self.draw = self.draw, self._draw_and_note
        self._keys: list[_Key] = []  # of the rows in the current draw
        self._allowed: dict[_Key, list[NDArray[np.int32]]] = {}  # of the running samples: one array per token

    def abort(self, request_ids: Iterable[int] | None = None) -> list[Completion]:
        """Stops the requests and returns each unfinished sample so far."""
        return [self._with_allowed(item) for item in super().abort(request_ids)]

    def _draw(self, logits: Tensor, first_row: int, plan: SamplingPlan) -> list[Completion]:
        rows = self._scheduler.rows
        running = range(first_row, self._scheduler.num_running)
        self._keys = [(rows.request[row].request_id, int(rows.sample[row])) for row in running]
        return [self._with_allowed(item) for item in super()._draw(logits, first_row, plan)]

    def _draw_and_note(self, logits: Tensor, uniforms: Tensor, plan: SamplingPlan) -> tuple[Tensor, Tensor]:
        if plan.filters is None:
            return self._draw_from(logits, uniforms, plan)
        scores = logits.float() if plan.temperature is None else logits.float() / plan.temperature
        scores = keep_allowed(scores, plan.filters)
        limited = plan.filters.rows
        row, token = (scores[limited] > float("-inf")).nonzero(as_tuple=True)
        counts = np.bincount(row.cpu().numpy(), minlength=len(limited))
        tokens = np.split(token.cpu().numpy().astype(np.int32), counts.cumsum()[:-1])
        allowed = dict(zip(limited.tolist(), tokens, strict=True))
        for index, key in enumerate(self._keys):
            self._allowed.setdefault(key, []).append(allowed.get(index, np.empty(0, np.int32)))
        return self._draw_from(scores, uniforms, replace(plan, temperature=None, filters=None))

    def _with_allowed(self, item: Completion) -> Completion:
        parts = self._allowed.pop((item.request_id, item.sample_index), None)
        if parts is None:
            return item
        index = np.repeat(np.arange(len(parts), dtype=np.int32), [len(part) for part in parts])
        return replace(item, allowed=np.stack([index, np.concatenate(parts)], axis=1))


build_truncated_engine = partial(build_native_engine, kind=TruncatedEngine)
