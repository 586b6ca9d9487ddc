"""An engine that needs only torch and transformers: continuous batching over a row cache, on any device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from lightrl.config import NativeEngineConfig, StrategyOptions
from lightrl.engines.base import (
    AnyPrompt,
    Completion,
    EngineGroup,
    EnginePart,
    EnginePrompt,
    InferenceEngine,
    NamedTensors,
    SamplingParams,
    as_prompt,
    eos_ids,
    no_actor,
    outside_vocabulary,
)
from lightrl.engines.native.constraints import constrain
from lightrl.engines.native.forward import ModelRunner, SampleState
from lightrl.engines.native.kinds import kind_of
from lightrl.engines.native.row_parts import (
    LEAST_SAVED,
    LEAST_SAVED_ON_CPU,
    RowPart,
    at_positions,
    cut,
    sorted_rows,
)
from lightrl.engines.native.sampler import SamplingPlan, plan_sampling, sample
from lightrl.engines.native.scheduler import Admission, Moves, Request, Scheduler, prefill_groups
from lightrl.engines.weights.account import WeightAccount, named_shapes, raise_problems
from lightrl.engines.weights.host_memory import drop_weights
from lightrl.models.buffers import compute_buffers
from lightrl.models.fixed_rope import fix_frequencies, fixed_length
from lightrl.models.multimodal import FAMILIES, MediaProcessor
from lightrl.models.packed_attention import varies_with_length
from lightrl.models.policy import model_loader, stated_context
from lightrl.models.router_biases import hold_in_float32
from lightrl.records import EncodedPrompt
from lightrl.seeding import uniform_array

logger = logging.getLogger(__name__)

Draw: TypeAlias = Callable[[Tensor, Tensor, SamplingPlan], tuple[Tensor, Tensor]]

_NUM_ROWS = 128  # of a matrix that is transposed at a time, to fit into a core's second cache
_GAP = 16  # elements between rows, so that the values of a column do not collide in the cache
_WORTH_TURNING = 1 << 16  # copy_() is slower from this number of elements on
ROOM_AHEAD = 64  # positions reserved for new tokens at first; a longer answer grows the cache


def build_native_engine(
    *,
    source: PreTrainedModel | None,
    tokenizer: Any,
    options: StrategyOptions,
    device: torch.device,
    group: EngineGroup,
    kind: Callable[..., NativeEngine] | None = None,
) -> NativeEngine:
    """Makes an engine with the source's architecture; weights, perhaps sharded, come with the first sync.

    kind: its class or factory; None makes a NativeEngine, or the kind that an option of --native asks for.
    """
    if source is None:
        raise no_actor("native")
    if options.engine_args:
        raise ValueError("The native engine takes no --engine_args: its options are --native.*.")
    if group.size > 1 and group.comm.is_main:
        logger.warning("The native engine has no tensor parallelism: the ranks of a group repeat each other's work.")
    media = _media_of(source, options) if source.config.model_type in FAMILIES else None
    model = empty_copy(source, torch.bfloat16 if options.dtype == "bfloat16" else torch.float32, device)
    max_num_seqs, ends = options.native.max_num_seqs, eos_ids(source, tokenizer)
    is_plain = options.native == NativeEngineConfig(max_num_seqs=max_num_seqs)
    make = (kind or NativeEngine) if is_plain else kind_of(options.native, source, kind)
    return make(model, eos_token_ids=ends, max_num_seqs=max_num_seqs, device=device, media=media)


def _media_of(source: PreTrainedModel, options: StrategyOptions) -> MediaProcessor | None:
    name = source.name_or_path  # a model made from a config has none
    return MediaProcessor.load(name, trust_remote_code=options.trust_remote_code) if name else None


@torch.no_grad()
def empty_copy(source: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Returns the source's architecture with unset parameters and the source's buffers, which no checkpoint has.

    If the source is on the meta device, its buffers are recomputed.
    """
    config = type(source.config).from_dict(source.config.to_dict())
    attention = "sdpa" if source._supports_sdpa else "eager"
    with torch.device("meta"):
        model: PreTrainedModel = model_loader(config).from_config(config, dtype=dtype, attn_implementation=attention)
    model.to_empty(device=device).tie_weights()
    if is_meta := any(buffer.is_meta for buffer in source.buffers()):
        compute_buffers(model)
    if varies_with_length(config):  # a source that was not fixed would differ from the engine
        fix_frequencies(source)
        fix_frequencies(model, fixed_length(source))
    if dtype != torch.float32:
        hold_in_float32(model)
    for name, buffer in model.named_buffers() if not is_meta else ():
        buffer.data = source.get_buffer(name).to(device, buffer.dtype, copy=True)
    return model.requires_grad_(False)


@dataclass(frozen=True, slots=True)
class _Prefilled:
    """A prompt's keys, values and logits, kept for samples that found no free row when their siblings entered."""

    content: Any  # result of the cache's read_row()
    logits: Tensor  # [1, vocab]
    version: int


class NativeEngine(InferenceEngine):
    """Engine that owns the model it is given, including its mode, gradients, attention and layout of weights."""

    sleep_levels: tuple[int, ...] = (1, 2)
    wake_hint = "--native.max_num_seqs"
    make_runner = ModelRunner
    draw: Draw = staticmethod(sample)

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_token_ids: Collection[int],
        device: torch.device,
        max_num_seqs: int = 256,
        max_model_len: int | None = None,
        media: MediaProcessor | None = None,
    ) -> None:
        """Takes the model on its device.

        Args:
            model: a causal language model, or a vision-language model of one of the known families.
            max_num_seqs: the most samples that run at the same time.
            max_model_len: the most tokens of prompt and response; None means all positions of the model.
            media: the processor of a vision-language model; without one, the engine takes only text.
        """
        config = model.config.get_text_config()
        positions = stated_context(config)
        self.max_model_len = _checked_length(max_model_len, positions) if max_model_len else positions
        self.vocab_size = int(config.vocab_size)
        self.max_num_seqs = max_num_seqs
        if outside := [token for token in eos_token_ids if not 0 <= token < self.vocab_size]:
            raise outside_vocabulary(outside, self.vocab_size)
        if varies_with_length(config):
            fix_frequencies(model, fixed_length(model) or self.max_model_len)
        self._media = media
        if media is not None:
            self.image_token_id, self.video_token_id = media.image_token_id, media.video_token_id
        self._device = device
        self._expected = named_shapes(model)
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._runner = self.make_runner(model.eval().requires_grad_(False), device)
        self._cache: SampleState = self._runner.make_cache()
        eos_table = np.isin(np.arange(self.vocab_size), list(eos_token_ids))
        self._scheduler = Scheduler(max_num_seqs, eos_table)
        self._plan: SamplingPlan | None = None  # for the running rows; None after they changed
        self._parts: list[RowPart] = []  # those at the last change of the running rows
        self._next_request_id = 0
        self._version = 0
        self._is_awake = True
        self._dropped: list[tuple[torch.UntypedStorage, int]] = []  # storages of the weights and their bytes
        self._is_closed = False

    @property
    def model(self) -> PreTrainedModel:
        """The model that generates."""
        return self._runner.model

    @property
    def num_prefill_tokens(self) -> int:
        """The number of prompt tokens run so far; samples of one prompt share them."""
        return self._runner.prefill_tokens

    def draw_with(self, draw: Draw) -> None:
        """Draws tokens with another function than sampler.sample()."""
        self.draw = draw

    # ---- Requests ----------------------------------------------------------------------------------------------

    def submit(self, prompt: AnyPrompt, params: SamplingParams) -> int:
        """Queues a request and returns its id."""
        self._require_open("submit", awake=True)
        source, request_id = as_prompt(prompt), self._next_request_id
        self._next_request_id += 1
        token_ids = source.token_ids if self._media is None else _expanded(self._media, source)
        self._scheduler.submit(Request(request_id, token_ids, params, source if self._media else None))
        return request_id

    def num_prompt_tokens(self, prompt: EnginePrompt) -> int:
        """Returns the prompt's length, counting the tokens that its images become."""
        return len(prompt.token_ids if self._media is None else _expanded(self._media, prompt))

    def has_unfinished(self) -> bool:
        """Returns whether any sample is waiting or running."""
        return self._scheduler.num_waiting + self._scheduler.num_running > 0

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Fills the free rows from the queue, then runs one token of every sample."""
        self._require_open("step", awake=True)
        self._cache = self._runner.verify(self.vocab_size, self._cache)
        done = self._admit()
        return done + self._decode() if self._scheduler.num_running else done

    @torch.inference_mode()
    def abort(self, request_ids: Iterable[int] | None = None) -> list[Completion]:
        """Stops the requests and returns each unfinished sample so far, in the order of request and sample."""
        done, moves = self._scheduler.abort(None if request_ids is None else frozenset(request_ids))
        self._move_rows(moves)
        self._plan = None
        return done

    def _admit(self) -> list[Completion]:
        """Runs the prompts of entering samples and draws their first tokens."""
        if not (admissions := self._scheduler.admit()):
            return []
        try:
            self._reserve(max(len(item.request.prompt) + ROOM_AHEAD for item in admissions))
            counts = self._put(np.array([item.count for item in admissions]))
            logits, first_row = self._prefill(admissions).repeat_interleave(counts, 0), admissions[0].first_row
            return self._draw(logits, first_row, self._sampling_plan(first_row))
        except BaseException:
            self._scheduler.withdraw(admissions)  # the rows hold no prompt, so that another step would decode noise
            raise

    def _prefill(self, admissions: list[Admission]) -> Tensor:
        """Fills the admitted rows of the cache; returns the logits after each prompt, [admissions, vocab]."""
        kept, last = admissions[0].request.prefilled, admissions[-1]
        if kept is not None and kept.version == self._version:  # only the first can have waited for more rows
            return self._prefill_after(kept, admissions)
        groups = prefill_groups([len(item.request.prompt) for item in admissions])
        order = torch.tensor([index for group in groups for index in group], device=self._device).argsort()
        logits = torch.cat([self._prefill_group([admissions[index] for index in group]) for group in groups])[order]
        if last.request.num_admitted < last.request.params.n:  # only the last waits
            self._keep_prefix(last, logits[-1:])
        return logits

    def _prefill_after(self, kept: _Prefilled, admissions: list[Admission]) -> Tensor:
        """Fills the rows if the prompt of the first admission was run before."""
        first, *others = admissions
        rows = slice(first.first_row, first.first_row + first.count)
        self._cache.write_rows(rows, kept.content, len(first.request.prompt))
        return torch.cat([kept.logits, self._prefill(others)]) if others else kept.logits

    def _keep_prefix(self, admission: Admission, logits: Tensor) -> None:
        request = admission.request
        content = self._cache.read_row(admission.first_row, len(request.prompt))
        request.prefilled = _Prefilled(content, logits.clone(), self._version)

    def _prefill_group(self, admissions: list[Admission]) -> Tensor:
        rows = [row for item in admissions for row in range(item.first_row, item.first_row + item.count)]
        sources = [index for index, item in enumerate(admissions) for _ in range(item.count)]
        where = (torch.tensor(rows, device=self._device), torch.tensor(sources, device=self._device), self._cache)
        if self._media is None:
            return self._runner.prefill([item.request.prompt for item in admissions], *where)
        return self._runner.prefill_with_images([_encoded(self._media, item.request) for item in admissions], *where)

    def _decode(self) -> list[Completion]:
        """Runs the last token of every running sample and draws the next one."""
        rows, running = self._scheduler.rows, slice(self._scheduler.num_running)
        if self._plan is None:
            least_saved = LEAST_SAVED_ON_CPU if self._device.type == "cpu" else LEAST_SAVED
            self._parts = self._arrange_rows(least_saved) if self._scheduler.is_padded(2 * least_saved) else []
            self._plan = self._sampling_plan(0)
        tokens, positions = rows.token[running], rows.position[running]
        highest = int(positions.max())
        self._reserve(highest + 1)
        rope_deltas = None if self._media is None else self._put(self._rope_deltas())
        positions_here = self._put(positions)
        parts = at_positions(self._parts, positions) if self._parts else ()
        self._cache.begin_decode(positions_here, int(positions.min()), highest, parts)
        logits = self._runner.decode(self._put(tokens), positions_here, self._cache, rope_deltas)
        return self._draw(logits, 0, self._plan)

    def _arrange_rows(self, least_saved: int) -> list[RowPart]:
        """Returns which rows are read together, after sorting them if that pays; modules always read all together."""
        if not self._runner.uses_fused_forward:
            return []
        running = slice(self._scheduler.num_running)
        order = sorted_rows(self._scheduler.rows.position[running], least_saved)
        if order is not None:
            self._move_rows(self._scheduler.reorder(order))
        return cut(self._scheduler.rows.position[running], least_saved)

    def _rope_deltas(self) -> NDArray[np.int64]:
        requests = self._scheduler.rows.request[: self._scheduler.num_running]
        return np.array([request.rope_delta for request in requests], np.int64)

    def _draw(self, logits: Tensor, first_row: int, plan: SamplingPlan) -> list[Completion]:
        """Draws a token for each row from first_row on; returns the samples that it ends."""
        rows, running = self._scheduler.rows, slice(first_row, self._scheduler.num_running)
        uniforms = uniform_array(rows.seed_state[running], rows.first_draw[running] + rows.num_produced[running])
        if rows.is_constrained[running].any():
            logits = constrain(logits, rows, first_row, self._scheduler.eos_table)
        tokens, logprobs = (column.cpu().numpy() for column in self.draw(logits, self._put(uniforms), plan))
        if np.isnan(logprobs).any():
            self._raise_not_finite(first_row + int(np.isnan(logprobs).argmax()))
        done, moves = self._scheduler.record(first_row, tokens, logprobs, self._version)
        if done or first_row:
            self._plan = None
        self._move_rows(moves)
        return done

    def _raise_not_finite(self, row: int) -> None:
        rows = self._scheduler.rows
        raise RuntimeError(
            f"The model's logits are not finite (request {rows.request[row].request_id}, token"
            f" {int(rows.num_produced[row])}, weight version {self._version}): check the weights last loaded."
        )

    def _move_rows(self, moves: Moves | None) -> None:
        """Moves rows of the cache as the scheduler moved its own."""
        if moves is not None:
            length = int(self._scheduler.rows.position[moves.targets].max())
            self._cache.move_rows(self._put(moves.sources), self._put(moves.targets), length)

    def _reserve(self, positions: int) -> None:
        most = self._scheduler.most_positions()
        self._cache.reserve(self._scheduler.num_running, min(positions, most), self.max_num_seqs, most)

    def _sampling_plan(self, first_row: int) -> SamplingPlan:
        asked = self._scheduler.rows.sampling[first_row : self._scheduler.num_running]
        return plan_sampling(asked, self.vocab_size, self._device)

    def _put(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)  # a copy; on a CPU, a view of the array

    # ---- Weights and memory ------------------------------------------------------------------------------------

    def load_weights(self, weights: NamedTensors, version: int) -> None:
        """Copies the weights in; unfinished requests keep their keys and values, and later tokens get the version."""
        self._require_open("load_weights")
        if self._dropped:
            raise RuntimeError("load_weights() after sleep(2): call wake('weights') first.")
        parameters, account = self._parameters, WeightAccount(*self._expected)
        with torch.no_grad():
            for name, tensor in weights:
                if account.accept(name, tensor):
                    copy_weight(parameters[name], tensor)
                    account.remember_copy(name, tensor, parameters[name])
        self._runner.refresh()
        raise_problems(account.problems(), f"Weight sync to version {version}")
        self._version = version

    def placeable_parameters(self) -> Mapping[str, Tensor]:
        """Returns the parameters, under each of their names, if all ranks may hold them in common memory."""
        return self._parameters if self._device.type == "cpu" else {}

    def sleep(self, level: int = 1) -> int:
        """Frees the cache and, with level 2, the weights; returns the bytes."""
        self._require_open("sleep")
        if self.has_unfinished():
            raise RuntimeError(_describe_unfinished(self._scheduler))
        if level == 2:
            self._dropped = drop_weights(self._runner.model, self._runner.refresh)
        self._runner.refresh()  # also frees what was derived from the weights
        num_bytes = self._cache.free() + sum(size for _, size in self._dropped)
        self._is_awake = False  # last: after Ctrl-C in a notebook it counts as awake, and takes its memory anew
        return num_bytes

    def wake(self, part: EnginePart) -> None:
        """Takes memory for the weights, which must be loaded after level 2; the first request makes the cache."""
        self._require_open("wake")
        if part == "weights":
            for storage, size in self._dropped:
                storage.resize_(size)
            self._dropped = []
        elif not self._is_awake:
            self._runner.refresh()
            self._is_awake = True

    def close(self) -> None:
        """Drops the requests, the cache and the model."""
        if not self._is_closed:
            self._is_closed = True
            if self.has_unfinished():
                self._scheduler.abort(None)
            self._cache.free()
            del self._runner, self._parameters

    def _require_open(self, action: str, *, awake: bool = False) -> None:
        if self._is_closed:
            raise RuntimeError(f"{action}() on a closed engine: make a new one.")
        if awake and not self._is_awake:
            raise RuntimeError(f"{action}() while the engine sleeps: call wake() first.")


def _expanded(media: MediaProcessor, prompt: EnginePrompt) -> tuple[int, ...]:
    image_sizes = [(image.height, image.width) for image in prompt.images]
    return media.expanded(prompt.token_ids, image_sizes, [video.shape[:3] for video in prompt.videos])


def _encoded(media: MediaProcessor, request: Request) -> EncodedPrompt:
    """Returns the prompt with pixels, which are made this late so that a long queue does not hold them."""
    assert request.source is not None
    encoded = media.encode(request.source.token_ids, request.source.images, request.source.videos)
    assert encoded.token_ids == request.prompt, "an image has another size than its pixels"
    request.rope_delta = encoded.rope_delta
    return encoded


def copy_weight(target: Tensor, source: Tensor) -> None:
    """Copies a tensor; on a CPU, a copy into a transposed matrix is several times as fast as copy_()."""
    is_turned = target.dim() == 2 and target.stride(0) == 1 and target.stride(1) > 1
    if is_turned and target.numel() >= _WORTH_TURNING and target.device.type == "cpu" and target is not source:
        _copy_turned(target, source)
    else:
        target.copy_(source)


def _copy_turned(target: Tensor, source: Tensor) -> None:
    rows = torch.empty(_NUM_ROWS, target.shape[1] + _GAP, dtype=target.dtype)[:, : target.shape[1]]
    for some, given in zip(target.split(_NUM_ROWS), source.split(_NUM_ROWS), strict=True):
        some.copy_(rows[: len(given)].copy_(given))


def _describe_unfinished(scheduler: Scheduler) -> str:
    return (
        f"sleep() with {scheduler.num_running} sequences running and {scheduler.num_waiting} requests waiting:"
        " step() until has_unfinished() is False, or abort(), first."
    )


def _checked_length(asked: int, positions: int) -> int:
    if asked > positions:
        raise ValueError(f"max_model_len is {asked}: the model has {positions} positions, give at most that.")
    return asked
