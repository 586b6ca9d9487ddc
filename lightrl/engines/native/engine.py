"""The engine that needs nothing but torch and transformers: continuous batching over a row cache, on any device."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from lightrl.engines.base import (
    AnyPrompt,
    Completion,
    EnginePart,
    EnginePrompt,
    InferenceEngine,
    SamplingParams,
    as_prompt,
)
from lightrl.engines.native.kv_cache import LayerStorage, SlotCache
from lightrl.engines.native.model_runner import ModelRunner
from lightrl.engines.native.sampler import SamplingPlan, plan_sampling, sample
from lightrl.engines.native.slots import Moves, Request, Slots
from lightrl.engines.native.weights import copy_weights, drop_weights
from lightrl.models.multimodal import FAMILIES, MediaProcessor
from lightrl.records import EncodedPrompt
from lightrl.seeding import uniform_array

_PREFILL_TOKENS = 16_384  # padded prompt tokens in one forward: bounds its activations
_ROOM_AHEAD = 64  # places kept for new tokens when a prompt enters; a longer answer grows the cache


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> tuple[int, ...]:
    """Every end token that the generation config, the model config or the tokenizer names, in ascending order."""
    found: set[int] = set()
    for source in (model.generation_config, model.config, model.config.get_text_config(), tokenizer):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            found.update([value] if isinstance(value, int) else value)
    return tuple(sorted(found))


@dataclass(slots=True)
class _Waiting:
    """A request of which samples next_sample, next_sample + 1, ... are not running yet."""

    request: Request
    next_sample: int = 0
    prefilled: _Prefilled | None = None
    rope_delta: int = 0  # known after the first prefill

    @property
    def num_left(self) -> int:
        return self.request.params.n - self.next_sample


@dataclass(frozen=True, slots=True)
class _Prefilled:
    """A prompt's keys, values and logits, for samples that found no free slot beside their siblings."""

    content: list[LayerStorage | None]
    logits: Tensor  # [1, vocab]
    version: int


@dataclass(frozen=True, slots=True)
class _Admission:
    """Samples of one request that enter now, into rows first_row .. first_row + count - 1."""

    waiting: _Waiting
    first_row: int
    count: int


class NativeEngine(InferenceEngine):
    """Owns the model it is given: evaluation mode, no gradients, its attention and the layout of its weights."""

    sleep_levels = (1, 2)
    wake_hint = "--native.max_num_seqs"

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_token_ids: Collection[int],
        max_num_seqs: int = 256,
        max_model_len: int | None = None,
        device: torch.device,
        dtype: torch.dtype | None = None,
        media: MediaProcessor | None = None,
    ) -> None:
        """media: of a vision-language model; without it the model is given text only."""
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs is {max_num_seqs}: it must be at least 1.")
        config = model.config.get_text_config()
        self.max_model_len = _model_len(config, max_model_len)
        self.vocab_size = int(config.vocab_size)
        self.max_num_seqs = max_num_seqs
        outside = [token for token in eos_token_ids if not 0 <= token < self.vocab_size]
        if outside:
            raise ValueError(f"eos_token_ids {outside} are outside the vocabulary of {self.vocab_size}.")
        self._media = media
        if media is not None:
            self.image_token_id, self.video_token_id = media.image_token_id, media.video_token_id
        self._device = device
        nn.Module.to(model, device)
        _cast_parameters(model, dtype)
        model.eval().requires_grad_(False)
        self._runner = ModelRunner(model, device)
        self._cache = SlotCache()
        self._eos_table = np.isin(np.arange(self.vocab_size), list(eos_token_ids))
        self._slots = Slots(max_num_seqs, self._eos_table)
        self._queue: deque[_Waiting] = deque()
        self._plan: SamplingPlan | None = None  # of the running rows; None after they changed
        self._next_request_id = 0
        self._version = 0
        self._is_awake = True
        self._dropped: list[tuple[torch.UntypedStorage, int]] = []  # storages of the weights and their bytes
        self._is_closed = False

    @property
    def version(self) -> int:
        """Of the weights that the next token will come from."""
        return self._version

    @property
    def model(self) -> PreTrainedModel:
        return self._runner.model

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens run so far: samples of one prompt share theirs."""
        return self._runner.prefill_tokens

    def submit(self, prompt: AnyPrompt, params: SamplingParams) -> int:
        """Queues a request and returns its id."""
        self._require_awake("submit")
        source = as_prompt(prompt)
        token_ids = self._expanded(source)
        request_id = self._next_request_id
        self._check_prompt(request_id, token_ids, params)
        self._next_request_id += 1
        self._queue.append(_Waiting(Request(request_id, token_ids, params, source if self._media else None)))
        return request_id

    def num_prompt_tokens(self, prompt: EnginePrompt) -> int:
        """Images counted as the tokens that they become."""
        return len(self._expanded(prompt))

    def _expanded(self, prompt: EnginePrompt) -> tuple[int, ...]:
        if self._media is None:
            if prompt.images or prompt.videos:
                raise ValueError(
                    f"The native engine has no images or videos for {type(self.model).__name__}: it takes them for "
                    f"{', '.join(FAMILIES)}, given a processor. Use --engine vllm."
                )
            return prompt.token_ids
        image_sizes = [(image.height, image.width) for image in prompt.images]
        return self._media.expanded(prompt.token_ids, image_sizes, [video.shape[:3] for video in prompt.videos])

    def has_unfinished(self) -> bool:
        return bool(self._queue) or self._slots.num_active > 0

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Fills the free slots from the queue, then runs one token of every sequence."""
        self._require_awake("step")
        if not self.has_unfinished():
            return []
        self._runner.verify(self.vocab_size)
        done = self._admit()
        if self._slots.num_active:
            done += self._decode()
        return done

    @torch.inference_mode()
    def abort(self, request_ids: Iterable[int] | None = None) -> list[Completion]:
        """Stops the requests and returns what each unfinished sample has, in the order of request and sample."""
        chosen = None if request_ids is None else frozenset(request_ids)
        done, moves = self._slots.abort(chosen)
        self._follow(moves)
        self._plan = None
        kept: deque[_Waiting] = deque()
        for waiting in self._queue:
            if chosen is None or waiting.request.request_id in chosen:
                done += _aborted_before_start(waiting)
            else:
                kept.append(waiting)
        self._queue = kept
        return sorted(done, key=lambda item: (item.request_id, item.sample_index))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copies the weights in; sequences under way keep their keys and values, and later tokens bear the version."""
        self._require_open("load_weights")
        if self._dropped:
            raise RuntimeError("load_weights() after sleep(2): call wake('weights') first.")
        landed = copy_weights(self._runner.model, weights)
        self._runner.refresh()
        landed.check()
        self._version = version

    def sleep(self, level: int = 1) -> int:
        """Frees the cache, and with level 2 the weights; returns the bytes."""
        self._require_open("sleep")
        if self.has_unfinished():
            raise RuntimeError(
                f"sleep() with {self._slots.num_active} sequences running and {len(self._queue)} requests waiting:"
                " step() until has_unfinished() is False, or abort(), first."
            )
        self._is_awake = False
        if level == 2:
            self._dropped = drop_weights(self._runner.model)
        return self._cache.free() + sum(size for _, size in self._dropped)

    def wake(self, part: EnginePart) -> None:
        """Room for the weights, which must be loaded after level 2; the cache comes back with the first request."""
        self._require_open("wake")
        if part == "weights":
            for storage, size in self._dropped:
                storage.resize_(size)
            self._dropped = []
        elif not self._is_awake:
            self._runner.refresh()
            self._is_awake = True

    def close(self) -> None:
        """Drops the queue, the cache and the model."""
        if self._is_closed:
            return
        self._is_closed = True
        self._queue.clear()
        self._slots = Slots(0, self._eos_table)
        self._cache.free()
        del self._runner

    def _admit(self) -> list[Completion]:
        admissions = self._take_from_queue()
        if not admissions:
            return []
        first, last = admissions[0].first_row, self._slots.num_active
        room = max(len(item.waiting.request.prompt) + _ROOM_AHEAD for item in admissions)
        self._reserve(room)
        logits = self._prefill_new(admissions)
        rows = slice(first, last)
        counts = [item.count for item in admissions]
        sources = torch.arange(len(admissions)).repeat_interleave(torch.tensor(counts)).to(self._device)
        plan = self._make_plan(rows)
        return self._produce(logits.index_select(0, sources), rows, plan)

    def _take_from_queue(self) -> list[_Admission]:
        """Gives the free slots to the queue's head; a request may enter in parts."""
        admissions: list[_Admission] = []
        while self._queue and self._slots.num_active < self.max_num_seqs:
            waiting = self._queue[0]
            count = min(waiting.num_left, self.max_num_seqs - self._slots.num_active)
            admissions.append(_Admission(waiting, self._slots.num_active, count))
            self._slots.admit(waiting.request, waiting.next_sample, count)
            waiting.next_sample += count
            if not waiting.num_left:
                self._queue.popleft()
        return admissions

    def _prefill_new(self, admissions: list[_Admission]) -> Tensor:
        """Fills the admitted rows of the cache; logits after each prompt, [admissions, vocab]."""
        logits: dict[int, Tensor] = {}
        fresh: list[int] = []
        for index, item in enumerate(admissions):
            held = item.waiting.prefilled
            if held is not None and held.version == self._version:
                rows = slice(item.first_row, item.first_row + item.count)
                self._cache.write_rows(rows, held.content, len(item.waiting.request.prompt))
                logits[index] = held.logits
            else:
                fresh.append(index)
        for batch in _prefill_batches(fresh, [len(item.waiting.request.prompt) for item in admissions]):
            chosen = [admissions[index] for index in batch]
            for index, row in zip(batch, self._prefill_batch(chosen).split(1), strict=True):
                logits[index] = row
        for index in fresh:
            self._hold_for_siblings(admissions[index], logits[index])
        for item in admissions:
            self._slots.rope_deltas[item.first_row : item.first_row + item.count] = item.waiting.rope_delta
        return torch.cat([logits[index] for index in range(len(admissions))])

    def _prefill_batch(self, admissions: list[_Admission]) -> Tensor:
        rows = [row for item in admissions for row in range(item.first_row, item.first_row + item.count)]
        sources = [place for place, item in enumerate(admissions) for _ in range(item.count)]
        return self._runner.prefill(
            [item.waiting.request.prompt for item in admissions],
            torch.tensor(rows, device=self._device),
            torch.tensor(sources, device=self._device),
            self._cache,
            self._encoded([item.waiting for item in admissions]),
        )

    def _encoded(self, waiting: list[_Waiting]) -> list[EncodedPrompt] | None:
        """Pixels only now, so that a long queue does not hold them; None for a model of text alone."""
        if self._media is None:
            return None
        found = []
        for item in waiting:
            source = item.request.source
            assert source is not None
            encoded = self._media.encode(source.token_ids, source.images, source.videos)
            assert encoded.token_ids == item.request.prompt, "an image has another size than its pixels"
            item.rope_delta = encoded.rope_delta
            found.append(encoded)
        return found

    def _hold_for_siblings(self, admission: _Admission, logits: Tensor) -> None:
        waiting = admission.waiting
        if waiting.num_left:
            content = self._cache.read_row(admission.first_row, len(waiting.request.prompt))
            waiting.prefilled = _Prefilled(content, logits.clone(), self._version)

    def _decode(self) -> list[Completion]:
        slots, rows = self._slots, slice(0, self._slots.num_active)
        lowest, highest = int(slots.positions[rows].min()), int(slots.positions[rows].max())
        self._reserve(highest + 1)
        if self._plan is None:
            self._plan = self._make_plan(rows)
        tokens, positions = self._put(slots.tokens[rows]), self._put(slots.positions[rows])
        rope_deltas = None if self._media is None else self._put(slots.rope_deltas[rows])
        logits = self._runner.decode(tokens, positions, lowest, highest, self._cache, rope_deltas)
        return self._produce(logits, rows, self._plan)

    def _produce(self, logits: Tensor, rows: slice, plan: SamplingPlan) -> list[Completion]:
        """Samples a token for each of the rows, and lets the finished ones leave."""
        slots = self._slots
        uniforms = uniform_array(slots.seed_states[rows], slots.draw_index(rows))
        on_device = sample(logits, self._put(uniforms), plan)
        tokens, logprobs = (column.cpu().numpy() for column in on_device)
        if np.isnan(logprobs).any():
            row = rows.start + int(np.isnan(logprobs).argmax())
            raise RuntimeError(
                f"The model's logits are not finite (request {slots.request_of(row).request_id}, token"
                f" {int(slots.num_produced[row])}, weight version {self._version}): check the weights last loaded."
            )
        slots.record(rows, tokens, logprobs, self._version)
        done, moves = slots.finish(rows)
        if done or rows.start:
            self._plan = None
        self._follow(moves)
        return done

    def _follow(self, moves: Moves | None) -> None:
        """Moves rows of the cache as the slots moved."""
        if moves is not None:
            places = int(self._slots.positions[moves.targets].max())
            self._cache.move_rows(self._put(moves.sources), self._put(moves.targets), places)

    def _reserve(self, places: int) -> None:
        slots = self._slots
        longest = slots.most_places()
        self._cache.reserve(slots.num_active, min(places, longest), self.max_num_seqs, longest)

    def _make_plan(self, rows: slice) -> SamplingPlan:
        slots = self._slots
        return plan_sampling(
            slots.temperature[rows], slots.top_p[rows], slots.top_k[rows], self.vocab_size, self._device
        )

    def _put(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _check_prompt(self, request_id: int, prompt: tuple[int, ...], params: SamplingParams) -> None:
        if not prompt:
            raise ValueError(f"Request {request_id} has an empty prompt: give it at least one token.")
        outside = [token for token in prompt if not 0 <= token < self.vocab_size]
        if outside:
            raise ValueError(
                f"Request {request_id} has token ids {outside[:5]} outside the vocabulary of {self.vocab_size}:"
                " tokenise the prompt with this model's tokenizer."
            )
        total = len(prompt) + params.max_new_tokens
        if total > self.max_model_len:
            raise ValueError(
                f"Request {request_id} asks for {len(prompt)} prompt tokens + {params.max_new_tokens} new tokens ="
                f" {total}, beyond max_model_len {self.max_model_len}: shorten one or raise max_model_len."
            )

    def _require_open(self, action: str) -> None:
        if self._is_closed:
            raise RuntimeError(f"{action}() on a closed engine: make a new one.")

    def _require_awake(self, action: str) -> None:
        self._require_open(action)
        if not self._is_awake:
            raise RuntimeError(f"{action}() while the engine sleeps: call wake() first.")


def _cast_parameters(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Leaves the buffers as they are: rotary frequencies in bfloat16 would put far positions in the wrong place."""
    for parameter in model.parameters():
        if dtype is not None and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def _model_len(config: PreTrainedConfig, asked: int | None) -> int:
    """The length asked for, or all the positions that the model has."""
    positions = getattr(config, "max_position_embeddings", None)
    if asked is None and positions is None:
        raise ValueError(f"{type(config).__name__} states no max_position_embeddings: give max_model_len.")
    if asked is not None and positions is not None and asked > positions:
        raise ValueError(f"max_model_len is {asked}: the model has {positions} positions, give at most that.")
    return int(positions if asked is None else asked)  # type: ignore[arg-type]  # one of the two is given


def _aborted_before_start(waiting: _Waiting) -> list[Completion]:
    request = waiting.request
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
        for sample in range(waiting.next_sample, request.params.n)
    ]


def _prefill_batches(indices: list[int], lengths: list[int]) -> list[list[int]]:
    """Groups prompts of like length, so that padding stays below a quarter of what is run."""
    batches: list[list[int]] = []
    real = 0
    for index in sorted(indices, key=lambda i: lengths[i]):
        length = lengths[index]
        if batches:
            padded = length * (len(batches[-1]) + 1)
            if padded <= _PREFILL_TOKENS and padded <= (real + length) * 4 / 3 + 256:
                batches[-1].append(index)
                real += length
                continue
        batches.append([index])
        real = length
    return batches
