"""What a run is told, by kind of trainer: the fields are the flags, the --help, the YAML keys and the saved file."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from lightrl.config.sections import (
    AlgorithmConfig,
    CheckpointConfig,
    CriticConfig,
    DataConfig,
    DeepSpeedConfig,
    DistillationConfig,
    DistributedConfig,
    DynamicSamplingConfig,
    EvalConfig,
    FSDPConfig,
    JudgeConfig,
    LogConfig,
    LoraConfig,
    NativeEngineConfig,
    OptimConfig,
    OverlongConfig,
    PPOAlgorithmConfig,
    RolloutLogConfig,
    check_coefficients,
    check_deepspeed,
    check_distillation,
    check_dynamic_sampling,
    check_judge,
    check_lora,
    check_optim,
    check_overlong,
    check_ppo,
    check_selection,
)
from lightrl.config.values import (
    check_at_least_one,
    check_finite,
    check_fractions,
    check_not_negative,
    check_types,
    engine_arguments,
    nearest_multiples,
)

BUILTIN_MODEL = "builtin:addition"


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """What every trainer needs: a model, a way to spread it, data, an optimizer, a folder."""

    config: str = ""
    """YAML file with any of these options; the flags on the command line win over it."""
    model: str = BUILTIN_MODEL
    """Hugging Face folder or name; builtin:addition is a small model that is made on the spot."""
    strategy: str = "auto"
    """How the model is spread: single, ddp, fsdp, deepspeed, or your own class as package.module:MyStrategy. auto is
    single in one process, else fsdp."""
    train_data: str = BUILTIN_MODEL
    """A .jsonl or .parquet file, hf:NAME[:SPLIT] or a data set's folder, or builtin:addition."""
    eval_data: str = ""
    """The same for evaluation; empty evaluates on builtin:addition's held-out problems if that is trained on, else
    not at all."""
    seed: int = 0
    """Every draw of the run hangs on this, the step, the prompt and the sample; never on the rank."""
    max_steps: int = 200
    """Steps; one step rolls out num_prompts prompts and learns from them."""
    output_dir: str = ""
    """The run's folder; empty makes a new one under runs/."""
    resume: str = "auto"
    """auto continues the newest complete checkpoint of output_dir if there is one, never refuses a used folder,
    PATH continues that checkpoint."""
    micro_batch_size: int = 0
    """Samples per forward and backward on a rank; 0 leaves it to max_tokens_per_microbatch. It changes memory and
    speed, never the result."""
    max_tokens_per_microbatch: int = 16384
    """Prompt and response tokens per forward and backward on a rank."""
    lr: float = 1e-4
    """Peak learning rate."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the computation in trainer and engine; parameters and optimizer states stay float32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward to save memory."""
    compile: bool = False
    """Compile each block of a model that trains by torch.compile; the first step then takes minutes. Strategies single,
    ddp and fsdp."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    tp_size: int = 1
    """Consecutive ranks that split every weight matrix between them (tensor parallelism). Strategy fsdp."""
    sp_size: int = 1
    """Ranks that split the tokens of every micro-batch between them (sequence parallelism), for long contexts. Strategy
    fsdp."""
    ema_decay: float = 0.0
    """Keep an exponential moving average of the trained weights, which final_ema/ holds at the end: each update leaves
    it this share of what it was, such as 0.99. 0 keeps none."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer."""
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    """Strategy fsdp."""
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    """Strategy deepspeed."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters in place of the weights."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints."""
    log: LogConfig = field(default_factory=LogConfig)
    """Logging."""
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    """Processes and devices."""

    def __post_init__(self) -> None:
        check_types(self)
        self.check()

    def check(self) -> None:
        """Raises ValueError for what the types cannot say. A subclass calls this first, by its class's name."""
        check_finite({"lr": self.lr})
        check_not_negative(
            {
                "max_steps": self.max_steps,
                "lr": self.lr,
                "optim.max_norm": self.optim.max_norm,
                "optim.weight_decay": self.optim.weight_decay,
                "optim.warmup_steps": self.optim.warmup_steps,
                "optim.min_lr": self.optim.min_lr,
                "checkpoint.every": self.checkpoint.every,
            }
        )
        check_at_least_one(
            {
                "max_tokens_per_microbatch": self.max_tokens_per_microbatch,
                "checkpoint.keep": self.checkpoint.keep,
                "fsdp.replicate_size": self.fsdp.replicate_size,
                "tp_size": self.tp_size,
                "sp_size": self.sp_size,
            }
        )
        check_fractions({"optim.warmup_ratio": self.optim.warmup_ratio, "optim.min_lr_ratio": self.optim.min_lr_ratio})
        _check_run_numbers(self)
        check_deepspeed(self.deepspeed)
        check_optim(self.optim, self.lr)
        check_lora(self.lora)
        if self.compile and self.tp_size > 1:
            raise ValueError(f"--compile does not go with --tp_size {self.tp_size}. Use --tp_size 1, or leave it out.")
        if self.lora.is_on and self.tp_size > 1:
            raise ValueError(f"--tp_size {self.tp_size} cannot cut adapters. Use --tp_size 1, or leave --lora.* out.")

    @property
    def samples_per_update(self) -> int:
        """Over all ranks, at an optimizer step."""
        raise NotImplementedError

    @property
    def optimizer_steps_per_step(self) -> int:
        """Of which a run has max_steps times as many."""
        raise NotImplementedError

    @property
    def schedule_length(self) -> int:
        """Of a whole run, in units of --optim.schedule_unit."""
        if self.optim.schedule_unit == "rl_step":
            return self.max_steps
        return self.max_steps * self.optimizer_steps_per_step


@dataclass(kw_only=True, slots=True)
class RolloutConfig(RunConfig):
    """What a trainer needs that generates and scores what it learns from."""

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
    offload_while_generating: bool = False
    """Move the trainer's weights, gradients and optimizer states, and the reference model, to host memory while the
    engine is awake. It costs the time of two copies a rollout."""
    reward: tuple[str, ...] = ("exact_match",)
    """One or several, added up, each as name or name=weight: exact_match, contains, last_number, math, format, length,
    code, reward_model, judge (docs/rewards.md), or your own as package.module:function or path/to/file.py:function."""
    reward_args: tuple[str, ...] = ()
    """Parameters of rewards as reward.parameter=value, such as length.target=200."""
    reward_model: str = ""
    """Folder or name of the sequence-classification model with one output that the reward reward_model scores by."""
    reward_timeout_s: float = 60.0
    """A reward that takes longer for a sample has failed; 0 waits for ever."""
    max_reward_failures: int = 0
    """The run stops when more rewards than this fail, over all ranks, in one scoring: of a step's samples, of a round
    of dynamic sampling, or of an evaluation."""
    reward_failure_value: str = "exclude"
    """What a failed reward counts as, where the run goes on: a number, or exclude, which leaves the sample out of
    advantages, loss and evaluation."""
    reward_concurrency: int = 32
    """Calls of an async reward at the same time on a rank."""
    reward_workers: int = 2
    """Processes on a rank for rewards that are isolated, such as math."""
    num_prompts: int = 16
    """Prompts per step, over all ranks."""
    group_size: int = 16
    """Samples per prompt."""
    num_minibatches: int = 1
    """Optimizer steps per pass over a step's samples; the prompts are split evenly among them."""
    num_epochs: int = 1
    """Passes over a step's samples."""
    max_new_tokens: int = 8
    """Longest response in tokens."""
    temperature: float = 1.0
    """Sampling temperature; the training logprobs are those of the same distribution."""
    native: NativeEngineConfig = field(default_factory=NativeEngineConfig)
    """Engine native."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    """Reward judge."""
    data: DataConfig = field(default_factory=DataConfig)
    """Data."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation."""
    log: RolloutLogConfig = field(default_factory=RolloutLogConfig)
    """Logging."""

    def check(self) -> None:
        RunConfig.check(self)
        check_rewards(self)
        check_finite({"temperature": self.temperature})
        check_not_negative(
            {
                "eval.every": self.eval.every,
                "eval.temperature": self.eval.temperature,
                "eval.max_prompts": self.eval.max_prompts,
                "canary_every": self.canary_every,
                "max_reward_failures": self.max_reward_failures,
                "reward_timeout_s": self.reward_timeout_s,
                "log.samples_per_step": self.log.samples_per_step,
            }
        )
        check_at_least_one(
            {
                "num_prompts": self.num_prompts,
                "num_minibatches": self.num_minibatches,
                "num_epochs": self.num_epochs,
                "max_new_tokens": self.max_new_tokens,
                "group_size": self.group_size,
                "engine_tp_size": self.engine_tp_size,
                "sync_bucket_mb": self.sync_bucket_mb,
                "native.max_num_seqs": self.native.max_num_seqs,
                "reward_concurrency": self.reward_concurrency,
                "reward_workers": self.reward_workers,
            }
        )
        _check_rollout_numbers(self)

    @property
    def policy_schedule_length(self) -> int:
        """Of the policy, in units of --optim.schedule_unit."""
        return self.schedule_length

    @property
    def samples_per_step(self) -> int:
        return self.num_prompts * self.group_size

    @property
    def samples_per_update(self) -> int:
        return self.samples_per_step // self.num_minibatches

    @property
    def optimizer_steps_per_step(self) -> int:
        return self.num_epochs * self.num_minibatches


@dataclass(kw_only=True, slots=True)
class GRPOConfig(RolloutConfig):
    """Train a language model by GRPO."""

    teacher_model: str = ""
    """Hugging Face folder or name of a model with the same tokenizer that the policy's own samples are judged by, token
    by token (on-policy distillation); empty has no teacher."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """Loss."""
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    """Dynamic sampling."""
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    """Responses that are long or cut off."""
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    """Distillation from teacher_model."""

    def check(self) -> None:
        RolloutConfig.check(self)
        check_coefficients(self.algorithm, self.samples_per_step)
        check_selection(self.algorithm)
        check_dynamic_sampling(self.dynamic_sampling, self.group_size)
        check_overlong(self.overlong, self.max_new_tokens)
        check_distillation(self.distillation, self.teacher_model)
        if self.group_size < (1 if self.algorithm.advantage in _NEED_NO_GROUP else 2):
            raise ValueError(
                f"--group_size is {self.group_size}: {self.algorithm.advantage} compares the samples of a prompt with "
                "each other and needs at least 2. Use 4 to 16."
            )


@dataclass(kw_only=True, slots=True)
class PPOConfig(RolloutConfig):
    """Train a language model by PPO with a critic."""

    critic_model: str = ""
    """Where the critic starts: a language model, a reward model, or the final_critic/ of a run, with the policy's
    tokenizer; empty takes --model."""
    critic_lr: float = 1e-4
    """Peak learning rate of the critic, or of its head alone on a shared backbone."""
    critic_warmup_steps: int = 0
    """First optimizer steps of the critic that train its value head alone; --critic.policy_frozen_steps is for the
    policy."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """Critic."""
    algorithm: PPOAlgorithmConfig = field(default_factory=PPOAlgorithmConfig)
    """Advantages and loss."""

    def check(self) -> None:
        RolloutConfig.check(self)
        check_not_negative({"critic_lr": self.critic_lr, "critic_warmup_steps": self.critic_warmup_steps})
        check_finite({"critic_lr": self.critic_lr})
        if self.optim.min_lr > self.critic_lr:
            raise ValueError(
                f"--optim.min_lr {self.optim.min_lr} is above --critic_lr {self.critic_lr}, and the critic's "
                "schedule ends there too. Give --optim.min_lr_ratio in its place."
            )
        check_coefficients(self.algorithm, self.samples_per_step)
        check_ppo(self.algorithm, self.critic)
        if self.critic.shared_backbone and self.critic_model:
            raise ValueError(
                f"--critic_model {self.critic_model} is a model of its own, and --critic.shared_backbone has none. "
                "Leave one of them out."
            )

    @property
    def policy_schedule_length(self) -> int:
        """Without the updates that --critic.policy_frozen_steps leaves out; as steps of the run they count."""
        frozen = 0 if self.optim.schedule_unit == "rl_step" else min(self.critic.policy_frozen_steps, self.max_steps)
        per_step = self.schedule_length // max(1, self.max_steps)
        return self.schedule_length - frozen * per_step


_NEED_NO_GROUP = ("reinforce", "reinforce_plus_plus", "remax")  # advantages of one sample a prompt


def describe_batches(config: RolloutConfig, world_size: int) -> str:
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


def _check_run_numbers(config: RunConfig) -> None:
    if config.micro_batch_size < 0:
        raise ValueError(f"--micro_batch_size is {config.micro_batch_size}: it must be 0 (by tokens) or above.")
    if not all(0 <= beta < 1 for beta in config.optim.betas) or not config.optim.eps > 0:
        raise ValueError(
            f"--optim.betas {config.optim.betas} and --optim.eps {config.optim.eps}: the betas must be in [0, 1) and "
            "eps above 0."
        )
    if not 0 <= config.ema_decay < 1:
        raise ValueError(f"--ema_decay is {config.ema_decay}: it must be 0 (none) or between 0 and 1, such as 0.99.")
    if not -(2**63) <= config.seed < 2**63:
        raise ValueError(f"--seed {config.seed}: it must fit in 64 bits.")
    if not 0 < config.distributed.timeout_s <= 1e7:
        raise ValueError(f"--distributed.timeout_s is {config.distributed.timeout_s}: it must be above 0, at most 1e7.")


def check_rewards(config: RolloutConfig) -> None:
    """A single name given in Python becomes a tuple."""
    if isinstance(config.reward, str):
        config.reward = (config.reward,)
    check_judge(config.judge)
    if config.reward_failure_value != "exclude":
        try:
            is_finite = math.isfinite(float(config.reward_failure_value))
        except ValueError:
            is_finite = False
        if not is_finite:
            raise ValueError(
                f"--reward_failure_value is {config.reward_failure_value!r}: it must be a number, or exclude."
            )


def _check_rollout_numbers(config: RolloutConfig) -> None:
    if config.num_prompts % config.num_minibatches:
        hint = nearest_multiples(config.num_prompts, config.num_minibatches, "--num_prompts")
        raise ValueError(
            f"--num_prompts {config.num_prompts} cannot be split evenly into --num_minibatches "
            f"{config.num_minibatches}. {hint}"
        )
    if not config.temperature > 0:
        raise ValueError(
            f"--temperature is {config.temperature}: it must be above 0, since greedy samples of a prompt are all the "
            "same and teach nothing. For a greedy evaluation use --eval.temperature 0."
        )
    if not 0 < config.engine_mem_fraction < 1:
        raise ValueError(f"--engine_mem_fraction is {config.engine_mem_fraction}: it must be between 0 and 1.")
    engine_arguments(config)
