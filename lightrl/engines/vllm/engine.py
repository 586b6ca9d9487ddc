"""vLLM's engine behind lightrl's interface: requests, weights and memory. build.py creates it."""

from __future__ import annotations

import hashlib
import logging
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lightrl.config.temperatures import require_drawable
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
    skeleton,
)
from lightrl.engines.colocated import clear_caches
from lightrl.engines.vllm import host
from lightrl.engines.vllm.delivery import Delivery, knows_stacked_experts, lost_biases
from lightrl.engines.weights.account import WeightAccount, named_shapes, raise_problems
from lightrl.engines.weights.host_memory import drop_weights
from lightrl.engines.weights.placement import Placement, ServerRules
from lightrl.models.multimodal import VIDEO_FPS
from lightrl.models.policy import persistent_buffers
from lightrl.records import FinishReason
from lightrl.seeding import mix_seed

logger = logging.getLogger(__name__)

_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


@dataclass(slots=True)
class _Sample:
    """An unfinished sample, which is a separate request for vLLM."""

    request_id: int
    sample_index: int
    params: SamplingParams
    prompt: EnginePrompt
    prompt_ids: tuple[int, ...]  # as the model sees it, with expanded placeholders
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def key(self) -> str:
        return f"{self.request_id}-{self.sample_index}"

    def completion(self, reason: FinishReason) -> Completion:
        return Completion(
            request_id=self.request_id,
            sample_index=self.sample_index,
            prompt_token_ids=self.prompt_ids,
            output_token_ids=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            finish_reason=reason,
        )


class VLLMEngine(InferenceEngine):
    """Steps vLLM's engine. Memory and weights are managed here on a CPU, and by vLLM's sleep mode on a GPU."""

    sleep_levels = (1, 2)
    wake_hint = "--engine_mem_fraction"

    def __init__(
        self,
        arguments: Mapping[str, Any],
        *,
        source: PreTrainedModel,
        eos_token_ids: tuple[int, ...],
        takes_media: bool,
        device: torch.device,
        group: EngineGroup,
        scratch: tempfile.TemporaryDirectory[str],
    ) -> None:
        from vllm import LLM

        self._llm: Any = LLM(**arguments)
        host.spare_process_group(self._llm)
        if arguments.get("enable_sleep_mode"):
            host.keep_unnamed_tensors(self._llm)
        self._engine: Any = self._llm.llm_engine
        self._device = device
        self._group = group
        self._scratch = scratch
        self._skeleton = skeleton(source)
        self._shapes, self._tied = named_shapes(self._skeleton)
        self._buffers = persistent_buffers(source)  # some are parameters in vLLM
        self._eos = eos_token_ids
        self.vocab_size = int(source.config.get_text_config().vocab_size)
        self.max_model_len = int(self._engine.model_config.max_model_len)
        self.image_token_id = media_token(source, "image") if takes_media else None
        self.video_token_id = media_token(source, "video") if takes_media else None
        self.unread: tuple[str, ...] = ()  # parameters that the last load did not compare; the canary covers them
        # On a GPU, kernels may read what vLLM makes of the weights after a load, which a load in place would not renew.
        self._reloads = device.type == "cuda" and host.reloads_whole(self._llm)
        self._converts = False  # whether vLLM takes only the form of the checkpoint; the first load finds out
        self._samples: dict[str, _Sample] = {}
        self._rendered: dict[int, tuple[EnginePrompt, Any]] = {}  # by id of a measured prompt, until it is submitted
        self._unagreed = hashlib.sha256()  # of the submissions since the last step
        self._has_unagreed = False
        self._next_request_id = 0
        self._version = 0
        self._num_loads = 0
        self._asleep: set[EnginePart] = set()
        self._dropped: list[tuple[torch.UntypedStorage, int]] = []  # storages of the weights and their bytes
        self._is_closed = False

    # ---- Requests ----------------------------------------------------------------------------------------------

    def submit(self, prompt: AnyPrompt, params: SamplingParams) -> int:
        """Queues each of the n samples as a separate request of vLLM, with its own seed."""
        self._require_awake("submit")
        asked = as_prompt(prompt)
        rendered = self._render(asked)
        prompt_ids = tuple(rendered["prompt_token_ids"])
        samples = [
            _Sample(self._next_request_id, params.first_sample + i, params, asked, prompt_ids) for i in range(params.n)
        ]
        try:
            with refusals_as_value_errors(self._next_request_id):
                for sample in samples:
                    self._enter(sample, rendered)
        except BaseException:
            self._drop(samples)
            raise
        self._rendered.pop(id(asked), None)
        self._unagreed.update(repr((prompt_ids, params)).encode())
        self._has_unagreed = True
        self._next_request_id += 1
        return samples[0].request_id

    def _enter(self, sample: _Sample, rendered: Mapping[str, Any]) -> None:
        # Blocks of keys and values are shared only among requests of the same load: unfinished requests may still use
        # older ones, which no reset of the prefix cache frees.
        salted = {**rendered, "cache_salt": f"load {self._num_loads}"}
        self._engine.add_request(sample.key, salted, self._sampling_params(sample), **self._asked_for(sample.params))
        self._samples[sample.key] = sample

    def _asked_for(self, params: SamplingParams) -> Mapping[str, Any]:
        """Returns further arguments of vLLM's add_request."""
        return {}

    def _sampling_params(self, sample: _Sample) -> Any:
        from vllm import SamplingParams as Theirs
        from vllm.sampling_params import RequestOutputKind

        params = sample.params
        require_drawable("temperature", params.temperature)
        return Theirs(
            n=1,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            seed=mix_seed(params.seed or 0, sample.sample_index, params.first_token),
            max_tokens=params.max_new_tokens,
            stop_token_ids=sorted({*params.stop_token_ids, *(() if params.ignore_eos else self._eos)}),
            ignore_eos=True,  # all end tokens are among stop_token_ids
            min_tokens=min(params.min_new_tokens, params.max_new_tokens),  # it refuses a larger one
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            logprobs=0,  # of the sampled token only
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )

    def has_unfinished(self) -> bool:
        """Returns whether there is any unfinished sample."""
        return bool(self._samples)

    def step(self) -> list[Completion]:
        """Runs one step of vLLM's engine; returns the samples that it finished."""
        self._require_awake("step")
        if not self._samples:
            return []
        self._agree_on_requests()
        with host.torch_random_state_kept(self._device):
            outputs = self._engine.step()
        done = [item for output in outputs for item in self._take(output)]
        if self._samples and not self._engine.has_unfinished_requests():
            raise RuntimeError(f"vLLM has lost {len(self._samples)} samples: {', '.join(sorted(self._samples)[:5])}.")
        return sorted(done, key=lambda item: (item.request_id, item.sample_index))

    def _take(self, output: Any) -> Iterator[Completion]:
        """Adds new tokens to a sample; yields the sample if it is finished."""
        sample = self._samples.get(output.request_id)
        if sample is None:
            return
        (new,) = output.outputs
        logprobs = [choice[token].logprob for token, choice in zip(new.token_ids, new.logprobs or (), strict=True)]
        if any(math.isnan(value) for value in logprobs):
            raise RuntimeError(
                f"The model's logits are not finite (request {sample.request_id}, token {len(sample.tokens)}, weight "
                f"version {self._version}): check the weights last loaded."
            )
        sample.tokens += new.token_ids
        sample.logprobs += logprobs
        sample.versions += [self._version] * len(logprobs)
        if new.finish_reason is not None:
            if new.finish_reason not in _FINISH_REASONS:
                raise RuntimeError(f"vLLM gave up request {sample.request_id}: {new.finish_reason}.")
            del self._samples[sample.key]
            yield sample.completion(_FINISH_REASONS[new.finish_reason])

    def _agree_on_requests(self) -> None:
        """Raises an error if ranks of a group were given different requests, which vLLM would silently mix up."""
        if not self._has_unagreed:
            return
        digest, self._unagreed, self._has_unagreed = self._unagreed.hexdigest(), hashlib.sha256(), False
        if len(set(self._group.gather(digest))) > 1:
            raise RuntimeError(
                f"The {self._group.size} ranks that share an engine submitted different requests. Every rank of a "
                "group must submit the same ones in the same order: gather them first, as gather_and_generate does."
            )

    def abort(self, request_ids: Iterable[int] | None = None) -> list[Completion]:
        """Stops the requests; returns each unfinished sample so far."""
        chosen = None if request_ids is None else set(request_ids)
        stopped = [item for item in self._samples.values() if chosen is None or item.request_id in chosen]
        self._drop(stopped)
        found = [sample.completion("abort") for sample in stopped]
        return sorted(found, key=lambda item: (item.request_id, item.sample_index))

    def _drop(self, samples: list[_Sample]) -> None:
        entered = [sample.key for sample in samples if self._samples.pop(sample.key, None) is not None]
        if entered:
            self._engine.abort_request(entered)

    # ---- Prompts -----------------------------------------------------------------------------------------------

    def num_prompt_tokens(self, prompt: EnginePrompt) -> int:
        """Returns the prompt's length, counting the tokens that its images become."""
        if not prompt.images and not prompt.videos:
            return len(prompt.token_ids)
        if not self._samples and len(self._rendered) > 4096:  # drops prompts that were measured but never submitted
            self._rendered.clear()
        return len(self._render(prompt)["prompt_token_ids"])

    def _render(self, prompt: EnginePrompt) -> Any:
        """Returns vLLM's input with expanded placeholders and processed pixels, and keeps it until it is submitted."""
        asked: dict[str, Any] = {"prompt_token_ids": list(prompt.token_ids)}
        if not prompt.images and not prompt.videos:
            return asked
        kept = self._rendered.get(id(prompt))
        if kept is not None and kept[0] is prompt:
            return kept[1]
        media = {"image": list(prompt.images), "video": [_video(frames) for frames in prompt.videos]}
        asked["multi_modal_data"] = {kind: items for kind, items in media.items() if items}
        with refusals_as_value_errors(self._next_request_id):
            (rendered,) = self._engine.renderer.render_cmpl([asked])
        self._rendered[id(prompt)] = (prompt, rendered)
        return rendered

    # ---- Weights -----------------------------------------------------------------------------------------------

    def load_weights(self, weights: NamedTensors, version: int) -> None:
        """Loads whole tensors; each rank of a group keeps its slices."""
        self._require_open("load_weights")
        if "weights" in self._asleep:
            raise RuntimeError("load_weights() while the weights sleep: call wake('weights') first.")
        (problems,) = self._llm.apply_model(lambda model: self._deliver(model, weights))
        self._finish_load(version)
        raise_problems(problems, f"Weight sync to version {version}")

    def _finish_load(self, version: int) -> None:
        """Makes sure that nothing computed with older weights is used again."""
        self._num_loads += 1
        self._version = version
        self._reset_caches()
        self._start_again()

    def _deliver(self, model: nn.Module, weights: NamedTensors) -> list[str]:
        reloads = self._reloads
        rules = ServerRules(compares_experts=not reloads)
        placement = Placement(model, rules, tp_rank=self._group.rank, tp_size=self._group.size)
        taken = {*dict(model.named_parameters()), *dict(model.named_buffers())}
        buffers = [(name, buffer) for name, buffer in self._buffers if placement.own_name(name) in taken]
        shapes = self._shapes | {name: tuple(buffer.shape) for name, buffer in buffers}
        account = WeightAccount(shapes, self._tied)
        load: Any = self._reload if reloads else model.load_weights
        if not self._num_loads:
            plain: Any = model.load_weights
            has_homes = all(map(placement.has_home, self._shapes))
            self._converts = not has_homes or not knows_stacked_experts(plain, self._shapes, next(model.parameters()))
        converted = self._skeleton if self._converts else None
        delivery = Delivery(load, account, placement, can_load_one=not reloads, converted=converted)
        delivery.run(chain(weights, buffers))
        account.follow(dict(model.named_parameters(remove_duplicate=False)))
        problems = account.problems() + lost_biases(self._buffers, buffers)
        if delivery.loaded:
            parts = host.split_latent_attention(model)
            own = {name for name, _ in model.named_parameters()} - parts
            problems += [f"the engine's {name} got nothing" for name in sorted(own - delivery.loaded)]
        if delivery.unread and not self._num_loads:
            logger.info(
                "vLLM keeps %d parameters in a way that is not read back: %s", len(delivery.unread), delivery.unread
            )
        if not problems and self._device.type == "cpu":
            host.repack_experts(model)
        return problems

    def _reload(self, pairs: NamedTensors) -> None:
        """Loads the whole model at once; at the end, vLLM makes again what its kernels read."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(pairs)})

    def _reset_caches(self) -> None:
        """Clears everything that older weights filled."""
        self._engine.reset_prefix_cache()
        if self.image_token_id is not None:
            self._engine.reset_encoder_cache()  # nothing else clears it: images would keep the old encoder's outputs

    def _start_again(self) -> None:
        """Submits samples again that have no token yet: they join the requests of this load, with new blocks."""
        waiting = [sample for sample in self._samples.values() if not sample.tokens]
        self._drop(waiting)
        for sample in waiting:
            self._enter(sample, self._render(sample.prompt))
        for sample in waiting:
            self._rendered.pop(id(sample.prompt), None)

    # ---- Memory ------------------------------------------------------------------------------------------------

    def sleep(self, level: int = 1) -> int:
        """Frees the KV cache and, with level 2, the weights; returns the bytes freed."""
        self._require_open("sleep")
        if self._samples:
            raise RuntimeError(f"sleep() with {len(self._samples)} samples under way: finish or abort() them first.")
        self._rendered.clear()
        self._asleep = {"weights", "kv_cache"}
        if self._device.type == "cuda":
            before, _ = torch.cuda.mem_get_info(self._device)
            self._llm.sleep(level=level)
            after, _ = torch.cuda.mem_get_info(self._device)
            return max(0, after - before)
        self._reset_caches()
        freed = host.discard_pages(host.kv_storages(self._llm))
        if level == 2:
            (self._dropped,) = self._llm.apply_model(drop_weights)
        return freed + sum(size for _, size in self._dropped)

    def wake(self, part: EnginePart) -> None:
        """Takes back the memory of a part; does nothing if the part is awake."""
        self._require_open("wake")
        if part not in self._asleep:
            return
        if self._device.type == "cuda":
            self._wake_on_gpu(part)
        elif part == "weights":
            for storage, size in self._dropped:
                storage.resize_(size)
            self._dropped = []
        self._asleep.discard(part)

    def _wake_on_gpu(self, part: EnginePart) -> None:
        try:
            self._llm.wake_up(tags=[part])
        except RuntimeError as error:  # vLLM's allocator has no special error for this
            if "out of memory" in str(error).lower():
                raise torch.OutOfMemoryError(str(error)) from error
            raise

    def close(self) -> None:
        """Drops the worker, its memory and its process groups, but not the trainer's group."""
        if self._is_closed:
            return
        self._is_closed = True
        self._drop(list(self._samples.values()))
        self._rendered.clear()
        if self._asleep and self._device.type == "cuda":
            with suppress(RuntimeError):  # no memory for it
                self._llm.wake_up()  # vLLM's allocator cannot free what has no memory, nor serve another engine then
        host.shut_down(self._llm)
        del self._llm, self._engine
        clear_caches()
        host.open_engines.drop()
        self._scratch.cleanup()

    def _require_open(self, action: str) -> None:
        if self._is_closed:
            raise RuntimeError(f"{action}() on a closed engine: make a new one.")

    def _require_awake(self, action: str) -> None:
        """Raises an error if the engine sleeps, since vLLM would take requests and spin forever."""
        self._require_open(action)
        if self._asleep:
            raise RuntimeError(f"{action}() while the engine sleeps: call wake() first.")


@contextmanager
def refusals_as_value_errors(request_id: int) -> Iterator[None]:
    """Turns vLLM's errors about a request, some of which are no ValueErrors, into ValueErrors."""
    from vllm.exceptions import VLLMValidationError

    try:
        yield
    except (ValueError, VLLMValidationError) as error:
        raise ValueError(f"vLLM refuses request {request_id}: {error}") from error


def _video(frames: Any) -> tuple[Any, dict[str, Any]]:
    """Describes frames so that none are dropped and times are those that transformers assumes."""
    count = len(frames)
    return frames, {
        "fps": VIDEO_FPS,
        "duration": count / VIDEO_FPS,
        "total_num_frames": count,
        "frames_indices": list(range(count)),
        "video_backend": "opencv",
        "do_sample_frames": False,
    }


def media_token(source: PreTrainedModel, kind: str) -> int | None:
    """Returns the placeholder's id, for which configs use one of two names."""
    for name in (f"{kind}_token_id", f"{kind}_token_index"):
        token = getattr(source.config, name, None)
        if token is not None:
            return int(token)
    return None
