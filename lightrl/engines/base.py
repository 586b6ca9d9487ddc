"""InferenceEngine: the interface of an engine; the rest of lightrl does not know which engine is behind it.

Engines are chosen by name, module or file (create_engine). The functions at the end read from the trainer's model what
an engine needs: its end tokens, its architecture and the folder that it came from.
"""

from __future__ import annotations

import inspect
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal, TypeAlias, TypeVar, cast

import numpy as np
import torch
from huggingface_hub import try_to_load_from_cache
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightrl.comm import Comm, found_world
from lightrl.config.adapters import POLICY
from lightrl.imports import load_object, place_of
from lightrl.records import FinishReason

T = TypeVar("T")
NamedTensors: TypeAlias = Iterable[tuple[str, torch.Tensor]]  # whole tensors under their Hugging Face names
BUILTIN_ENGINES = {
    "native": "lightrl.engines.native.engine:build_native_engine",
    "vllm": "lightrl.engines.vllm.build:build_vllm_engine",
    "sglang": "lightrl.engines.sglang.engine:build_sglang_engine",
}
RECORDING_ENGINES = {  # replace those if --routing.replay asks for the experts that an engine chose
    "native": "lightrl.engines.native.recording:build_recording_engine",
    "vllm": "lightrl.engines.vllm.recording:build_recording_engine",
}
_PARTS = ("source", "tokenizer", "options", "device", "group")  # what a factory is called with
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
EnginePart = Literal["weights", "kv_cache"]  # the parts wake up separately
_CHANGING = (  # settings with which tokens are drawn from another distribution than a trainer computes
    "adapter",
    "top_p",
    "top_k",
    "min_new_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


class WeightSyncError(ValueError):
    """Raised when the engine does not hold the trainer's weights; the message names the parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePrompt:
    """The input of one request."""

    token_ids: tuple[int, ...]  # ONE placeholder per image or video, however many tokens it becomes in the model
    images: tuple[Any, ...] = ()  # PIL images, in the order of their placeholders
    videos: tuple[Any, ...] = ()  # uint8 arrays [frames, height, width, 3]
    kept: Any = field(default=None, compare=False, repr=False)  # Completion.kept of the sample that is continued


AnyPrompt = EnginePrompt | Sequence[int]


def as_prompt(prompt: AnyPrompt) -> EnginePrompt:
    """Returns an EnginePrompt for plain token ids; returns an EnginePrompt unchanged."""
    if isinstance(prompt, EnginePrompt):
        return prompt
    return EnginePrompt(token_ids=tuple(int(token) for token in prompt))


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """The consecutive ranks that drive one engine together (tensor parallelism); a group of one by default."""

    comm: Comm = field(default_factory=found_world)
    handle: Any = None  # gloo process group, None for one rank
    size: int = 1

    @classmethod
    def shared(cls, comm: Comm, size: int) -> EngineGroup:
        """Returns this rank's group of `size` ranks that drive one engine by tensor parallelism; a collective."""
        if size < 1 or comm.world % size:
            valid = ", ".join(str(n) for n in range(1, comm.world + 1) if comm.world % n == 0)
            raise ValueError(f"--engine_tp_size {size} does not divide {comm.world} ranks. Valid: {valid}.")
        return cls(comm, comm.new_groups(size), size)

    @property
    def rank(self) -> int:
        """This rank's index within the group."""
        return self.comm.rank % self.size

    def broadcast(self, item: T) -> T:
        """Returns the first rank's item on every rank of the group."""
        return self.gather(item if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def gather(self, item: T) -> list[T]:
        """Returns every rank's item, in rank order."""
        return [item] if self.size == 1 else self.comm.all_gather_object(item, self.handle)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling settings of one request. The draw of token t of sample i depends only on (seed, i, t).

    Without a seed, gather_and_generate and engine_generate_local draw anew at each call; an engine takes None as 0.
    """

    max_new_tokens: int = 16
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    n: int = 1  # samples for the prompt
    seed: int | None = None
    first_sample: int = 0  # index i of the first of the n samples
    first_token: int = 0  # index t of the first draw: above 0 if a stopped sample is continued
    stop_token_ids: tuple[int, ...] = ()  # in addition to the model's own end tokens
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()  # texts that end a sample, with the token that completes one
    min_new_tokens: int = 0  # no end token may come before, and no stop string counts before
    presence_penalty: float = 0.0  # subtracted from the logit of every token that was generated before
    frequency_penalty: float = 0.0  # subtracted once for each time that it was
    repetition_penalty: float = (
        1.0  # divides a positive logit of a token of prompt or response, multiplies a negative one
    )
    adapter: str = POLICY  # the LoRA adapter to use: the trained one, BASE for none, or a name of --lora.others

    def __post_init__(self) -> None:
        in_range = min(self.max_new_tokens, self.n) >= 1 and min(self.temperature, self.top_k, self.min_new_tokens) >= 0
        if not in_range or not 0 < self.top_p <= 1 or self.repetition_penalty <= 0:
            self._refuse()

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits of later ones."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def is_trainable(self) -> bool:
        """Whether a trainer, which knows only the policy and the temperature, computes the same logprobs."""
        return not self._changes()

    def require_trainable(self, *, reports_allowed: bool = False) -> None:
        """Raises ValueError for settings with which a trainer would compute different logprobs.

        reports_allowed: the engine reports the tokens that top-p and top-k left, so a trainer can follow these two.
        """
        if changes := self._changes(skipped=("top_p", "top_k") if reports_allowed else ()):
            raise _not_trainable(changes)

    def _changes(self, skipped: Collection[str] = ()) -> list[str]:
        """Returns, as name=value, the settings that make the distribution differ from the policy's at a temperature."""
        names = [name for name in _CHANGING if name not in skipped]
        fields = type(self).__dataclass_fields__
        return [f"{name}={getattr(self, name)}" for name in names if getattr(self, name) != fields[name].default]

    def _refuse(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}: it must be at least 1.")
        if not self.temperature >= 0:  # nor a NaN
            raise ValueError(f"temperature is {self.temperature}: it must be 0 (greedy) or above.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: it must be above 0 and at most 1.")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}: it must be 0 (off) or above.")
        if self.min_new_tokens < 0:
            raise ValueError(f"min_new_tokens is {self.min_new_tokens}: it must be 0 or above.")
        if self.repetition_penalty <= 0:
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}: it must be above 0; 1 is off.")
        raise ValueError(f"n is {self.n}: it must be at least 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished (or aborted) sample of a request."""

    request_id: int
    sample_index: int
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]  # the end token included, when it stopped by one
    logprobs: tuple[float, ...]  # of the distribution that was sampled: after temperature, top-k and top-p
    versions: tuple[int, ...]  # weight version that produced each token
    finish_reason: FinishReason
    routing: NDArray[np.int16] | None = field(default=None, compare=False, repr=False)  # as Sample.routing
    allowed: NDArray[np.int32] | None = field(default=None, compare=False, repr=False)  # as Sample.allowed
    kept: Any = field(default=None, compare=False, repr=False)  # what else an engine needs to continue the sample


class InferenceEngine(ABC):
    """An engine that lives in the trainer's processes. The caller guards its state (see colocated.py).

    Every rank of the engine's group calls each method at the same point with the same arguments and gets the same
    result, whether its engine runs on every rank or only on the first.
    """

    max_model_len: int  # prompt and new tokens together
    vocab_size: int
    image_token_id: int | None = None  # placeholder of an image in a prompt; None: no images
    video_token_id: int | None = None
    sleep_levels: tuple[int, ...] = (1,)  # 1 frees the KV cache (and may move weights away), 2 drops the weights too
    returns_routing = False  # True: completions of a mixture of experts include the chosen experts
    reports_allowed = False  # True: completions include the tokens that top-p and top-k left
    adapters: tuple[str, ...] = (POLICY,)  # names that a request may ask for
    wake_hint: str = ""  # the option to lower if there is no memory to wake up

    @abstractmethod
    def submit(self, prompt: AnyPrompt, params: SamplingParams) -> int:
        """Queues a request and returns its id; ids count up from 0 in the order of submission."""

    @abstractmethod
    def step(self) -> list[Completion]:
        """Runs one scheduling step and returns the samples that it finished."""

    @abstractmethod
    def has_unfinished(self) -> bool:
        """Returns whether any submitted sample is still waiting or running."""

    @abstractmethod
    def abort(self, request_ids: Iterable[int] | None = None) -> list[Completion]:
        """Stops the requests (None: all); returns each unfinished sample so far, with the reason "abort"."""

    @abstractmethod
    def load_weights(self, weights: NamedTensors, version: int) -> None:
        """Consumes all (HF name, full tensor) pairs, loads them, and drops all caches of older weights.

        Raises WeightSyncError that names any parameter that is missing, unknown, misshapen, or not held afterwards as
        it was given. Unfinished requests go on with the keys and values that they have.
        """

    @abstractmethod
    def sleep(self, level: int = 1) -> int:
        """Frees memory; returns the bytes freed. No request may run. After level 2, weights must be loaded again."""

    @abstractmethod
    def wake(self, part: EnginePart) -> None:
        """Takes back the memory of a part: "weights" first, "kv_cache" after the weights were loaded."""

    @abstractmethod
    def close(self) -> None:
        """Frees everything; the engine cannot be used afterwards."""

    def num_prompt_tokens(self, prompt: EnginePrompt) -> int:
        """Returns the prompt's length in the context, which exceeds its ids if an image becomes several tokens."""
        return len(prompt.token_ids)

    def generate(self, prompts: Sequence[AnyPrompt], params: Sequence[SamplingParams]) -> list[Completion]:
        """Runs all prompts to completion; returns a flat list of n completions per prompt, in order."""
        order = {self.submit(prompt, param): i for i, (prompt, param) in enumerate(zip(prompts, params, strict=True))}
        done: list[Completion] = []
        while self.has_unfinished():
            done.extend(self.step())
        return sorted(done, key=lambda item: (order[item.request_id], item.sample_index))


def _not_trainable(given: Sequence[str]) -> ValueError:
    if given[0].startswith("adapter="):
        return ValueError(
            f"{given[0]}: a run trains the policy, and tokens that another adapter generated are not the policy's. Use "
            "them as those of an opponent or a judge, or for a comparison, and leave the adapter out where they are "
            "trained on."
        )
    return ValueError(
        f"{', '.join(given)}: a trainer computes logprobs at the temperature alone, so tokens that were drawn from "
        "another distribution cannot be trained on. Leave these out, or use them for evaluation only."
    )


Factory: TypeAlias = str | Callable[..., InferenceEngine]  # a name, a path to a class or factory, or a factory


def check_engine_name(name: str) -> None:
    """Raises ValueError unless this is a built-in name, which is not imported, or a path that can be imported."""
    if name not in BUILTIN_ENGINES:
        _own_factory(name)


def create_engine(
    name: Factory, *, source: Any, tokenizer: Any, options: Any, device: torch.device, group: EngineGroup | None = None
) -> InferenceEngine:
    """Creates an engine by calling its class or factory, which must return an InferenceEngine.

    Args:
        name: a built-in name, package.module:NAME or path/to/file.py:NAME of a class or factory, or a factory.
        source: the trainer's unwrapped model.
        group: the ranks that drive the engine together; None means this rank alone.
    """
    builtin = BUILTIN_ENGINES.get(name) if isinstance(name, str) else None
    factory = _own_factory(name) if builtin is None else resolve_name(builtin)
    engine = factory(source=source, tokenizer=tokenizer, options=options, device=device, group=group or EngineGroup())
    if not isinstance(engine, InferenceEngine):
        raise ValueError(f"Engine {name!r} made a {type(engine).__name__}, which is not a lightrl InferenceEngine.")
    return engine


def no_actor(engine: str) -> ValueError:
    """Returns the error about a built-in engine that is made without a model."""
    return ValueError(
        f"The {engine} engine needs the actor: setup_inference_engine(args, '{engine}', actor=actor). If an "
        "actor was given, the strategy's unwrap_model() returned None: it must return the model."
    )


def _own_factory(name: Factory) -> Callable[..., InferenceEngine]:
    """Returns a user's factory or class; raises ValueError for a class that cannot be an engine."""
    factory = name if callable(name) else load_object(name, builtin=BUILTIN_ENGINES, what="engine", example="MyEngine")
    if isinstance(factory, type):
        _check_class(str(name), factory)
    _check_call(str(name), factory)

    def made(**parts: Any) -> InferenceEngine:
        engine = factory(**parts)
        found = {item: getattr(engine, item, None) for item in ("max_model_len", "vocab_size")}
        wrong = [f"{item} {value!r}" for item, value in found.items() if not isinstance(value, Integral)]
        if isinstance(engine, InferenceEngine) and wrong:
            raise ValueError(f"Engine {name!r} has {' and '.join(wrong)}. Set it to a number of tokens in __init__().")
        return cast(InferenceEngine, engine)

    return made


def _check_call(name: str, factory: Any) -> None:
    """Raises ValueError for a factory that does not take the arguments of create_engine."""
    try:
        inspect.signature(factory).bind(**dict.fromkeys(_PARTS))
    except TypeError as error:
        called = ", ".join(f"{part}=..." for part in _PARTS)
        where = place_of(inspect.getattr_static(factory, "__init__") if isinstance(factory, type) else factory)
        raise ValueError(f"Engine {name!r} cannot be called with ({called}): {error}{where}.") from None
    except ValueError:  # compiled ones may have no signature
        return


def create_recording_engine(name: Factory, **parts: Any) -> InferenceEngine:
    """Creates an engine that returns the experts it chose; takes the arguments of create_engine."""
    engine = create_engine(RECORDING_ENGINES.get(name, name) if isinstance(name, str) else name, **parts)
    if not engine.returns_routing:
        engine.close()
        raise ValueError(
            f"--routing.replay True needs an engine that returns the experts that it chose, and {name!r} does not. Use "
            f"--engine {' or '.join(RECORDING_ENGINES)}, or leave the option out."
        )
    return engine


def _check_class(name: str, engine_class: type) -> None:
    missing = sorted(getattr(engine_class, "__abstractmethods__", ()))
    if missing:
        raise ValueError(f"Engine {name!r} does not implement {', '.join(missing)}.")
    if not issubclass(engine_class, InferenceEngine):
        raise ValueError(f"Engine {name!r} is no subclass of lightrl.InferenceEngine.")


# ---- What an engine reads from the trainer's model


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> tuple[int, ...]:
    """Returns the end tokens that generation config, model config and tokenizer name, in ascending order."""
    ids: set[int] = set()
    for source in (model.generation_config, model.config, model.config.get_text_config(), tokenizer):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            ids.update([value] if isinstance(value, int) else _several(value, source))
    return tuple(sorted(ids))


def _several(value: Any, source: object) -> list[int]:
    if isinstance(value, list | tuple) and all(type(token) is int for token in value):
        return list(value)
    raise ValueError(
        f"eos_token_id in the model's {type(source).__name__} is {value!r}. It must be a token id or a list of them: "
        "correct generation_config.json, or the file that states it. The tokenizer has the id of a token's text."
    )


def outside_vocabulary(ends: Sequence[int], vocab_size: int) -> ValueError:
    """Returns the error about end tokens that the model does not have."""
    return ValueError(
        f"End tokens {ends} are outside the model's vocabulary of {vocab_size}. They are eos_token_id in its "
        "generation_config.json or config.json, or the tokenizer's eos_token: correct the file that names them, or "
        "use the tokenizer that belongs to the model."
    )


def skeleton(source: PreTrainedModel) -> PreTrainedModel:
    """Returns the source's architecture without memory for weights; the source itself may be sharded or wrapped."""
    plain = next(kind for kind in type(source).__mro__ if not kind.__name__.startswith("FSDP"))
    config = type(source.config).from_dict(source.config.to_dict())
    with torch.device("meta"):
        model: PreTrainedModel = plain(config)
    model.tie_weights()
    return model


def architecture_of(source: PreTrainedModel) -> str:
    """Returns the name of the model's class, even after FSDP has put a class of its own in front."""
    classes = [kind for kind in type(source).__mro__ if issubclass(kind, PreTrainedModel)]
    return next(kind.__name__ for kind in classes if not hasattr(kind, "unshard"))


def _is_text_part(source: PreTrainedModel, name: str) -> bool:
    """Returns whether the model is only the language model of what the folder describes, as Qwen3.5's is."""
    local = Path(name) / "config.json"
    file = local if local.is_file() else try_to_load_from_cache(name, "config.json")
    whole = json.loads(Path(file).read_bytes()) if isinstance(file, str | Path) else {}
    return (whole.get("text_config") or {}).get("model_type") == source.config.model_type


def model_folder(source: PreTrainedModel, processor: Any, scratch: Path) -> str:
    """Returns the folder or hub name that the model came from, or else `scratch` with the model's config in it."""
    name = str(source.name_or_path or "")
    is_local = bool(name) and (Path(name) / "config.json").is_file()
    is_hub = _HUB_NAME.fullmatch(name) and not Path(name).exists() and not name.startswith(".")
    if (is_local or is_hub) and not _is_text_part(source, name):
        return name
    config = type(source.config).from_dict(source.config.to_dict())
    config.architectures = [architecture_of(source)]
    config.save_pretrained(scratch)
    if hasattr(processor, "image_processor"):
        processor.save_pretrained(scratch)
    return str(scratch)
