"""The groups of options, one dataclass for each feature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightrl.config.values import check_finite, check_not_negative


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
    kl_target: float = 0.0
    """Mean KL per trained token that kl_coef is moved towards after each step, up while the KL is above it and down
    while it is below (Ziegler 2019); 0 leaves kl_coef as it is."""
    kl_horizon: int = 10_000
    """Samples over which a kl_coef with a target can change by a fifth."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus in the loss."""
    entropy_target: float = 0.0
    """Mean entropy per trained token below which entropy_coef grows by entropy_step after each step; above it the
    coefficient shrinks and does not act (Skywork-OR1). 0 leaves entropy_coef as it is."""
    entropy_step: float = 0.005
    """How much an entropy_coef with a target moves at a time."""
    old_logprobs: Literal["recompute", "engine"] = "recompute"
    """Where the ratio's denominator comes from: the trainer's own forward before the update, or what the engine
    reported."""


def check_coefficients(config: AlgorithmConfig, samples_per_step: int) -> None:
    """Ranges of the weights of KL and entropy, and what their targets need."""
    check_not_negative(
        {f"algorithm.{name}": getattr(config, name) for name in ("kl_coef", "kl_target", "entropy_target")}
    )
    check_finite({"algorithm.entropy_coef": config.entropy_coef})
    if not config.entropy_step > 0 or config.kl_horizon < 1:
        raise ValueError(
            f"--algorithm.entropy_step {config.entropy_step} and --algorithm.kl_horizon {config.kl_horizon}: both must "
            "be above 0."
        )
    if config.kl_target and not config.kl_coef:
        raise ValueError(
            f"--algorithm.kl_target {config.kl_target} needs a --algorithm.kl_coef above 0 to start from: 0 times "
            "anything stays 0. Use 0.01."
        )
    if config.kl_target and config.kl_horizon < samples_per_step:
        raise ValueError(
            f"--algorithm.kl_horizon {config.kl_horizon} is less than the {samples_per_step} samples of a step: the "
            f"coefficient would jump. Use at least {10 * samples_per_step}."
        )
    if config.entropy_target and config.entropy_coef < 0:
        raise ValueError(
            f"--algorithm.entropy_coef {config.entropy_coef} is negative, and --algorithm.entropy_target holds it in "
            "[0, 1]. Leave one of them out."
        )


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
class ExampleDataConfig:
    prompt_field: str = "prompt"
    """Field of a line that holds the prompt: a string, or a list of chat messages."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """Render string prompts through the tokenizer's chat template: when it has one, always, or never."""
    max_tokens: int = 0
    """Longest prompt and answer together; 0 is the model's context."""
    too_long: Literal["error", "skip"] = "error"
    """What becomes of a line that is longer: it stops the run before it starts, or is left out and counted."""


@dataclass(kw_only=True, slots=True)
class ResponseDataConfig(ExampleDataConfig):
    response_field: str = "response"
    """Field with the response to learn, a string; a field "messages" with a whole conversation is read when this one
    is absent."""
    train_on: Literal["all", "last"] = "all"
    """Of a conversation every turn of the assistant, or the last one alone."""


@dataclass(kw_only=True, slots=True)
class PairDataConfig(ExampleDataConfig):
    chosen_field: str = "chosen"
    """Field with the preferred answer: a string, the assistant's messages after the prompt, or a whole conversation.
    Its last turn is what counts."""
    rejected_field: str = "rejected"
    """The same for the other answer."""


@dataclass(kw_only=True, slots=True)
class MarginPairDataConfig(PairDataConfig):
    margin_field: str = "margin"
    """Field with a number by which the chosen answer should win; a line without it has 0."""


@dataclass(kw_only=True, slots=True)
class ExampleEvalConfig:
    every: int = 20
    """Steps between evaluations; also before the first step and after the last. 0 never evaluates."""
    max_examples: int = 0
    """Evaluate on the first so many examples only; 0 takes all."""


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
    asynchronous: bool = False
    """Train on while a checkpoint is written, from a copy of each rank's part of the state in host memory."""


@dataclass(kw_only=True, slots=True)
class LogConfig:
    tensorboard: bool = True
    """Write TensorBoard files beside metrics.jsonl."""


@dataclass(kw_only=True, slots=True)
class RolloutLogConfig(LogConfig):
    samples_per_step: int = 4
    """Samples written to samples.jsonl at each step."""


@dataclass(kw_only=True, slots=True)
class DistributedConfig:
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model lives; auto takes a GPU if there is one."""
    deterministic: bool = False
    """Only kernels that give the same bits every time; slower on a GPU, and an operation that has none is an error."""
    timeout_s: float = 1800.0
    """A rank that waits longer than this for another stops the run and says where both were."""
