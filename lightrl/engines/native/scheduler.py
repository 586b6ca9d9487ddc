"""Decides which samples run in which rows of the cache, and keeps their tokens; uses only numbers, no tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightrl.engines.base import Completion, EnginePrompt, SamplingParams
from lightrl.engines.native.sampler import SAMPLING
from lightrl.records import FinishReason
from lightrl.seeding import prefix_state, prefix_states

_FIRST_COLUMNS = 8  # outputs start with room for this many tokens, which doubles as needed
_OUTPUT = np.dtype([("token", np.int64), ("logprob", np.float64), ("version", np.int64)])
_PREFILL_TOKENS = 16_384  # padded prompt tokens in one forward, to bound its activations


@dataclass(slots=True)
class Request:
    """A submitted prompt; its samples num_admitted, num_admitted + 1, ... are not running yet."""

    request_id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    source: EnginePrompt | None = None  # for a vision-language model: the prompt before its images were expanded
    num_admitted: int = 0
    prefilled: Any = None  # kept by the engine for samples that found no free row
    rope_delta: int = 0  # position minus index after a prompt with images; known after its prefill


@dataclass(frozen=True, slots=True)
class Admission:
    """Samples of one request that now enter rows first_row .. first_row + count - 1."""

    request: Request
    first_row: int
    count: int


@dataclass(frozen=True, slots=True)
class Moves:
    """Rows to copy, from sources[j] to targets[j], so that the running rows stay first."""

    sources: NDArray[np.int64]
    targets: NDArray[np.int64]


class RunningSamples:
    """The running samples as columns: entry r of every column describes the sample in row r of the cache."""

    def __init__(self, num_rows: int) -> None:
        self.request = np.empty(num_rows, object)
        self.sample = np.zeros(num_rows, np.int64)
        self.token = np.zeros(num_rows, np.int64)  # the last token produced, not yet in the cache
        self.position = np.zeros(num_rows, np.int64)  # of that token
        self.num_produced = np.zeros(num_rows, np.int64)
        self.first_draw = np.zeros(num_rows, np.int64)  # draws that a resumed sample has already made
        self.last_position = np.zeros(num_rows, np.int64)  # highest position that a token of the sample can have
        self.stops_at_eos = np.zeros(num_rows, np.bool_)
        self.has_stop_tokens = np.zeros(num_rows, np.bool_)  # in addition to the end tokens
        self.is_constrained = np.zeros(num_rows, np.bool_)  # asks for a minimum of tokens or for penalties
        self.seed_state = np.zeros(num_rows, np.uint64)
        self.sampling = np.zeros(num_rows, SAMPLING)
        self.outputs = np.zeros((num_rows, _FIRST_COLUMNS), _OUTPUT)

    def fill(self, rows: slice, request: Request) -> None:
        """Enters the next samples of a request into rows; their first tokens come later."""
        params = request.params
        samples = params.first_sample + request.num_admitted + np.arange(rows.stop - rows.start)
        self.request[rows] = request
        self.sample[rows] = samples
        self.position[rows] = len(request.prompt) - 1
        self.num_produced[rows] = 0
        self.first_draw[rows] = params.first_token
        self.last_position[rows] = len(request.prompt) - 1 + params.max_new_tokens
        self.stops_at_eos[rows] = not params.ignore_eos
        self.has_stop_tokens[rows] = bool(params.stop_token_ids)
        self.is_constrained[rows] = params.min_new_tokens > 0 or params.has_penalties
        self.seed_state[rows] = prefix_states(np.uint64(prefix_state(params.seed or 0)), samples)
        self.sampling[rows] = (params.temperature, params.top_p, params.top_k)

    def move(self, moves: Moves) -> None:
        """Moves samples in every column."""
        for column in vars(self).values():
            column[moves.targets] = column[moves.sources]

    def reserve_outputs(self, columns: int) -> None:
        """Makes room for this many tokens per row."""
        num_rows, have = self.outputs.shape
        if columns > have:
            more = np.zeros((num_rows, max(columns - have, have)), _OUTPUT)
            self.outputs = np.concatenate((self.outputs, more), axis=1)

    def completion(self, row: int, reason: FinishReason) -> Completion:
        """Returns the sample in a row as a completion."""
        outputs = self.outputs[row, : self.num_produced[row]]
        return Completion(
            request_id=self.request[row].request_id,
            sample_index=int(self.sample[row]),
            prompt_token_ids=self.request[row].prompt,
            output_token_ids=tuple(outputs["token"].tolist()),
            logprobs=tuple(outputs["logprob"].tolist()),
            versions=tuple(outputs["version"].tolist()),
            finish_reason=reason,
        )


class Scheduler:
    """Queues requests and assigns samples to rows 0 .. num_running - 1; the last rows move to fill gaps."""

    def __init__(self, num_rows: int, eos_table: NDArray[np.bool_]) -> None:
        """Takes eos_table, [vocab], True for tokens that end a sample."""
        self.rows = RunningSamples(num_rows)
        self.num_running = 0
        self._num_rows = num_rows
        self.eos_table = eos_table
        self._waiting: deque[Request] = deque()

    @property
    def num_waiting(self) -> int:
        """The number of requests with samples that have no row yet."""
        return len(self._waiting)

    def submit(self, request: Request) -> None:
        """Queues a request."""
        self._waiting.append(request)

    def admit(self) -> list[Admission]:
        """Gives free rows to the head of the queue; a request may enter in parts."""
        admissions: list[Admission] = []
        while self._waiting and self.num_running < self._num_rows:
            request, first = self._waiting[0], self.num_running
            count = min(request.params.n - request.num_admitted, self._num_rows - first)
            admissions.append(Admission(request, first, count))
            self.rows.fill(slice(first, first + count), request)
            self.num_running += count
            request.num_admitted += count
            if request.num_admitted == request.params.n:
                self._waiting.popleft()
        return admissions

    def withdraw(self, admissions: list[Admission]) -> None:
        """Puts the newest admissions back at the head of the queue, unless their first tokens were recorded."""
        first, behind = admissions[0].first_row, admissions[-1].first_row + admissions[-1].count
        if self.num_running != behind or self.rows.num_produced[first:behind].any():
            return
        self.num_running = first
        self.rows.request[first:behind] = None
        for item in reversed(admissions):
            if item.request.num_admitted == item.request.params.n:
                self._waiting.appendleft(item.request)
            item.request.num_admitted -= item.count

    def most_positions(self) -> int:
        """Returns the number of positions that the longest running sample may need."""
        return int(self.rows.last_position[: self.num_running].max()) + 1

    def record(
        self, first_row: int, tokens: NDArray[np.int64], logprobs: NDArray[np.float64], version: int
    ) -> tuple[list[Completion], Moves | None]:
        """Appends one token to each row from first_row on; returns the samples that end, and the rows to move."""
        rows, running = self.rows, slice(first_row, self.num_running)
        columns = rows.num_produced[running]
        rows.reserve_outputs(int(columns.max()) + 1)
        index = np.arange(first_row, self.num_running)
        rows.outputs["token"][index, columns] = tokens
        rows.outputs["logprob"][index, columns] = logprobs
        rows.outputs["version"][index, columns] = version
        rows.token[running] = tokens
        rows.num_produced[running] += 1
        rows.position[running] += 1
        ended = self.eos_table[tokens] & rows.stops_at_eos[running]
        for j in np.nonzero(rows.has_stop_tokens[running])[0]:
            ended[j] |= int(tokens[j]) in rows.request[first_row + j].params.stop_token_ids
        (leaving,) = np.nonzero(ended | (rows.position[running] >= rows.last_position[running]))
        done = [rows.completion(first_row + int(j), "stop" if ended[j] else "length") for j in leaving]
        return done, self._remove(first_row + leaving) if done else None

    def record_runs(
        self, tokens: NDArray[np.int64], logprobs: NDArray[np.float64], counts: NDArray[np.int64], version: int
    ) -> tuple[list[Completion], Moves | None]:
        """Appends the first counts[r] of tokens [n, w] to each row r, up to one that ends it; returns as record() does.

        Only an engine that draws several tokens of a sample at once uses it.
        """
        rows, running, width = self.rows, slice(self.num_running), tokens.shape[1]
        rows.reserve_outputs(int(rows.num_produced[running].max()) + width)
        ended: NDArray[np.bool_] = self.eos_table[tokens] & rows.stops_at_eos[running][:, None]
        for index in np.nonzero(rows.has_stop_tokens[running])[0]:
            ended[index] |= np.isin(tokens[index], list(rows.request[index].params.stop_token_ids))
        ended &= np.arange(width) < counts[:, None]
        counts = np.where(ended.any(axis=1), ended.argmax(axis=1) + 1, counts)
        row, column = np.nonzero(np.arange(width) < counts[:, None])
        place = rows.num_produced[row] + column
        rows.outputs["token"][row, place] = tokens[row, column]
        rows.outputs["logprob"][row, place] = logprobs[row, column]
        rows.outputs["version"][row, place] = version
        rows.token[running] = tokens[np.arange(self.num_running), counts - 1]
        rows.num_produced[running] += counts
        rows.position[running] += counts
        has_ended = ended.sum(axis=1) > 0
        (leaving,) = np.nonzero(has_ended | (rows.position[running] >= rows.last_position[running]))
        done = [rows.completion(int(row), "stop" if has_ended[row] else "length") for row in leaving]
        return done, self._remove(leaving) if done else None

    def abort(self, request_ids: Collection[int] | None) -> tuple[list[Completion], Moves | None]:
        """Removes requests (None: all); returns each unfinished sample so far, and the rows to move."""

        def is_chosen(request: Request) -> bool:
            return request_ids is None or request.request_id in request_ids

        leaving = [row for row in range(self.num_running) if is_chosen(self.rows.request[row])]
        done = [self.rows.completion(row, "abort") for row in leaving]
        moves = self._remove(np.array(leaving)) if leaving else None
        done += [item for request in self._waiting if is_chosen(request) for item in _aborted_before_start(request)]
        self._waiting = deque(request for request in self._waiting if not is_chosen(request))
        return sorted(done, key=lambda item: (item.request_id, item.sample_index)), moves

    def is_padded(self, least: int) -> bool:
        """Returns whether reading all rows up to the longest one would read at least this many positions of padding."""
        positions = self.rows.position[: self.num_running]
        real, read = int(positions.sum()), int(positions.max()) * len(positions)
        return read - real >= least and read >= 1.5 * real

    def reorder(self, order: NDArray[np.int64]) -> Moves:
        """Moves the running sample of row order[j] to row j, for every j; returns the rows to move."""
        (targets,) = np.nonzero(order != np.arange(len(order)))
        moves = Moves(order[targets], targets)
        self.rows.move(moves)
        return moves

    def _remove(self, leaving: NDArray[np.int64]) -> Moves | None:
        remaining = self.num_running - len(leaving)
        is_leaving = np.zeros(self.num_running, np.bool_)
        is_leaving[leaving] = True
        (targets,) = np.nonzero(is_leaving[:remaining])
        moves = Moves(remaining + np.nonzero(~is_leaving[remaining:])[0], targets)
        self.rows.move(moves)
        self.rows.request[remaining : self.num_running] = None
        self.num_running = remaining
        return moves if targets.size else None


def _aborted_before_start(request: Request) -> list[Completion]:
    return [
        Completion(
            request_id=request.request_id,
            sample_index=request.params.first_sample + sample,
            prompt_token_ids=request.prompt,
            output_token_ids=(),
            logprobs=(),
            versions=(),
            finish_reason="abort",
        )
        for sample in range(request.num_admitted, request.params.n)
    ]


def prefill_groups(lengths: list[int]) -> list[list[int]]:
    """Groups the indices of prompts of similar length, so that padding stays below a quarter of what is run."""
    groups: list[list[int]] = []
    real = 0
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        length = lengths[index]
        padded = length * (len(groups[-1]) + 1) if groups else _PREFILL_TOKENS + 1
        if padded <= _PREFILL_TOKENS and padded <= (real + length) * 4 / 3 + 256:
            groups[-1].append(index)
            real += length
        else:
            groups.append([index])
            real = length
    return [sorted(group) for group in groups]  # keeps the rows of a single group side by side
