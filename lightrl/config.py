"""Every knob, once. The dataclasses are the flags, the --help, the YAML keys and the file saved with the run.

Imports no torch: a mistake on the command line is told before anything slow is loaded.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import yaml

logger = logging.getLogger(__name__)

BUILTIN_MODEL = "builtin:addition"


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay; vectors (norms, biases) are never decayed."""
    max_norm: float = 1.0
    """Clip the global gradient norm to this; 0 never clips."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up. Its unit is the optimizer step, of which a run has max_steps x num_epochs x
    num_minibatches."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up from lr / warmup_steps to lr."""
    warmup_ratio: float = 0.0
    """The same as a share of all optimizer steps; used when warmup_steps is 0."""
    min_lr_ratio: float = 0.0
    """The schedule ends at lr times this."""


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig:
    advantage: str = "grpo"
    """From a sample's reward to its advantage: grpo, dr_grpo, rloo, reinforce, reinforce_plus_plus,
    reinforce_plus_plus_baseline, remax, opo, gpg, cpgd, pass_at_k, or your own as package.module:function."""
    advantage_args: tuple[str, ...] = ()
    """Its parameters as name=value, such as normalize_std=false of grpo; docs/algorithms.md has all."""
    loss: str = "ppo_clip"
    """The policy loss: ppo_clip, policy_gradient, gspo, gspo_token, gmpo, cispo, sapo, cpgd, dppo_tv, dppo_kl, or your
    own."""
    loss_args: tuple[str, ...] = ()
    """Its parameters, such as clip_low=0.2 clip_high=0.28 of ppo_clip."""
    aggregation: str = "token_mean"
    """Which mean over tokens and sequences: token_mean, sequence_mean, sequence_mean_token_sum,
    sequence_mean_token_sum_norm, or your own. The denominator is that of all ranks and micro-batches in each."""
    aggregation_args: tuple[str, ...] = ()
    """Its parameters, such as length=1024 of sequence_mean_token_sum_norm."""
    correction: str = "none"
    """Weighs tokens by the trainer's probability over the engine's: none, tis, mis, icepop, reject, or your own."""
    correction_args: tuple[str, ...] = ()
    """Its parameters, such as cap=2 of tis."""
    kl_coef: float = 0.0
    """Weight of the KL penalty to the frozen starting model in the loss; 0 loads no reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL per token (Schulman 2020)."""
    kl_gradient: Literal["own", "kl"] = "own"
    """Its gradient: that of the estimator, or that of the KL itself."""
    old_logprobs: Literal["recompute", "engine"] = "recompute"
    """Where the ratio's denominator comes from: the trainer's own forward before the update, or what the engine
    reported."""


@dataclass(kw_only=True, slots=True)
class FSDPConfig:
    reshard_after_forward: bool = True
    """Free the gathered weights of a block after its forward and gather them again for the backward (ZeRO-3); False
    keeps them (ZeRO-2)."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer states in host memory."""
    replicate_size: int = 1
    """Hybrid sharding: this many replicas, each sharded over world / replicate_size ranks."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Gradients are summed over the ranks in this type."""


@dataclass(kw_only=True, slots=True)
class DeepSpeedConfig:
    zero_stage: Literal[0, 1, 2, 3] = 2
    """What is sharded over the ranks: 0 nothing, 1 the optimizer states, 2 the gradients too, 3 the parameters too."""
    offload_optimizer: bool = False
    """Keep the optimizer states in host memory and step there; stages 1 to 3."""
    offload_param: bool = False
    """Keep the parameters in host memory between their uses; stage 3."""
    cpu_adam: bool = False
    """DeepSpeed's Adam for host memory in place of torch's; it is compiled at first use, which takes minutes."""
    bucket_mb: int = 128
    """Gradients reduced, and parameters gathered after a step, at a time."""
    param_persistence_threshold: int = 100_000
    """At stage 3 a parameter of fewer elements stays whole on every rank."""


def check_deepspeed(config: DeepSpeedConfig) -> None:
    """What cannot be honoured together."""
    stage = config.zero_stage
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"--deepspeed.zero_stage {stage}: choose one of 0, 1, 2, 3.")
    if config.offload_param and stage != 3:
        raise ValueError(f"--deepspeed.offload_param needs --deepspeed.zero_stage 3, not {stage}: only it shards them.")
    if config.offload_optimizer and stage == 0:
        raise ValueError("--deepspeed.offload_optimizer needs --deepspeed.zero_stage 1, 2 or 3.")
    if config.bucket_mb < 1 or config.param_persistence_threshold < 0:
        raise ValueError(
            f"--deepspeed.bucket_mb {config.bucket_mb} must be at least 1, and --deepspeed.param_persistence_threshold "
            f"{config.param_persistence_threshold} at least 0."
        )


@dataclass(kw_only=True, slots=True)
class NativeEngineConfig:
    max_num_seqs: int = 256
    """Sequences decoded at the same time on a rank; more requests wait their turn."""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    prompt_field: str = "prompt"
    """Field of a line that holds the prompt: a string, or a list of chat messages. A field "messages" is read when
    this one is absent."""
    answer_field: str = "answer"
    """Field that the reward compares with."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """Render string prompts through the tokenizer's chat template: when it has one, always, or never."""
    image_field: str = "images"
    """Field with the path of an image or a list of them, relative to the data file; empty reads none."""
    video_field: str = "videos"
    """The same for videos: .npy arrays [frames, height, width, 3] of uint8, or animated .gif or .webp files."""


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    every: int = 20
    """Steps between evaluations; also before the first step and after the last. 0 never evaluates."""
    temperature: float = 1.0
    """Sampling temperature of the evaluation; 0 is greedy."""
    max_prompts: int = 0
    """Evaluate on the first so many prompts only; 0 takes all."""


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    every: int = 50
    """Steps between checkpoints; also after the last step. 0 saves none."""
    keep: int = 2
    """Newest checkpoints that are kept."""


@dataclass(kw_only=True, slots=True)
class LogConfig:
    samples_per_step: int = 4
    """Samples written to samples.jsonl at each step."""
    tensorboard: bool = True
    """Write TensorBoard files beside metrics.jsonl."""


@dataclass(kw_only=True, slots=True)
class DistributedConfig:
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model lives; auto takes a GPU if there is one."""
    deterministic: bool = False
    """Only kernels that give the same bits every time; slower on a GPU, and an operation that has none is an error."""
    timeout_s: float = 1800.0
    """A rank that waits longer than this for another stops the run and says where both were."""


@dataclass(kw_only=True, slots=True)
class GRPOConfig:
    """Train a language model by GRPO."""

    config: str = ""
    """YAML file with any of these options; the flags on the command line win over it."""
    model: str = BUILTIN_MODEL
    """Hugging Face folder or name; builtin:addition is a small model that is made on the spot."""
    strategy: str = "auto"
    """How the model is spread: single, ddp, fsdp, deepspeed, or your own class as package.module:MyStrategy. auto is
    single in one process, else fsdp."""
    engine: str = "native"
    """What generates: native, vllm, sglang, or your own class as package.module:MyEngine."""
    engine_tp_size: int = 1
    """Consecutive ranks that share one engine by tensor parallelism."""
    engine_mem_fraction: float = 0.4
    """Share of a GPU's memory for the engine's weights and KV cache while it is awake (vllm, sglang)."""
    engine_args: tuple[str, ...] = ()
    """More of the engine's own arguments as name=value, for vllm those of LLM(), for sglang those of Engine()."""
    engine_sleep_level: Literal[1, 2] = 1
    """What the engine gives up while the model trains: 1 the KV cache (vllm moves its weights to host memory), 2 the
    weights too, which the next weight sync brings back."""
    sync_bucket_mb: int = 512
    """Whole weights that a weight sync holds at a time, beyond those of trainer and engine."""
    canary_every: int = 50
    """Weight syncs between comparisons of a few logprobs, engine against trainer; the first sync is always compared.
    0 never compares."""
    train_data: str = BUILTIN_MODEL
    """A .jsonl or .parquet file, hf:NAME[:SPLIT] or a data set's folder, or builtin:addition."""
    eval_data: str = ""
    """The same for evaluation; empty evaluates on builtin:addition's held-out problems if that is trained on, else
    not at all."""
    reward: str = "exact_match"
    """A built-in reward, or your own function as package.module:function or path/to/file.py:function."""
    seed: int = 0
    """Every draw of the run hangs on this, the step, the prompt and the sample; never on the rank."""
    max_steps: int = 200
    """Steps; one step rolls out num_prompts prompts and learns from them."""
    output_dir: str = ""
    """The run's folder; empty makes a new one under runs/."""
    resume: str = "auto"
    """auto continues the newest complete checkpoint of output_dir if there is one, never refuses a used folder,
    PATH continues that checkpoint."""
    num_prompts: int = 16
    """Prompts per step, over all ranks."""
    group_size: int = 16
    """Samples per prompt."""
    num_minibatches: int = 1
    """Optimizer steps per pass over a step's samples; the prompts are split evenly among them."""
    num_epochs: int = 1
    """Passes over a step's samples."""
    micro_batch_size: int = 0
    """Samples per forward and backward on a rank; 0 leaves it to max_tokens_per_microbatch. It changes memory and
    speed, never the result."""
    max_tokens_per_microbatch: int = 16384
    """Prompt and response tokens per forward and backward on a rank."""
    max_new_tokens: int = 8
    """Longest response in tokens."""
    temperature: float = 1.0
    """Sampling temperature; the training logprobs are those of the same distribution."""
    lr: float = 1e-4
    """Peak learning rate."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the computation in trainer and engine; parameters and optimizer states stay float32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward to save memory."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """Loss."""
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    """Strategy fsdp."""
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    """Strategy deepspeed."""
    native: NativeEngineConfig = field(default_factory=NativeEngineConfig)
    """Engine native."""
    data: DataConfig = field(default_factory=DataConfig)
    """Data."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints."""
    log: LogConfig = field(default_factory=LogConfig)
    """Logging."""
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    """Processes and devices."""

    def __post_init__(self) -> None:
        _check_types(self)
        _check_batches(self)
        _check_numbers(self)
        _check_ranges(self)
        check_deepspeed(self.deepspeed)

    @property
    def samples_per_step(self) -> int:
        return self.num_prompts * self.group_size

    @property
    def optimizer_steps_per_step(self) -> int:
        return self.num_epochs * self.num_minibatches


_NEED_NO_GROUP = ("reinforce", "reinforce_plus_plus", "remax")  # advantages of one sample a prompt


def describe_batches(config: GRPOConfig, world_size: int) -> str:
    """The batch arithmetic in one line, for the start of a run."""
    per_update = config.samples_per_step // config.num_minibatches
    per_rank = -(-per_update // world_size)
    if config.micro_batch_size:
        micro = f"{-(-per_rank // config.micro_batch_size)} micro-batches of <= {config.micro_batch_size} samples"
    else:
        micro = f"micro-batches of <= {config.max_tokens_per_microbatch} tokens"
    return (
        f"{config.num_prompts} prompts x {config.group_size} samples = {config.samples_per_step} samples a step; "
        f"{config.num_epochs} epoch(s) x {config.num_minibatches} mini-batch(es) = "
        f"{config.optimizer_steps_per_step} optimizer step(s) of {per_update} samples; "
        f"on each of {world_size} rank(s) about {per_rank} samples in {micro}; {config.max_steps} steps"
    )


def _check_types(config: Any, prefix: str = "") -> None:
    """What the command line's parser checks, for those who build a config in Python."""
    hints = get_type_hints(type(config))
    for item in dataclasses.fields(config):
        name, hint, value = f"{prefix}{item.name}", hints[item.name], getattr(config, item.name)
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, hint):  # type: ignore[arg-type]
                raise TypeError(f"{name} must be a {hint.__name__}, not {value!r}.")  # type: ignore[union-attr]
            _check_types(value, f"{name}.")
        elif get_origin(hint) is Literal:
            if value not in get_args(hint):
                raise ValueError(f"{name} is {value!r}: choose one of {', '.join(map(str, get_args(hint)))}.")
        elif hint in (bool, int, float, str):
            is_right = isinstance(value, int | float if hint is float else hint)
            if not is_right or (isinstance(value, bool) and hint is not bool):
                raise TypeError(f"{name} must be {hint.__name__}, not {value!r}.")


def _check_batches(config: GRPOConfig) -> None:
    for name in ("num_prompts", "num_minibatches", "num_epochs", "max_new_tokens", "max_tokens_per_microbatch"):
        if getattr(config, name) < 1:
            raise ValueError(f"--{name} is {getattr(config, name)}: it must be at least 1.")
    if config.group_size < (1 if config.algorithm.advantage in _NEED_NO_GROUP else 2):
        raise ValueError(
            f"--group_size is {config.group_size}: {config.algorithm.advantage} compares the samples of a prompt with "
            "each other and needs at least 2. Use 4 to 16."
        )
    if config.num_prompts % config.num_minibatches:
        hint = nearest_multiples(config.num_prompts, config.num_minibatches, "--num_prompts")
        raise ValueError(
            f"--num_prompts {config.num_prompts} cannot be split evenly into --num_minibatches "
            f"{config.num_minibatches}. {hint}"
        )
    if config.micro_batch_size < 0:
        raise ValueError(f"--micro_batch_size is {config.micro_batch_size}: it must be 0 (by tokens) or above.")


def nearest_multiples(value: int, divisor: int, name: str) -> str:
    """A hint with the two nearest valid values."""
    low = value // divisor * divisor
    options = [low, low + divisor] if low else [divisor]
    return f"Nearest valid {name}: {' or '.join(map(str, options))}."


def _check_numbers(config: GRPOConfig) -> None:
    for name, value in {"lr": config.lr, "temperature": config.temperature}.items():
        if not math.isfinite(value):
            raise ValueError(f"--{name} is {value}: it must be a finite number.")
    if not all(0 <= beta < 1 for beta in config.optim.betas) or not config.optim.eps > 0:
        raise ValueError(
            f"--optim.betas {config.optim.betas} and --optim.eps {config.optim.eps}: the betas must be in [0, 1) and "
            "eps above 0."
        )
    if not -(2**63) <= config.seed < 2**63:
        raise ValueError(f"--seed {config.seed}: it must fit in 64 bits.")


def _check_ranges(config: GRPOConfig) -> None:
    not_negative = {
        "max_steps": config.max_steps,
        "lr": config.lr,
        "optim.max_norm": config.optim.max_norm,
        "optim.weight_decay": config.optim.weight_decay,
        "optim.warmup_steps": config.optim.warmup_steps,
        "algorithm.kl_coef": config.algorithm.kl_coef,
        "eval.every": config.eval.every,
        "eval.temperature": config.eval.temperature,
        "eval.max_prompts": config.eval.max_prompts,
        "checkpoint.every": config.checkpoint.every,
        "log.samples_per_step": config.log.samples_per_step,
        "canary_every": config.canary_every,
    }
    for name, value in not_negative.items():
        if not value >= 0:
            raise ValueError(f"--{name} is {value}: it must be 0 or above.")
    at_least_one = {
        "engine_tp_size": config.engine_tp_size,
        "sync_bucket_mb": config.sync_bucket_mb,
        "checkpoint.keep": config.checkpoint.keep,
        "native.max_num_seqs": config.native.max_num_seqs,
        "fsdp.replicate_size": config.fsdp.replicate_size,
    }
    for name, value in at_least_one.items():
        if value < 1:
            raise ValueError(f"--{name} is {value}: it must be at least 1.")
    fractions = {
        "optim.warmup_ratio": config.optim.warmup_ratio,
        "optim.min_lr_ratio": config.optim.min_lr_ratio,
    }
    for name, value in fractions.items():
        if not 0 <= value <= 1:
            raise ValueError(f"--{name} is {value}: it must be between 0 and 1.")
    if not config.temperature > 0:
        raise ValueError(
            f"--temperature is {config.temperature}: it must be above 0, since greedy samples of a prompt are all the "
            "same and teach nothing. For a greedy evaluation use --eval.temperature 0."
        )
    if not 0 < config.engine_mem_fraction < 1:
        raise ValueError(f"--engine_mem_fraction is {config.engine_mem_fraction}: it must be between 0 and 1.")
    engine_arguments(config)
    if not 0 < config.distributed.timeout_s <= 1e7:
        raise ValueError(f"--distributed.timeout_s is {config.distributed.timeout_s}: it must be above 0, at most 1e7.")


ConfigT = TypeVar("ConfigT", bound=GRPOConfig)


def engine_arguments(config: Any) -> dict[str, Any]:
    """--engine_args as a dict."""
    return named_values(config.engine_args, "engine_args")


def named_values(items: Sequence[str], option: str) -> dict[str, Any]:
    """name=value texts as a dict; values are read as YAML, so 4, 0.5, 3e-4, true and [a, b] are what they look like."""
    found: dict[str, Any] = {}
    for item in items:
        name, separator, value = item.partition("=")
        if not separator or not name.isidentifier():
            raise ValueError(f"--{option} {item!r}: it must be name=value, without spaces around the sign.")
        if name in found:
            raise ValueError(f"--{option}: {name} is given twice.")
        found[name] = _plain_value(value)
    return found


def _plain_value(text: str) -> Any:
    """YAML 1.1 takes 3e-4 for a text, since it has no point."""
    value = yaml.safe_load(text)
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def parse_config(config_class: type[ConfigT], argv: Sequence[str] | None = None) -> ConfigT:
    """Reads flags and --config; any mistake is printed and ends the process with code 2, on every rank."""
    import tyro  # noqa: PLC0415  (kept off the import path of those who build a config in Python)

    args = list(sys.argv[1:] if argv is None else argv)
    try:
        written = _yaml_flags(config_class, _config_path(args))
        return tyro.cli(config_class, args=written + args, config=(tyro.conf.FlagConversionOff,), use_underscores=True)
    except (ValueError, OSError) as error:
        exit_with_user_error(error)


def exit_with_user_error(error: BaseException) -> NoReturn:
    tell_user_error(error)
    raise SystemExit(2) from error


def tell_user_error(error: BaseException) -> None:
    """Every rank says it, since torchrun stops the others as soon as the first one leaves."""
    rank = os.environ.get("RANK")
    where = f"[rank {rank}] " if rank and os.environ.get("WORLD_SIZE", "1") != "1" else ""
    sys.stderr.write(f"{where}error: {error}\n")
    sys.stderr.flush()


def _config_path(args: Sequence[str]) -> str:
    path = ""
    for place, arg in enumerate(args):
        if arg == "--config" and place + 1 < len(args):
            path = args[place + 1]
        elif arg.startswith("--config="):
            path = arg.removeprefix("--config=")
    return path


def _yaml_flags(config_class: type[Any], path: str) -> list[str]:
    """A YAML file is flags written down, so there is one parser and one set of errors."""
    if not path:
        return []
    if not Path(path).is_file():
        raise FileNotFoundError(f"--config {path}: there is no such file.")
    try:
        content = yaml.safe_load(Path(path).read_text()) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"--config {path} must hold `option: value` lines, not a {type(content).__name__}.")
    known = set(option_names(config_class))
    flags: list[str] = []
    for name, value in _flatten(content):
        if name not in known:
            raise ValueError(f"--config {path}: unknown option {name!r}. {nearest_name(name, known)}")
        if value is None:
            raise ValueError(f"--config {path}: {name} has no value. Give one, or leave the line out.")
        if name == "config":
            continue  # the path that this very run was started with
        values = value if isinstance(value, list) else [value]
        flags += [f"--{name}", *map(str, values)]
    return flags


def _flatten(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def option_names(config_class: type[Any], prefix: str = "") -> Iterator[str]:
    """Every option as it is written in a flag, without the dashes."""
    hints = get_type_hints(config_class)
    for item in dataclasses.fields(config_class):
        if dataclasses.is_dataclass(hints[item.name]):
            yield from option_names(hints[item.name], f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}"


def nearest_name(name: str, known: Sequence[str] | set[str]) -> str:
    """A hint with the nearest known names, or all of them."""
    close = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)
    return f"Did you mean {' or '.join(close)}?" if close else f"Known: {', '.join(sorted(known))}."


def as_dict(config: Any) -> dict[str, Any]:
    """Plain values only, for YAML and JSON."""
    plain: dict[str, Any] = yaml.safe_load(
        yaml.safe_dump(dataclasses.asdict(config, dict_factory=_plain), sort_keys=False)
    )
    return plain


def _plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in items}


def to_yaml(config: Any) -> str:
    return yaml.safe_dump(as_dict(config), sort_keys=False)


# Names that other SPMD trainers give to our options, so that their argparse.Namespace works as it is.
_FOREIGN_NAMES = {
    "actor_learning_rate": "lr",
    "critic_learning_rate": "critic_lr",
    "adam_betas": "optim.betas",
    "betas": "optim.betas",
    "l2": "optim.weight_decay",
    "weight_decay": "optim.weight_decay",
    "lr_warmup_ratio": "optim.warmup_ratio",
    "lr_warmup_steps": "optim.warmup_steps",
    "lr_scheduler": "optim.schedule",
    "engine_type": "engine",
}


@dataclass(kw_only=True, slots=True)
class StrategyOptions:
    """What a strategy reads; taken from any config, Namespace or dict that has these names."""

    seed: int = 0
    lr: float = 1e-4
    critic_lr: float = 1e-4
    critic_warmup_steps: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    gradient_checkpointing: bool = False
    engine: str = "native"
    engine_tp_size: int = 1
    engine_mem_fraction: float = 0.4
    engine_args: tuple[str, ...] = ()
    engine_sleep_level: int = 1
    sync_bucket_mb: int = 512
    canary_every: int = 50
    trust_remote_code: bool = False
    exact_batches: bool = False
    optim: OptimConfig = field(default_factory=OptimConfig)
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    native: NativeEngineConfig = field(default_factory=NativeEngineConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)

    @classmethod
    def from_args(cls, args: Any) -> StrategyOptions:
        """A GRPOConfig gives all its fields; of a Namespace or dict the names we know, and a warning for the rest."""
        if isinstance(args, cls):
            return args
        if isinstance(args, GRPOConfig):
            names = [item.name for item in dataclasses.fields(cls) if hasattr(args, item.name)]
            return cls(exact_batches=True, **{name: getattr(args, name) for name in names})
        options = cls()
        given = _as_mapping(args)
        unknown = [name for name, value in given.items() if not options.set_option(name, value)]
        if unknown:
            logger.warning("Strategy options that lightrl does not read: %s.", ", ".join(sorted(unknown)))
        return options

    def set_option(self, name: str, value: Any) -> bool:
        """Sets a field by its own, its dotted, or a foreign name; False if there is none."""
        path = _FOREIGN_NAMES.get(name, name)
        if path not in set(option_names(type(self))) | {item.name for item in dataclasses.fields(self)}:
            return False
        *groups, last = path.split(".")
        target: Any = self
        for group in groups:
            target = getattr(target, group)
        if path == "optim.schedule":
            value = _schedule_name(value)
        current = getattr(target, last)
        if dataclasses.is_dataclass(current) and isinstance(value, Mapping):
            value = dataclasses.replace(current, **value)  # type: ignore[type-var]
        setattr(target, last, value)
        return True


def _as_mapping(args: Any) -> dict[str, Any]:
    if args is None:
        return {}
    if isinstance(args, Mapping):
        return dict(args)
    if dataclasses.is_dataclass(args):
        return {item.name: getattr(args, item.name) for item in dataclasses.fields(args)}
    return dict(vars(args))


def _schedule_name(name: str) -> str:
    """Ours, or the name that transformers gives to the same curve."""
    known = {"constant": "constant", "linear": "linear", "cosine": "cosine"}
    known |= {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}
    if name not in known:
        raise ValueError(f"Unknown learning-rate schedule {name!r}. Choose one of {', '.join(known)}.")
    return known[name]
