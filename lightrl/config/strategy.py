"""The options that a strategy and its engine read. Every run's config is a StrategyOptions and more."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lightrl.config.exact import check_exact
from lightrl.config.foreign_options import native_options
from lightrl.config.native import NativeEngineConfig, check_native
from lightrl.config.options import check_values, engine_arguments, option, option_names, section

logger = logging.getLogger(__name__)

OF_ONE_STRATEGY = ("deepspeed", "megatron")  # sections, each named as the strategy that reads it

# ---- Sections ----------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    """The optimizer and the schedule of its learning rate."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon: Muon for the matrices of the transformer's blocks and AdamW for the rest. muon needs whole
    matrices: --strategy single or ddp."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates."""
    eps: float = option(1e-8, above=0)
    """AdamW's epsilon."""
    momentum: float = option(0.95, at_least=0, below=1)
    """Muon's momentum. Its update has the size of AdamW's, so that both share lr and weight_decay."""
    weight_decay: float = option(0.0, at_least=0)
    """Decoupled weight decay. Vectors (norms, biases, Mamba's decay rates) are never decayed."""
    decay_embeddings: bool = True
    """Also decay the token embeddings and the output layer."""
    lr_scales: tuple[str, ...] = ()
    """Factors of the learning rate by parameter, as pattern=factor, such as lm_head=0.1 or layers.*.mlp=2. A pattern
    may match anywhere in a parameter's name, * stands for any text, and the first pattern that matches is used. The
    factor 0 freezes a parameter."""
    max_norm: float = option(1.0, at_least=0)
    """Clip the global gradient norm to this value. 0: do not clip."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning-rate schedule after the warm-up."""
    schedule_unit: Literal["optimizer_step", "rl_step"] = "optimizer_step"
    """What warm-up and schedule count. optimizer_step: updates, of which a step of GRPO or PPO takes num_epochs x
    num_minibatches; skipped ones do not count. rl_step: steps of the run, max_steps in all."""
    warmup_steps: int = option(0, at_least=0)
    """Length of the linear warm-up from lr / warmup_steps to lr, in schedule units."""
    warmup_ratio: float = option(0.0, at_least=0, at_most=1)
    """Length of the warm-up as a share of the whole schedule; replaces warmup_steps."""
    min_lr: float = option(0.0, at_least=0)
    """Learning rate at the end of the schedule."""
    min_lr_ratio: float = option(0.0, at_least=0, at_most=1)
    """Learning rate at the end of the schedule as a share of lr; replaces min_lr."""

    def check(self) -> None:
        """Raises ValueError for options that contradict each other."""
        for one, other in (("min_lr", "min_lr_ratio"), ("warmup_steps", "warmup_ratio")):
            if getattr(self, one) and getattr(self, other):
                both = f"--optim.{one} {getattr(self, one)} and --optim.{other} {getattr(self, other)}"
                raise ValueError(f"{both} say the same: give one of them.")
        if self.schedule == "constant" and (self.min_lr or self.min_lr_ratio):
            raise ValueError("--optim.min_lr and --optim.min_lr_ratio need --optim.schedule linear or cosine.")
        if self.name == "adamw" and self.momentum != OptimConfig().momentum:
            raise ValueError("--optim.momentum needs --optim.name muon. AdamW has --optim.betas.")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"--optim.betas is {self.betas}: it must be two numbers in [0, 1).")
        lr_scales(self)


def lr_scales(config: OptimConfig) -> dict[str, float]:
    """Returns --optim.lr_scales as {pattern: factor}, in the order given."""
    scales = dict(_lr_scale(item) for item in config.lr_scales)
    if len(scales) < len(config.lr_scales):
        raise ValueError(f"--optim.lr_scales {' '.join(config.lr_scales)}: a pattern is given twice.")
    return scales


def _lr_scale(item: str) -> tuple[str, float]:
    pattern, _, factor = item.rpartition("=")
    try:
        scale = float(factor)
    except ValueError:
        scale = -1.0
    if not pattern or not 0 <= scale < float("inf"):
        raise ValueError(f"--optim.lr_scales {item!r}: it must be pattern=factor, such as lm_head=0.1.")
    return pattern, scale


@dataclass(kw_only=True, slots=True)
class FSDPConfig:
    """Options of --strategy fsdp."""

    reshard_after_forward: bool = True
    """Free the gathered weights of a block after its forward pass and gather them again for the backward pass (ZeRO-3).
    False: keep them in between (ZeRO-2)."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer states in host memory."""
    reduce_each_micro_batch: bool = False
    """Sum gradients over the ranks after each micro-batch, so that a rank keeps only its shard of them in between: less
    memory, more traffic. False: sum them once per update; until then each rank keeps the gradients of the whole
    model."""
    replicate_size: int = option(1, at_least=1)
    """Number of replicas in hybrid sharding; each is sharded over world / replicate_size ranks."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients are summed over the ranks."""


@dataclass(kw_only=True, slots=True)
class DeepSpeedConfig:
    """Options of --strategy deepspeed."""

    zero_stage: Literal[0, 1, 2, 3] = 2
    """What is sharded over the ranks. 0: nothing. 1: optimizer states. 2: gradients too. 3: parameters too."""
    offload_optimizer: bool = False
    """Keep the optimizer states in host memory and step there. Needs stage 1, 2 or 3."""
    offload_param: bool = False
    """Keep the parameters in host memory between uses. Needs stage 3."""
    cpu_adam: bool = False
    """Use DeepSpeed's Adam for host memory instead of torch's. Its first use compiles it, which takes minutes."""
    bucket_mb: int = option(128, at_least=1)
    """Megabytes of gradients reduced at a time, and of parameters gathered after a step."""
    param_persistence_threshold: int = option(100_000, at_least=0)
    """At stage 3, a parameter with fewer elements than this stays whole on every rank."""

    def check(self) -> None:
        """Raises ValueError for options that contradict each other."""
        if self.offload_param and self.zero_stage != 3:
            raise ValueError(
                f"--deepspeed.offload_param needs --deepspeed.zero_stage 3, not {self.zero_stage}: only it shards them."
            )
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("--deepspeed.offload_optimizer needs --deepspeed.zero_stage 1, 2 or 3.")


@dataclass(kw_only=True, slots=True)
class MegatronConfig:
    """Options of --strategy megatron, in addition to --tp_size."""

    pp_size: int = option(1, at_least=1)
    """Number of pipeline stages, each with an equal part of the layers."""
    vpp_size: int = option(1, at_least=1)
    """Number of chunks into which a stage's layers are divided; they take turns, so the stage waits less. Needs 3
    stages or more."""
    cp_size: int = option(1, at_least=1)
    """Number of ranks that split the tokens of each sequence (context parallelism)."""
    ep_size: int = option(1, at_least=1)
    """Number of ranks that split the experts of a layer."""
    etp_size: int = option(1, at_least=1)
    """Number of ranks that split the matrices of each expert."""
    sequence_parallel: bool = False
    """Split the activations between the split matrices by token, over the ranks of --tp_size, to save memory."""
    distributed_optimizer: bool = False
    """Keep the optimizer states of each parameter on only one of the ranks that hold it, and update it there."""
    recompute: Literal["none", "full"] = "none"
    """Activations to recompute in the backward pass: none, or those of all layers."""
    impl: Literal["local", "te"] = "local"
    """Layers. local: plain torch. te: those of Transformer Engine, which are refused so far (docs/megatron.md)."""


@dataclass(kw_only=True, slots=True)
class RoutingConfig:
    """The routers of a mixture of experts (Mixtral, Qwen-MoE and others)."""

    replay: bool = False
    """Let the trainer use the experts that the engine chose for each token (R3), weighted by its own router. Engines
    native and vllm."""
    balance_coef: float = option(0.0, at_least=0)
    """Weight of the load-balancing loss, which is computed per sequence; 0.001 is usual."""
    z_coef: float = option(0.0, at_least=0)
    """Weight of the router z-loss (squared logsumexp of the router's logits), which keeps logits small; 0.001 is
    usual."""

    @property
    def has_losses(self) -> bool:
        """Whether a loss of the routers is added to the policy's."""
        return bool(self.balance_coef or self.z_coef)

    @property
    def is_on(self) -> bool:
        """Whether the trainer watches the routers at all."""
        return self.replay or self.has_losses


@dataclass(kw_only=True, slots=True)
class DistributedConfig:
    """Processes and devices."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model. auto: a GPU if there is one."""
    deterministic: bool = False
    """Use only kernels that give the same bits every time. They are slower on a GPU, and an operation without such a
    kernel is an error."""
    timeout_s: float = option(1800.0, above=0, at_most=1e7)
    """Seconds that a rank waits for another before it stops the run and reports where both were."""


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """When checkpoints are written and how many are kept."""

    every: int = option(50, at_least=0)
    """Steps between checkpoints; one more is written after the last step. 0: write none."""
    keep: int = option(2, at_least=1)
    """Number of checkpoints to keep, the newest ones."""
    grace_s: float = option(300.0, at_least=0, at_most=86_400)
    """Seconds that a run has, after SIGTERM, SIGHUP or SIGUSR1, to finish its step and write one more checkpoint. After
    that, or at once if 0, it ends without one. torchrun kills its ranks 30 s after it has passed a signal on,
    or after the seconds of TORCH_ELASTIC_SHUTDOWN_TIMEOUT."""
    asynchronous: bool = False
    """Continue training while a checkpoint is written, from a copy in host memory of each rank's part of the state."""
    on_disk_error: Literal["stop", "continue"] = "stop"
    """What a run does when a checkpoint, metrics or samples cannot be written to disk. stop: end with code 1. continue:
    warn and train on; the next checkpoint is tried when it is due. The final model must be written in either case."""


# ---- What a run's config and StrategyOptions inherit -------------------------------------------------------------
# These classes have no slots of their own, so that a class can inherit several of them; the class that does has slots.


@dataclass(kw_only=True)
class TrainingConfig:
    """How a model computes and learns."""

    __slots__ = ()

    seed: int = 0
    """Seed of all random draws of the run. A draw depends on the seed, the step, the prompt and the sample, never on
    the rank."""
    lr: float = option(1e-4, at_least=0)
    """Peak learning rate."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the computation in trainer and engine. Parameters and optimizer states stay float32."""
    gradient_checkpointing: bool = option(False, resume="free")
    """Recompute activations in the backward pass to save memory."""
    compile: bool = option(False, resume="free", check=lambda options: _check_compile(options))
    """Compile each block of a trained model with torch.compile. The first step then takes minutes. Strategies single,
    ddp and fsdp."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    optim: OptimConfig = section(OptimConfig, check=lambda options: _check_rates(options))
    checkpoint: CheckpointConfig = section(CheckpointConfig, resume="free")


@dataclass(kw_only=True)
class ParallelConfig:
    """How a model is spread over ranks."""

    __slots__ = ()

    tp_size: int = option(1, at_least=1, resume="free")
    """Number of ranks that split every weight matrix (tensor parallelism). They are consecutive. Strategies fsdp and
    megatron."""
    sp_size: int = option(1, at_least=1, resume="free")
    """Number of ranks that split the tokens of a micro-batch. For long contexts (sequence parallelism). Strategy
    fsdp."""
    fsdp: FSDPConfig = section(FSDPConfig, resume="free")
    deepspeed: DeepSpeedConfig = section(DeepSpeedConfig, resume="free")
    megatron: MegatronConfig = section(MegatronConfig, resume="free")
    distributed: DistributedConfig = section(DistributedConfig, resume="free")


@dataclass(kw_only=True)
class EngineConfig:
    """What generates responses, and how it shares the device with the trainer."""

    __slots__ = ()

    engine: str = "native"
    """What generates responses: native, vllm or sglang. Give your own class as package.module:MyEngine or
    path/to/file.py:MyEngine."""
    engine_tp_size: int = option(1, at_least=1)
    """Number of ranks that share one engine by tensor parallelism. They are consecutive."""
    engine_mem_fraction: float = option(0.4, above=0, below=1, wanted="it must be between 0 and 1", resume="free")
    """Share of GPU memory for the weights and KV cache of an awake engine. Engines vllm and sglang."""
    engine_args: tuple[str, ...] = option((), check=engine_arguments)
    """Further arguments of the engine as name=value. They are those of LLM() for vllm and of Engine() for sglang."""
    engine_sleep_level: Literal[0, 1, 2] = option(1, resume="free")
    """What the engine frees while the model trains. 0: nothing; it never sleeps. 1: the KV cache; vllm also moves its
    weights to host memory. 2: the weights too, which the next weight sync restores."""
    sync_bucket_mb: int = option(512, at_least=1, resume="free")
    """Megabytes of whole weights that a weight sync holds at a time. Those of trainer and engine come on top."""
    canary_every: int = option(50, at_least=0, resume="free")
    """Number of weight syncs from one canary to the next. A canary compares a few logprobs of engine and trainer after
    a sync; the first sync always has one. 0: none."""
    offload_while_generating: bool = option(False, resume="free")
    """Move the trainer's state to host memory while the engine is awake. This includes its weights, gradients,
    optimizer states and the reference model. Each rollout then waits for two copies."""
    native: NativeEngineConfig = section(NativeEngineConfig, resume="free", check=check_native)
    routing: RoutingConfig = section(RoutingConfig, check=lambda options: _check_routing(options))


@dataclass(kw_only=True)
class CriticTrainingConfig:
    """How a critic learns, as far as it differs from the policy."""

    __slots__ = ()

    critic_lr: float = option(1e-4, at_least=0)
    """Peak learning rate of the critic. On a shared backbone it is that of the value head alone."""
    critic_warmup_steps: int = option(0, at_least=0)
    """Number of first updates that train only the critic's value head. To freeze the policy instead, use
    --critic.policy_frozen_steps."""


@dataclass(kw_only=True)
class ExactConfig:
    """What a result may depend on."""

    __slots__ = ()

    exact: bool = option(False, check=check_exact)
    """Give the same bits at any number of ranks (docs/exact.md). Weights and metrics then do not depend on the ranks,
    on strategy single, ddp or fsdp, or on micro-batch options, which have no effect. Needs float32, a CPU and the
    native engine."""
    exact_tile_tokens: int = option(2048, at_least=1, check=check_exact)
    """Maximum size of a tile, in tokens. A tile is the unit in which --exact computes a step, whole on one rank.
    Smaller tiles let more ranks share a step; with larger ones fewer gradients are added up."""


# ---- All of them -------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class StrategyOptions(CriticTrainingConfig, ExactConfig, EngineConfig, ParallelConfig, TrainingConfig):
    """Options that a strategy reads. A run's config is a subclass, so an option is written and read in one place."""

    exact_batches: bool = False
    """train_batch is called with whole batches; nothing is accumulated over calls of backward."""

    @classmethod
    def from_args(cls, args: Any) -> StrategyOptions:
        """Returns a run's config itself; of a Namespace or dict it takes the known names and warns about the rest."""
        return args if isinstance(args, StrategyOptions) else _from_foreign(args)


def check_own_options(config: Any, kind: type[Any]) -> None:
    """Raises ValueError for options of a section that is not among the strategy's own_options.

    A config has the strategy's name alone, which may be that of a plug-in. So the class says what it reads.

    Args:
        config: The options of a run.
        kind: The class of the strategy that it gets.
    """
    for owner in OF_ONE_STRATEGY:
        chosen = getattr(config, owner)
        if owner not in getattr(kind, "own_options", ()) and chosen != type(chosen)():
            raise _unread_options(config, kind, owner)


def _unread_options(config: Any, kind: type[Any], owner: str) -> ValueError:
    chosen = getattr(config, owner)
    named = [(item.name, getattr(chosen, item.name), item.default) for item in dataclasses.fields(chosen)]
    given = [f"--{owner}.{name} {value} (default {default})" for name, value, default in named if value != default]
    return ValueError(
        f"{kind.__name__} (--strategy {config.strategy}) does not read {' and '.join(given)}. Leave the option "
        f"out, or use --strategy {owner}. A class of your own reads --{owner}.* if it inherits from that "
        f'strategy, or if its own_options has "{owner}".'
    )


def _check_compile(options: StrategyOptions) -> None:
    if options.tp_size > 1:
        raise ValueError(f"--compile does not go with --tp_size {options.tp_size}. Use --tp_size 1, or leave it out.")


def _check_rates(options: StrategyOptions) -> None:
    if options.optim.min_lr > options.lr:
        raise ValueError(f"--optim.min_lr {options.optim.min_lr} is above --lr {options.lr}, where a schedule begins.")


def _check_routing(options: StrategyOptions) -> None:
    if options.routing.replay and options.engine == "sglang":
        raise ValueError(
            "--routing.replay True needs the experts that the engine chose, which lightrl does not get from SGLang. "
            "Use --engine native or vllm, or leave the option out."
        )
    if options.routing.has_losses and options.sp_size > 1:
        raise ValueError(
            f"--routing.balance_coef and --routing.z_coef need whole sequences, which --sp_size {options.sp_size} "
            "splits. Use --sp_size 1, or leave them out."
        )
    if options.compile:
        raise ValueError("--compile does not go with --routing.*, which changes what a router returns. Leave one out.")


def _from_foreign(args: Any) -> StrategyOptions:
    options = StrategyOptions()
    unknown = [
        name for name, value in native_options(_as_mapping(args)).items() if not _set_option(options, name, value)
    ]
    if unknown:
        logger.warning("Strategy options that lightrl does not read: %s.", ", ".join(sorted(unknown)))
    check_values(options)
    return options


def _set_option(options: StrategyOptions, path: str, value: Any) -> bool:
    """Sets an option by its own or its dotted name; returns False if there is none that takes the value."""
    if path not in {*option_names(StrategyOptions), *(item.name for item in dataclasses.fields(options))}:
        return False
    *sections, last = path.split(".")
    target: Any = options
    for name_of_section in sections:
        target = getattr(target, name_of_section)
    current = getattr(target, last)
    if dataclasses.is_dataclass(current) and isinstance(value, Mapping):
        value = dataclasses.replace(current, **value)  # type: ignore[type-var]
    if dataclasses.is_dataclass(current) and not isinstance(value, type(current)):
        return False  # such as another trainer's switch of that name
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
