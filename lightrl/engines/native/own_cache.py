"""Generation with a model's own cache, sample by sample, for models whose state does not fit into a RowCache.

Mamba, linear attention and short convolutions keep a state that is neither key nor value; indexed and chunked attention
keep more than these two. Each sample keeps what the model itself returned as its cache. If a model's cache does not
give the logits that it computes without one, the whole sequence is run for each token.
"""

from __future__ import annotations

import copy
import inspect
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from lightrl.engines.native.cache import LayerStorage, cache_name
from lightrl.engines.native.row_parts import RowPart
from lightrl.models.per_sequence import leave_weights_alone

logger = logging.getLogger(__name__)

_STATE_NAMES = ("state", "mems")  # under which RWKV and XLNet take and return what others have in a cache


@dataclass
class SampleRun:
    """The tokens that a sample has been run on, and the state that the model keeps of them."""

    tokens: Tensor  # [1, t] int64
    cache: Any  # as the model returned it, by its names; None if it has to be computed from the tokens


class SampleCaches:
    """One state per row, in place of a RowCache."""

    def __init__(self) -> None:
        self.states: list[Any] = []
        self.positions = torch.empty(0)
        self.prefill: tuple[Tensor, Tensor] | None = None  # rows and the prompt of each, both [m] int64

    def reserve(self, rows: int, positions: int, most_rows: int, most_positions: int) -> None:
        """Makes room for rows; a state grows on its own."""
        self.states.extend([None] * (rows - len(self.states)))

    def begin_prefill(self, target_rows: Tensor, source_prompts: Tensor) -> None:
        """Sets which rows receive which prompts."""
        self.prefill = target_rows, source_prompts

    def begin_decode(
        self, positions: Tensor, lowest_position: int, highest_position: int, parts: Sequence[RowPart] = ()
    ) -> None:
        """Sets the positions at which rows decode; each row runs separately, so parts make no difference."""
        self.positions = positions

    def store_prompt(self, prompt: int, state: Any) -> None:
        """Gives each row of a prompt in the prefill phase its own copy of the prompt's state."""
        assert self.prefill is not None
        target_rows, source_prompts = self.prefill
        rows = target_rows[source_prompts == prompt].tolist()
        for row in rows:
            self.states[row] = state if row == rows[-1] else copy.deepcopy(state)

    def move_rows(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Moves the states of rows to rows whose samples have ended."""
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self.states[target], self.states[source] = self.states[source], None

    def read_row(self, row: int, length: int) -> Any:
        """Returns a copy of the state of a row."""
        return copy.deepcopy(self.states[row])

    def write_rows(self, rows: slice, content: Any, length: int) -> None:
        """Gives each of the rows a copy of the result of read_row."""
        for row in range(rows.start, rows.stop):
            self.states[row] = copy.deepcopy(content)

    def free(self) -> int:
        """Drops the states; returns the bytes of their tensors."""
        num_bytes = sum(map(num_bytes_of, self.states))
        self.states = []
        return num_bytes


def num_bytes_of(state: Any) -> int:
    """Returns the bytes of the tensors in a state: a tensor, a list, a layer, or an object of transformers."""
    if isinstance(state, Tensor):
        return state.untyped_storage().nbytes()
    if isinstance(state, LayerStorage):
        return state.num_bytes()
    if isinstance(state, list | tuple):
        return sum(map(num_bytes_of, state))
    if isinstance(state, dict):
        return sum(map(num_bytes_of, state.values()))
    return num_bytes_of(vars(state)) if hasattr(state, "__dict__") and not isinstance(state, type) else 0


class OwnCacheForward:
    """Runs prompts, or one token per row, each with a separate call of the model."""

    def __init__(self, model: PreTrainedModel, *, recomputes: bool) -> None:
        """Takes `recomputes`: no cache is kept then, and all tokens so far are run again for each token."""
        self._model = model
        self._recomputes = recomputes
        self._parameters = inspect.signature(model.forward).parameters
        self._cache_name = cache_name(model.forward)
        self.begin_row: Callable[[int], None] = lambda row: None  # called before a row decodes

    def prefill(self, ids: Tensor, last: Tensor, cache: SampleCaches) -> Tensor:
        """Returns logits [b, vocab] after index last[j] of each row of ids [b, t]; the prefill phase must be begun."""
        logits = []
        for prompt, end in enumerate(last.tolist()):
            tokens = ids[prompt : prompt + 1, : end + 1]
            scores, kept = self._run(tokens, None, 0)
            cache.store_prompt(prompt, SampleRun(tokens, kept))
            logits.append(scores)
        return torch.stack(logits)

    def decode(
        self, tokens: Tensor, positions: Tensor, cache: SampleCaches, rope_deltas: Tensor | None = None
    ) -> Tensor:
        """Returns logits [n, vocab] of tokens [n] at positions [n]; may be repeated after a step that failed."""
        logits, places = [], positions.tolist()
        held = list(zip(cache.states, places, strict=False))
        # A step that failed has run its tokens through some caches, and through a part of the layers of one.
        begins_again = any(state.cache is None or state.tokens.shape[1] != place for state, place in held)
        for row, (state, place) in enumerate(held):
            self.begin_row(row)
            ids, kept = torch.cat([state.tokens[:, :place], tokens[None, row : row + 1]], dim=1), state.cache
            state.cache = None  # until the run has ended
            scores, state.cache = self._run(ids, None, 0) if begins_again else self._run(ids[:, place:], kept, place)
            state.tokens = ids
            logits.append(scores)
        return torch.stack(logits)

    def _run(self, ids: Tensor, state: Any, position: int) -> tuple[Tensor, Any]:
        """Returns the logits after the last token, [vocab], and the model's cache after it."""
        inputs: dict[str, Any] = {"input_ids": ids, "use_cache": not self._recomputes}
        positions = torch.arange(position, position + ids.shape[1], device=ids.device)[None]
        optional = {"position_ids": positions, "logits_to_keep": 1, "return_dict": True}
        inputs |= {name: value for name, value in optional.items() if name in self._parameters}
        if self._recomputes:
            return self._model(**inputs).logits[0, -1], None
        output = self._model(**inputs, **(state or {}))
        names = (self._cache_name, *_STATE_NAMES)
        state = {name: kept for name in names if (kept := getattr(output, name, None)) is not None} or state
        if state is None:  # it makes a cache but does not return it
            state = {self._cache_name: DynamicCache(config=self._model.config.get_text_config())}
            output = self._model(**inputs, **state)
        return output.logits[0, -1], state


def find_forward(
    model: PreTrainedModel, agrees: Callable[[OwnCacheForward, SampleCaches], bool]
) -> OwnCacheForward | None:
    """Returns the fastest forward that gives the model's own logits; None if there is none.

    Args:
        agrees: compares a forward with the model's logits.
    """
    leave_weights_alone(model.get_decoder())
    for attention, recomputes in (("sdpa", False), ("eager", False), ("eager", True)):
        try:
            model.set_attn_implementation(attention)
            forward = OwnCacheForward(model, recomputes=recomputes)
            is_right = agrees(forward, SampleCaches())
        except Exception as error:  # models fail in many ways
            logger.debug("%s by %s attention: %s", type(model).__name__, attention, error)
            continue
        if is_right:
            _say(type(model).__name__, recomputes)
            return forward
    return None


def _say(name: str, recomputes: bool) -> None:
    if os.environ.get("RANK", "0") == "0":
        how = "without a cache, each token by a pass over its whole sequence" if recomputes else "by its own cache"
        logger.warning("The native engine runs %s %s, one sample at a time: exact, slower.", name, how)
