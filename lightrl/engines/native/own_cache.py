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
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from lightrl.engines.native.cache import LayerStorage
from lightrl.engines.native.row_parts import RowPart
from lightrl.models.per_sequence import leave_weights_alone

logger = logging.getLogger(__name__)

# The names under which models take and return their cache.
_CACHE_NAMES = ("past_key_values", "cache_params", "state", "mems")


class SampleCaches:
    """One state per row, in place of a RowCache: the cache that a model returned, or the tokens so far."""

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
        """Takes `recomputes`: a state is then the tokens so far, all of which are run again for each token."""
        self._model = model
        self._recomputes = recomputes
        self._parameters = inspect.signature(model.forward).parameters
        self.begin_row: Callable[[int], None] = lambda row: None  # called before a row decodes

    def prefill(self, ids: Tensor, last: Tensor, cache: SampleCaches) -> Tensor:
        """Returns logits [b, vocab] after index last[j] of each row of ids [b, t]; the prefill phase must be begun."""
        logits = []
        for prompt, end in enumerate(last.tolist()):
            scores, state = self._run(ids[prompt : prompt + 1, : end + 1], None, 0)
            cache.store_prompt(prompt, state)
            logits.append(scores)
        return torch.stack(logits)

    def decode(
        self, tokens: Tensor, positions: Tensor, cache: SampleCaches, rope_deltas: Tensor | None = None
    ) -> Tensor:
        """Returns logits [n, vocab] of tokens [n] at positions [n]."""
        logits = []
        for row, position in enumerate(positions.tolist()):
            self.begin_row(row)
            scores, cache.states[row] = self._run(tokens[None, row : row + 1], cache.states[row], position)
            logits.append(scores)
        return torch.stack(logits)

    def _run(self, ids: Tensor, state: Any, position: int) -> tuple[Tensor, Any]:
        """Returns the logits after the last token, [vocab], and the state after it."""
        if self._recomputes:
            ids, position = ids if state is None else torch.cat([state, ids], dim=1), 0
        inputs: dict[str, Any] = {"input_ids": ids, "use_cache": not self._recomputes}
        positions = torch.arange(position, position + ids.shape[1], device=ids.device)[None]
        optional = {"position_ids": positions, "logits_to_keep": 1, "return_dict": True}
        inputs |= {name: value for name, value in optional.items() if name in self._parameters}
        if self._recomputes:
            return self._model(**inputs).logits[0, -1], ids
        output = self._model(**inputs, **(state or {}))
        state = {name: kept for name in _CACHE_NAMES if (kept := getattr(output, name, None)) is not None} or state
        if state is None:  # it makes a cache but does not return it
            state = {"past_key_values": DynamicCache(config=self._model.config.get_text_config())}
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
