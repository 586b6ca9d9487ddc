"""Guesses the next tokens from a sample's own text (--native.lookup), and draws several in one forward.

Texts repeat themselves: a response quotes its prompt and its own earlier parts. If the last tokens have occurred
before, the tokens that followed them then are the guess. One forward gives the logits after the last token and after
each guess. Each token is then drawn as without a guess, with the same uniform number; as long as the draw equals the
guess, the next one counts too. So no token depends on the guesses, except by how a wider forward rounds its sums.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightrl.engines.base import AnyPrompt, Completion, SamplingParams
from lightrl.engines.native.cache import RowCache, additive_mask
from lightrl.engines.native.engine import NativeEngine
from lightrl.engines.native.forward import FusedForward, ModelRunner, SampleState, _Layer
from lightrl.engines.native.sampler import plan_sampling
from lightrl.engines.native.scheduler import RunningSamples
from lightrl.seeding import uniform_array

_LONGEST_MATCH, _SHORTEST_MATCH = 4, 2  # tokens at the end of a text that are searched earlier in it
_LEAST_RIGHT = 0.25  # share of right guesses below which most steps guess nothing
_STEPS_TO_WAIT = 8  # plain steps after which guessing is tried again
_MEMORY = 8  # guessing steps over which the share is averaged
_MOST_ROWS = 8  # running samples up to which a wider forward takes little longer than a plain one


class LookupForward(FusedForward):
    """Fused forward that can also run several tokens per row."""

    def score_guesses(self, tokens: Tensor, positions: Tensor, cache: RowCache) -> Tensor:
        """Returns logits [n, w, vocab] of tokens [n, w] at positions [n, w]; the decode phase must be begun."""
        num_rows, width = tokens.shape
        num_read = cache.decode_phase.num_read
        heads, kv_heads, dim = self.num_heads, self.num_kv_heads, self.dim
        rows = torch.arange(num_rows, device=tokens.device)[:, None]
        masks = {}
        for window in self._windows:
            mask = additive_mask(positions, num_read, window, self._head.weight.dtype)[:, None, :, None]
            whole = mask.expand(num_rows, kv_heads, width, heads // kv_heads, num_read)
            masks[window] = whole.reshape(num_rows * kv_heads, -1, num_read)

        def attend(layer: _Layer, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            storage = cache.layer(layer.index)
            storage.keys[rows, :, positions] = keys.view(num_rows, width, kv_heads, dim)
            storage.values[rows, :, positions] = values.view(num_rows, width, kv_heads, dim)
            by_head = queries.view(num_rows, width, kv_heads, -1, dim).transpose(1, 2)
            grouped = by_head.reshape(num_rows * kv_heads, -1, dim)
            mixed = self.mix(grouped, *cache.read(layer.index), masks[layer.window])
            return mixed.view(num_rows, kv_heads, width, -1).transpose(1, 2).reshape(num_rows * width, -1)

        logits = self._run(tokens.flatten(), self.cos_sin(positions.flatten(), cache.capacity), attend)
        return logits.view(num_rows, width, -1)


class LookupRunner(ModelRunner):
    """Runs guesses if the fused forward is used; other models produce one token per step."""

    replays_steps = False  # the number of guesses changes from step to step
    make_fused = staticmethod(LookupForward)

    def score_guesses(self, tokens: Tensor, positions: Tensor, cache: SampleState) -> Tensor:
        """Returns logits [n, w, vocab] of tokens [n, w] at positions [n, w]."""
        assert isinstance(self._fused, LookupForward), "only asked where it is used"
        assert isinstance(cache, RowCache), "it goes with the fused forward"
        return self._fused.score_guesses(tokens, positions, cache)


class LookupEngine(NativeEngine):
    """Draws up to 1 + num_guesses tokens of a sample in a step."""

    make_runner = LookupRunner
    _runner: LookupRunner

    def __init__(self, *args: Any, num_guesses: int, most_rows: int = _MOST_ROWS, **settings: Any) -> None:
        """Takes the arguments of NativeEngine and two more.

        Args:
            num_guesses: the most tokens of a sample that are guessed in a step.
            most_rows: the most running samples with which anything is guessed.
        """
        super().__init__(*args, **settings)
        if self._media is not None:
            raise ValueError("--native.lookup does not go with a model that takes images: leave it out.")
        self._num_guesses = num_guesses
        self._most_rows = most_rows
        self._prompts: dict[int, NDArray[np.int64]] = {}  # of the running requests
        self.num_guessed = 0  # tokens guessed so far
        self.num_right = 0  # guesses that were drawn
        self._forget()

    def _forget(self) -> None:
        self._share_right = 1.0  # of the newest guesses
        self._num_plain = 0  # steps since anything was guessed

    def submit(self, prompt: AnyPrompt, params: SamplingParams) -> int:
        """Queues a request and returns its id; an idle engine then guesses as a new one, as a resumed run has."""
        if not self.has_unfinished():
            self._forget()
        return super().submit(prompt, params)

    def _decode(self) -> list[Completion]:
        rows, num_rows = self._scheduler.rows, self._scheduler.num_running
        self._num_plain += 1
        is_worth = self._share_right >= _LEAST_RIGHT or self._num_plain > _STEPS_TO_WAIT
        if not is_worth or num_rows > self._most_rows or not self._may_guess(num_rows):
            return super()._decode()
        guesses, counts = self._guess(rows, num_rows)
        width = int(counts.max()) + 1
        return super()._decode() if width == 1 else self._draw_guessed(guesses[:, : width - 1], counts)

    def _may_guess(self, num_rows: int) -> bool:
        return self._runner.uses_fused_forward and not self._scheduler.rows.is_constrained[:num_rows].any()

    def _guess(self, rows: RunningSamples, num_rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns guesses [n, num_guesses] and the number per row, [n]; no row gets more than it may produce."""
        guesses = np.zeros((num_rows, self._num_guesses), np.int64)
        counts = np.zeros(num_rows, np.int64)
        requests = {request.request_id: request for request in rows.request[:num_rows]}
        known, num_left = self._prompts, rows.last_position - rows.position
        self._prompts = {key: known[key] if key in known else np.array(requests[key].prompt) for key in requests}
        for row in range(num_rows):
            produced = int(rows.num_produced[row])
            text = np.concatenate((self._prompts[rows.request[row].request_id], rows.outputs["token"][row, :produced]))
            found = continuation(text, min(self._num_guesses, int(num_left[row]) - 1))
            guesses[row, : len(found)], counts[row] = found, len(found)
        return guesses, counts

    def _draw_guessed(self, guesses: NDArray[np.int64], counts: NDArray[np.int64]) -> list[Completion]:
        """Runs the last token of each row and the guesses after it; draws as many tokens as the guesses allow."""
        rows, running, width = self._scheduler.rows, slice(self._scheduler.num_running), guesses.shape[1] + 1
        tokens = np.concatenate((rows.token[running, None], guesses), axis=1)
        positions = rows.position[running, None] + np.arange(width)
        self._reserve(int(positions.max()) + 1)
        self._cache.begin_decode(self._put(positions[:, 0]), -1, int(positions.max()))
        logits = self._runner.score_guesses(self._put(tokens), self._put(positions), self._cache)
        draws = (rows.first_draw + rows.num_produced)[running, None] + np.arange(width)
        uniforms = uniform_array(rows.seed_state[running].repeat(width), draws.ravel())
        plan = plan_sampling(rows.sampling[running].repeat(width), self.vocab_size, self._device)
        drawn = self.draw(logits.flatten(0, 1), self._put(uniforms), plan)
        chosen, logprobs = (column.cpu().numpy().reshape(-1, width) for column in drawn)
        is_right = (chosen[:, :-1] == guesses) & (np.arange(width - 1) < counts[:, None])
        num_right = is_right.cumprod(axis=1).sum(axis=1)
        self._note(int(counts.sum()), int(num_right.sum()))
        is_taken = np.arange(width) <= num_right[:, None]
        if np.isnan(logprobs[is_taken]).any():
            self._raise_not_finite(int(np.isnan(np.where(is_taken, logprobs, 0.0)).any(axis=1).argmax()))
        done, moves = self._scheduler.record_runs(chosen, logprobs, num_right + 1, self._version)
        if done:
            self._plan = None
        self._move_rows(moves)
        return done

    def _note(self, num_guessed: int, num_right: int) -> None:
        self.num_guessed += num_guessed
        self.num_right += num_right
        self._share_right += (num_right / num_guessed - self._share_right) / _MEMORY
        self._num_plain = 0

    def _reserve(self, positions: int) -> None:
        """Reserves room for guesses, too: a wrong one may lie beyond the last position that a sample can need."""
        most = self._scheduler.most_positions() + self._num_guesses
        self._cache.reserve(self._scheduler.num_running, min(positions, most), self.max_num_seqs, most)


def continuation(text: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Returns `most` tokens that followed the latest earlier occurrence of the text's last tokens.

    A continuation that reaches the end of the text starts over, as in a text that repeats the same words.
    Without an earlier occurrence, nothing is returned.
    """
    for length in range(min(_LONGEST_MATCH, len(text) - 1), _SHORTEST_MATCH - 1, -1):
        ends = np.nonzero(text[length - 1 : -1] == text[-1])[0] + length  # after each earlier match of the last
        for back in range(2, length + 1):
            ends = ends[text[ends - back] == text[-back]]
        if len(ends):
            return np.resize(text[ends[-1] :], max(0, most))
    return text[:0]
