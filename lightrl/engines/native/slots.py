"""The running sequences as columns of numbers: row r of every column is the sequence in row r of the KV cache.

The rows 0 .. num_active - 1 are always the running ones: a finished row is filled by the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightrl.engines.base import Completion, EnginePrompt, SamplingParams
from lightrl.records import FinishReason
from lightrl.seeding import prefix_state

_FIRST_COLUMNS = 8  # outputs start with room for this many tokens and double


@dataclass(frozen=True, slots=True)
class Request:
    """A submitted prompt."""

    request_id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    source: EnginePrompt | None = None  # of a vision-language model: the prompt before its images were expanded

    @property
    def most_places(self) -> int:
        return len(self.prompt) + self.params.max_new_tokens


@dataclass(frozen=True, slots=True)
class Moves:
    """Rows to copy so that the running ones stay first: row sources[j] to row targets[j]."""

    sources: NDArray[np.int64]
    targets: NDArray[np.int64]


class Slots:
    """Everything about the running sequences but their keys and values."""

    def __init__(self, num_slots: int, eos_table: NDArray[np.bool_]) -> None:
        self.num_active = 0
        self._eos_table = eos_table  # [vocab]
        self._requests: list[Request] = []
        self._stop_tokens: list[frozenset[int]] = []  # beyond the end tokens
        self._has_stop_tokens = np.zeros(num_slots, np.bool_)
        self.tokens = np.zeros(num_slots, np.int64)  # the last token produced, not yet in the cache
        self.positions = np.zeros(num_slots, np.int64)  # of that token
        self.rope_deltas = np.zeros(num_slots, np.int64)  # position less place of what follows a prompt with images
        self.num_produced = np.zeros(num_slots, np.int64)
        self._first_token = np.zeros(num_slots, np.int64)  # draws that a resumed sample has behind it
        self._limits = np.zeros(num_slots, np.int64)
        self._heeds_eos = np.zeros(num_slots, np.bool_)
        self._sample_index = np.zeros(num_slots, np.int64)
        self.seed_states = np.zeros(num_slots, np.uint64)
        self.temperature = np.zeros(num_slots, np.float32)
        self.top_p = np.zeros(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int64)
        self._out_tokens = np.zeros((num_slots, _FIRST_COLUMNS), np.int64)
        self._out_logprobs = np.zeros((num_slots, _FIRST_COLUMNS), np.float64)
        self._out_versions = np.zeros((num_slots, _FIRST_COLUMNS), np.int64)

    @property
    def num_slots(self) -> int:
        return len(self.tokens)

    def request_of(self, row: int) -> Request:
        return self._requests[row]

    def admit(self, request: Request, first_sample: int, count: int) -> None:
        """Appends rows for count samples of the request's n; their first tokens come with record()."""
        rows = slice(self.num_active, self.num_active + count)
        params = request.params
        first = params.first_sample + first_sample
        samples = range(first, first + count)
        self._requests.extend([request] * count)
        self._stop_tokens.extend([frozenset(params.stop_token_ids)] * count)
        self._has_stop_tokens[rows] = bool(params.stop_token_ids)
        self.positions[rows] = len(request.prompt) - 1
        self.num_produced[rows] = 0
        self._first_token[rows] = params.first_token
        self._limits[rows] = params.max_new_tokens
        self._heeds_eos[rows] = not params.ignore_eos
        self._sample_index[rows] = samples
        self.seed_states[rows] = [prefix_state(params.seed, sample) for sample in samples]
        self.temperature[rows] = params.temperature
        self.top_p[rows] = params.top_p
        self.top_k[rows] = params.top_k
        self.num_active += count

    def draw_index(self, rows: slice) -> NDArray[np.int64]:
        """Index t of each row's next draw."""
        return self._first_token[rows] + self.num_produced[rows]

    def most_places(self) -> int:
        """The places that the longest running sequence can come to need."""
        return int((self.positions - self.num_produced + self._limits)[: self.num_active].max()) + 1

    def record(self, rows: slice, tokens: NDArray[np.int64], logprobs: NDArray[np.float64], version: int) -> None:
        """Appends one token to each of the rows."""
        places = self.num_produced[rows]
        self._make_room(int(places.max()) + 1)
        index = np.arange(rows.start, rows.stop)
        self._out_tokens[index, places] = tokens
        self._out_logprobs[index, places] = logprobs
        self._out_versions[index, places] = version
        self.tokens[rows] = tokens
        self.num_produced[rows] += 1
        self.positions[rows] += 1

    def finish(self, rows: slice) -> tuple[list[Completion], Moves | None]:
        """Completions of those rows whose last token ended them, and how the cache must follow their leaving."""
        ended = self._eos_table[self.tokens[rows]] & self._heeds_eos[rows]
        for j in np.nonzero(self._has_stop_tokens[rows])[0]:
            ended[j] |= int(self.tokens[rows.start + j]) in self._stop_tokens[rows.start + j]
        full = self.num_produced[rows] >= self._limits[rows]
        (leaving,) = np.nonzero(ended | full)
        if not leaving.size:
            return [], None
        done = [self._completion(rows.start + int(j), "stop" if ended[j] else "length") for j in leaving]
        return done, self._remove(leaving + rows.start)

    def abort(self, request_ids: frozenset[int] | None) -> tuple[list[Completion], Moves | None]:
        """Completions, so far, of the running samples of these requests (None: of all)."""
        leaving = [
            r for r in range(self.num_active) if request_ids is None or self._requests[r].request_id in request_ids
        ]
        if not leaving:
            return [], None
        return [self._completion(row, "abort") for row in leaving], self._remove(np.array(leaving))

    def _completion(self, row: int, reason: FinishReason) -> Completion:
        request, length = self._requests[row], int(self.num_produced[row])
        return Completion(
            request_id=request.request_id,
            sample_index=int(self._sample_index[row]),
            prompt_token_ids=request.prompt,
            output_token_ids=tuple(self._out_tokens[row, :length].tolist()),
            logprobs=tuple(self._out_logprobs[row, :length].tolist()),
            versions=tuple(self._out_versions[row, :length].tolist()),
            finish_reason=reason,
        )

    def _remove(self, leaving: NDArray[np.int64]) -> Moves | None:
        remaining = self.num_active - len(leaving)
        is_leaving = np.zeros(self.num_active, np.bool_)
        is_leaving[leaving] = True
        (targets,) = np.nonzero(is_leaving[:remaining])
        sources = remaining + np.nonzero(~is_leaving[remaining:])[0]
        for column in self._columns():
            column[targets] = column[sources]
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self._requests[target] = self._requests[source]
            self._stop_tokens[target] = self._stop_tokens[source]
        del self._requests[remaining:], self._stop_tokens[remaining:]
        self.num_active = remaining
        return Moves(sources, targets) if sources.size else None

    def _columns(self) -> list[NDArray[Any]]:
        return [
            value for value in vars(self).values() if isinstance(value, np.ndarray) and value is not self._eos_table
        ]

    def _make_room(self, columns: int) -> None:
        have = self._out_tokens.shape[1]
        if columns <= have:
            return
        more = ((0, 0), (0, max(columns, 2 * have) - have))
        self._out_tokens = np.pad(self._out_tokens, more)
        self._out_logprobs = np.pad(self._out_logprobs, more)
        self._out_versions = np.pad(self._out_versions, more)
