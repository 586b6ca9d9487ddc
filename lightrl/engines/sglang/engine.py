"""SGLang as the engine: one sglang.Engine per group of ranks, owned by the group's first rank.

The other ranks of a group call the same methods and get results and errors from the owner. SGLang's schedulers are
separate processes, which go on generating between calls. docs/engines_sglang.md lists what this module guards against.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from lightrl.config import StrategyOptions, engine_arguments
from lightrl.engines.base import (
    AnyPrompt,
    Completion,
    EngineGroup,
    EnginePart,
    EnginePrompt,
    InferenceEngine,
    NamedTensors,
    SamplingParams,
    WeightSyncError,
    as_prompt,
    eos_ids,
    model_folder,
    no_actor,
    skeleton,
)
from lightrl.engines.frequencies import check_sglang
from lightrl.engines.sglang.arguments import SPARE_PLACES, engine_seed, environment_for_start, server_arguments
from lightrl.engines.sglang.loader import LOADER
from lightrl.engines.sglang.process import SGLangProcess, kept_state
from lightrl.engines.sglang.requests import Sample, SampleTasks, is_cut, media_features
from lightrl.engines.sglang.sync import Route, WeightSender
from lightrl.engines.weights.account import WeightAccount, raise_problems
from lightrl.engines.weights.names import checkpoint_pairs
from lightrl.imports import is_installed
from lightrl.models.multimodal import FAMILIES, MediaProcessor
from lightrl.models.packed_attention import varies_with_length
from lightrl.process_group import free_port

T = TypeVar("T")

_MOST_CUT_TOKENS = 4096  # default of SGLang's sampling_mask_max_tokens
_IDLE_TIMEOUT_S = 60.0
_RELEASE_TIMEOUT_S = 10.0
_TAGS: dict[EnginePart, tuple[str, ...]] = {"kv_cache": ("cuda_graph", "kv_cache"), "weights": ("weights",)}
_KNOWN_ERRORS = {kind.__name__: kind for kind in (ValueError, TypeError, WeightSyncError, MemoryError)}


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error of the owner, sent to the other ranks."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traits:
    """Facts about the engine that its owner knows after the start."""

    model_path: str
    is_real_model: bool  # the model's original folder or name, not one made for its config
    max_model_len: int


def build_sglang_engine(
    *,
    source: PreTrainedModel | None,
    tokenizer: Any,
    options: StrategyOptions,
    device: torch.device,
    group: EngineGroup,
    kind: Callable[..., SGLangEngine] | None = None,
) -> SGLangEngine:
    """Makes an engine with the source's architecture and folder; weights come with the first weight sync."""
    if source is None:
        raise no_actor("sglang")
    if varies_with_length(source.config):
        check_sglang(source)
    return (kind or SGLangEngine)(source, tokenizer, options, device, group)


class SGLangEngine(InferenceEngine):
    """Engine that drives SGLang. Unless it is deterministic, draws depend on its seed and the order of requests."""

    sleep_levels = (1, 2)
    wake_hint = "--engine_mem_fraction"
    loader = LOADER  # the function with which schedulers load a bucket

    def __init__(
        self,
        source: PreTrainedModel,
        tokenizer: Any,
        options: StrategyOptions,
        device: torch.device,
        group: EngineGroup,
    ) -> None:
        self._options, self._device, self._group = options, device, group
        self._skeleton = skeleton(source)
        self.vocab_size = int(self._skeleton.config.get_text_config().vocab_size)
        self._eos_ids = eos_ids(source, tokenizer)
        self._left: dict[int, int] = {}  # unfinished samples of each request, on every rank
        self._next_request_id = 0
        self._released: set[str] = set()  # tags of released memory
        self._freed: dict[EnginePart, int] = {}  # bytes of this rank's device that the release of a part freed
        self._process: SGLangProcess | None = None
        self._samples: SampleTasks | None = None
        self._folders: list[Path] = []
        self._is_closed = False
        self._reports = self._new_folder()
        try:
            self._free_for("weights")  # SGLang takes a share of what is free
            self._traits = self._together(lambda: self._start(source))
            self._media = self._media_of(self._traits.model_path)
        except Exception:
            self.close()
            raise
        self.max_model_len = self._traits.max_model_len

    # ---- Start and end -----------------------------------------------------------------------------------------

    def _start(self, source: PreTrainedModel) -> _Traits:
        size, is_cpu = self._group.size, self._device.type == "cpu"
        _require_one_machine(size)
        if not is_installed("sglang"):
            raise ValueError("--engine sglang needs the package sglang, in an environment with the torch that it pins.")
        environment = environment_for_start(os.environ, is_cpu=is_cpu, tp_size=size)
        with kept_state(environment):  # importing it has side effects, too
            from sglang.srt.server_args import ServerArgs
        if is_cpu:
            _require_cpu_platform()
        scratch = self._new_folder()
        arguments = server_arguments(
            self._options,
            model_path=model_folder(source, None, scratch),
            context_length=getattr(self._skeleton.config.get_text_config(), "max_position_embeddings", None),
            is_cpu=is_cpu,
            gpu=self._device.index or 0,
            tp_size=size,
            random_seed=engine_seed(self._options.seed, self._group.comm.rank, size),
            nccl_port=free_port(),
            known=ServerArgs.__struct_fields__,
        )
        arguments = {**self._defaults(), **arguments, "custom_weight_loader": [self.loader]}
        self._process = SGLangProcess(arguments, environment)
        self._samples = SampleTasks(
            self._process,
            eos_ids=self._eos_ids,
            vocab_size=self.vocab_size,
            is_deterministic=bool(arguments.get("enable_deterministic_inference")),
            asked_for=self._asked_for,
        )
        length = self._process.manager.context_len - SPARE_PLACES
        return _Traits(
            model_path=arguments["model_path"],
            is_real_model=arguments["model_path"] != str(scratch),
            max_model_len=min(length, self._process.max_total_tokens - SPARE_PLACES),
        )

    def _defaults(self) -> dict[str, Any]:
        """Returns default arguments of SGLang, which --engine_args may override."""
        return {}

    def _asked_for(self, params: SamplingParams) -> Mapping[str, Any]:
        """Returns the arguments of a request that only this kind of engine gives."""
        return {}

    def _new_folder(self) -> Path:
        self._folders.append(Path(tempfile.mkdtemp(prefix="lightrl-sglang-")))
        return self._folders[-1]

    def _media_of(self, model_path: str) -> MediaProcessor | None:
        """Returns the model's processor; None for a text model or one that was made only from a config."""
        if self._skeleton.config.model_type not in FAMILIES or not self._traits.is_real_model:
            return None
        media = MediaProcessor.load(model_path, trust_remote_code=self._options.trust_remote_code)
        if media is not None:
            self.image_token_id, self.video_token_id = media.image_token_id, media.video_token_id
        return media

    def close(self) -> None:
        """Ends SGLang's processes and removes the folders."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._process is not None:
            self._process.close()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        self._left.clear()

    # ---- Ranks -------------------------------------------------------------------------------------------------

    @property
    def _is_owner(self) -> bool:
        return self._group.rank == 0

    @property
    def _owned(self) -> SGLangProcess:
        assert self._process is not None
        return self._process

    @property
    def _tasks(self) -> SampleTasks:
        assert self._samples is not None
        return self._samples

    def _together(self, work: Callable[[], T]) -> T:
        """Runs work on the owner; returns its result, or raises its error, on every rank of the group."""
        outcome: T | _Failure | None = None
        error: Exception | None = None
        if self._is_owner:
            try:
                outcome = work()
            except Exception as raised:
                error = raised
                outcome = _Failure(type(raised).__name__, str(raised))
        outcome = self._group.broadcast(outcome)
        if error is not None:
            raise error
        if isinstance(outcome, _Failure):
            raise _KNOWN_ERRORS.get(outcome.kind, RuntimeError)(outcome.message)
        return outcome  # type: ignore[return-value]

    def _require_open(self, action: str) -> None:
        if self._is_closed:
            raise RuntimeError(f"{action}() on a closed engine: make a new one.")

    # ---- Requests ----------------------------------------------------------------------------------------------

    def submit(self, prompt: AnyPrompt, params: SamplingParams) -> int:
        """Queues a request, which every rank of the group checks in the same way."""
        self._require_open("submit")
        if self._released:
            raise RuntimeError(f"submit() while the engine's {', '.join(sorted(self._released))} sleep: wake() first.")
        asked = as_prompt(prompt)
        ids = self._expanded(asked)
        if is_cut(params):
            self._check_cut(params)
        if params.min_new_tokens or params.has_penalties:
            raise ValueError(
                "SGLang needs a tokenizer of its own for min_new_tokens, and here it has none; its penalties count a "
                "token one step late (0.5.23). Use --engine native or vllm for these."
            )
        request_id = self._next_request_id
        self._next_request_id += 1
        self._left[request_id] = params.n
        if self._is_owner:
            features = None if self._media is None else media_features(self._media, asked)
            indices = range(params.first_sample, params.first_sample + params.n)
            self._tasks.add([Sample(request_id, index, ids, params, features) for index in indices])
        return request_id

    def num_prompt_tokens(self, prompt: EnginePrompt) -> int:
        """Returns the prompt's length, counting the tokens that its images become."""
        return len(self._expanded(prompt))

    def _expanded(self, prompt: EnginePrompt) -> tuple[int, ...]:
        if self._media is None:
            return prompt.token_ids
        image_sizes = [(image.height, image.width) for image in prompt.images]
        return self._media.expanded(prompt.token_ids, image_sizes, [video.shape[:3] for video in prompt.videos])

    def _check_cut(self, params: SamplingParams) -> None:
        """Raises ValueError if SGLang cannot give logprobs of the distribution that is sampled."""
        if (params.top_k or self.vocab_size) > _MOST_CUT_TOKENS:
            raise ValueError(
                f"SGLang gives logprobs of at most {_MOST_CUT_TOKENS} tokens that top_p or top_k leave: with top_p "
                f"{params.top_p} give a top_k from 1 to that, not {params.top_k}."
            )

    def has_unfinished(self) -> bool:
        """Returns whether any sample is waiting or running."""
        return bool(self._left)

    def step(self) -> list[Completion]:
        """Starts waiting samples and returns finished ones; waits a moment for the first."""
        self._require_open("step")
        if not self._left:
            return []
        done = self._together(lambda: self._tasks.step())
        for item in done:
            self._left[item.request_id] -= 1
            if not self._left[item.request_id]:
                del self._left[item.request_id]
        return done

    def abort(self, request_ids: Iterable[int] | None = None) -> list[Completion]:
        """Stops the requests; a sample that has ended meanwhile keeps its own reason."""
        self._require_open("abort")
        chosen = set(self._left) if request_ids is None else set(request_ids) & set(self._left)
        if not chosen:
            return []
        for request_id in chosen:
            del self._left[request_id]
        return self._together(lambda: self._tasks.abort(chosen))

    # ---- Weights -----------------------------------------------------------------------------------------------

    def load_weights(self, weights: NamedTensors, version: int) -> None:
        """Sends the weights in buckets; unfinished requests pause meanwhile and keep their keys and values."""
        self._require_loadable()
        account = WeightAccount.of_model(self._skeleton)
        fitting = ((name, tensor) for name, tensor in weights if account.accept(name, tensor))
        problems = self._send(checkpoint_pairs(self._skeleton, fitting), version, source=fitting)
        self._finish_load(account.problems() + problems, version)

    def _require_loadable(self) -> None:
        self._require_open("load_weights")
        if "weights" in self._released:
            raise RuntimeError("load_weights() after sleep(2): call wake('weights') first.")

    def _finish_load(self, problems: list[str], version: int) -> None:
        raise_problems(problems, f"Weight sync to version {version}")
        if self._samples is not None:
            self._samples.version = version

    def _send(self, pairs: NamedTensors, version: int, *, source: NamedTensors = ()) -> list[str]:
        """Sends pairs and returns the problems on every rank."""
        sender = WeightSender(self._route(), version, is_busy=bool(self._left))
        try:
            for name, tensor in pairs:
                sender.add(name, tensor)
        finally:
            for _ in source:  # consumed to the end in any case, as the tensors may come from collectives
                pass
            problems = sender.finish()
        return problems

    def _route(self) -> Route:
        return Route(
            process=self._process,
            group=self._group,
            device=self._device,
            loader=self.loader,
            reports=self._reports,
            max_bytes=int(self._options.sync_bucket_mb * 2**20),
        )

    # ---- Memory ------------------------------------------------------------------------------------------------

    def sleep(self, level: int = 1) -> int:
        """Releases the KV cache and, with level 2, the weights; returns the bytes that the devices got back."""
        self._require_open("sleep")
        if self._left:
            raise RuntimeError(
                f"sleep() with {len(self._left)} requests unfinished: step() until has_unfinished() is False, or "
                "abort(), first."
            )
        parts: list[EnginePart] = ["kv_cache", "weights"] if level == 2 or self._has_backup else ["kv_cache"]
        return sum(self._group.gather(sum(map(self._release_part, parts))))

    def _release_part(self, part: EnginePart) -> int:
        """Releases a part unless it sleeps; returns the bytes that this rank's device got back."""
        tags = [tag for tag in _TAGS[part] if tag not in self._released]
        if not tags:
            return 0
        before = self._free_bytes()
        self._together(lambda: self._release(tags))
        self._released.update(tags)
        self._freed[part] = self._freed_since(before)
        return self._freed[part]

    def _freed_since(self, before: int) -> int:
        """Returns the bytes that this rank's device got back; waits for them, as only the first scheduler answers."""
        of_first, give_up = self._group.broadcast(self._free_bytes() - before), time.monotonic() + _RELEASE_TIMEOUT_S
        while (freed := self._free_bytes() - before) < 0.8 * of_first and time.monotonic() < give_up:
            time.sleep(0.01)  # 0.8: what is not split evenly may differ
        return max(0, freed)

    @property
    def _has_backup(self) -> bool:
        """Whether released weights move to host memory, from where they return unchanged."""
        return bool(engine_arguments(self._options).get("enable_weights_cpu_backup"))

    def _release(self, tags: list[str]) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        if not self._released:
            self._owned.run(self._become_idle())
        self._owned.run(self._owned.manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=tags), None))

    async def _become_idle(self) -> None:
        """Waits until schedulers are idle: one that still cleans up after a request would fail an assertion and end."""
        give_up = time.monotonic() + _IDLE_TIMEOUT_S
        while not (result := await self._owned.manager.flush_cache()).success:
            if time.monotonic() > give_up:
                raise RuntimeError(f"SGLang did not become idle: {result.message}")
            await asyncio.sleep(0.01)

    def wake(self, part: EnginePart) -> None:
        """Resumes what is asleep of the part and nothing else, which would end SGLang's scheduler."""
        self._require_open("wake")
        tags = sorted(self._released.intersection(_TAGS[part]))
        if tags:
            self._free_for(part)
            self._together(lambda: self._resume(tags))
            self._released -= set(tags)

    def _free_for(self, part: EnginePart) -> None:
        """Gives back what the ranks have cached; raises OutOfMemoryError on every rank if the part still does not fit.

        SGLang's processes cannot use what others have cached, and end if a part that they resume does not fit.
        """
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()
        missing = max(self._group.gather(self._freed.get(part, 0) - self._free_bytes()))
        if missing > 0:
            raise torch.OutOfMemoryError(f"{missing / 2**30:.2f} GiB more would have to be free on a device")

    def _resume(self, tags: list[str]) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        self._owned.run(self._owned.manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags), None))

    def _free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0] if self._device.type == "cuda" else 0


def _require_one_machine(size: int) -> None:
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", str(size)))
    if local_rank + size > local_size:
        raise ValueError(
            f"--engine_tp_size {size} would spread an SGLang engine over machines of {local_size} ranks. Choose one "
            f"that divides {local_size}."
        )


def _require_cpu_platform() -> None:
    from sglang.srt.platforms import current_platform

    if not current_platform.is_out_of_tree():
        raise ValueError(
            "SGLang's package runs on GPUs only. On a CPU it needs a platform plugin; tests/sglang_cpu of lightrl's "
            "repository is one. Or use --engine native."
        )
