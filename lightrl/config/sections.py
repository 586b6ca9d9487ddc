"""The groups of options, one dataclass for each feature."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lightrl.config.values import check_finite, check_not_negative


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    name: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon for the matrices of the transformer's blocks and adamw for the rest. muon needs whole matrices:
    --strategy single or ddp."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    momentum: float = 0.95
    """Muon's momentum. Its update has the size of AdamW's, so that both share lr and weight_decay."""
    weight_decay: float = 0.0
    """Decoupled weight decay; vectors (norms, biases) are never decayed."""
    decay_embeddings: bool = True
    """Whether the decay is also of the token embeddings and the output layer."""
    lr_scales: tuple[str, ...] = ()
    """Factors of the learning rate by parameter, as pattern=factor, such as lm_head=0.1 or layers.*.mlp=2. A pattern
    is looked for anywhere in the name, * stands for any text, and the first that fits counts."""
    max_norm: float = 1.0
    """Clip the global gradient norm to this; 0 never clips."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up."""
    schedule_unit: Literal["optimizer_step", "rl_step"] = "optimizer_step"
    """What warm-up and schedule count: updates, of which a run has max_steps x num_epochs x num_minibatches and skipped
    ones do not count; or steps of the run, of which it has max_steps."""
    warmup_steps: int = 0
    """Units of linear warm-up from lr / warmup_steps to lr."""
    warmup_ratio: float = 0.0
    """The same as a share of all units, in place of warmup_steps."""
    min_lr: float = 0.0
    """The schedule ends at this learning rate."""
    min_lr_ratio: float = 0.0
    """The same as a share of lr, in place of min_lr."""


def check_optim(config: OptimConfig, lr: float) -> None:
    """What cannot be honoured together."""
    for one, other in (("min_lr", "min_lr_ratio"), ("warmup_steps", "warmup_ratio")):
        if getattr(config, one) and getattr(config, other):
            raise ValueError(
                f"--optim.{one} {getattr(config, one)} and --optim.{other} {getattr(config, other)} say the same: give "
                "one of them."
            )
    if config.min_lr > lr:
        raise ValueError(f"--optim.min_lr {config.min_lr} is above --lr {lr}, at which the schedule begins.")
    if not 0 <= config.momentum < 1:
        raise ValueError(f"--optim.momentum is {config.momentum}: it must be in [0, 1).")
    lr_scales(config)


def lr_scales(config: OptimConfig) -> dict[str, float]:
    """--optim.lr_scales as {pattern: factor}, in the order given."""
    found: dict[str, float] = {}
    for item in config.lr_scales:
        pattern, _, factor = item.rpartition("=")
        try:
            found[pattern] = float(factor)
        except ValueError:
            found[pattern] = -1.0
        if not pattern or not 0 <= found[pattern] < float("inf"):
            raise ValueError(f"--optim.lr_scales {item!r}: it must be pattern=factor, such as lm_head=0.1.")
    if len(found) < len(config.lr_scales):
        raise ValueError(f"--optim.lr_scales {' '.join(config.lr_scales)}: a pattern is given twice.")
    return found


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig:
    advantage: str = "grpo"
    """From a sample's reward to its advantage: grpo, dr_grpo, rloo, reinforce, reinforce_plus_plus,
    reinforce_plus_plus_baseline, remax, opo, gpg, cpgd, pass_at_k, or your own as package.module:function."""
    advantage_args: tuple[str, ...] = ()
    """Its parameters as name=value, such as normalize_std=false of grpo; docs/algorithms.md has all."""
    loss: str = "ppo_clip"
    """The policy loss: ppo_clip, policy_gradient, gspo, gspo_token, gmpo, cispo, sapo, cpgd, clip_cov, kl_cov, dppo_tv,
    dppo_kl, or your own."""
    clip_low: float | None = None
    """How far below 1 the loss lets the ratio of a token (of gspo: of a response) fall before it is clipped. None keeps
    the loss's own bound: ppo_clip, cpgd, clip_cov 0.2, gmpo 0.4, cispo 1, gspo 3e-4. Losses that clip nothing refuse
    it."""
    clip_high: float | None = None
    """How far above 1 the loss lets the ratio rise. None keeps the loss's own bound: ppo_clip, cpgd, clip_cov 0.2, gmpo
    0.4, cispo 4, gspo 4e-4."""
    loss_args: tuple[str, ...] = ()
    """Further parameters of the loss as name=value, such as dual_clip=3 of ppo_clip."""
    selection_args: tuple[str, ...] = ()
    """Parameters of the choice of tokens that clip_cov (fraction=2e-4 low=1 high=5) and kl_cov (fraction=2e-3) treat
    apart; it is made over the whole update."""
    entropy_fraction: float = 1.0
    """Share of an update's tokens, those of highest entropy, whose policy loss counts; 1 counts all."""
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


@dataclass(kw_only=True, slots=True)
class PPOAlgorithmConfig(AlgorithmConfig):
    advantage: str = "gae"
    """From rewards and values per token to advantages and returns: gae, or your own as package.module:function."""
    advantage_args: tuple[str, ...] = ()
    """Its parameters as name=value, such as gamma=1 lam=0.95 of gae."""
    truncation: Literal["terminal", "bootstrap"] = "terminal"
    """What follows a response that max_new_tokens cut off: nothing, so that its reward is all there is, or what the
    critic expects from its last state."""
    kl_in_reward: Literal["none", "k1", "k2", "k3"] = "none"
    """Take kl_coef times this estimate of the KL off the reward of each token, in place of the KL in the loss."""
    reward_normalization: Literal["none", "running"] = "none"
    """Subtract the mean of all rewards of the run so far and divide by their deviation."""
    reward_clip: float = 0.0
    """Hold rewards, after that, in [-reward_clip, reward_clip]; 0 does not."""
    advantage_normalization: Literal["none", "whiten", "running"] = "whiten"
    """Subtract the mean and divide by the deviation: over the tokens of the step, or over those of the run so far."""
    advantage_clip: float = 0.0
    """Hold advantages, after that, in [-advantage_clip, advantage_clip]; 0 does not."""


@dataclass(kw_only=True, slots=True)
class CriticConfig:
    shared_backbone: bool = False
    """One model with two heads, one optimizer and one loss, in place of a critic of its own."""
    value_coef: float = 1.0
    """Weight of the value loss, which on a shared backbone is added to the policy's."""
    value_clip: float = 0.2
    """A value that is further than this from the one before the update, the right way, gets no gradient; 0 never
    clips."""
    head_init_std: float = 0.0
    """Deviation of the weights that a new value head starts from; 0 starts with all values 0."""
    policy_frozen_steps: int = 0
    """First steps of the run in which only the critic learns and the policy stays as it is."""
    offload_waiting_optimizer: bool = False
    """While one of policy and critic learns, keep the other's optimizer states in host memory."""


def check_ppo(algorithm: PPOAlgorithmConfig, critic: CriticConfig) -> None:
    """Ranges, and what cannot be honoured together."""
    check_not_negative(
        {
            "algorithm.reward_clip": algorithm.reward_clip,
            "algorithm.advantage_clip": algorithm.advantage_clip,
            "critic.value_clip": critic.value_clip,
            "critic.head_init_std": critic.head_init_std,
            "critic.policy_frozen_steps": critic.policy_frozen_steps,
        }
    )
    if not critic.value_coef > 0:
        raise ValueError(
            f"--critic.value_coef is {critic.value_coef}: it must be above 0, or the critic learns nothing."
        )
    if algorithm.kl_in_reward != "none":
        if not algorithm.kl_coef:
            raise ValueError(
                f"--algorithm.kl_in_reward {algorithm.kl_in_reward} needs a --algorithm.kl_coef above 0. Use 0.01."
            )
        if (algorithm.kl_estimator, algorithm.kl_gradient) != ("k3", "own"):
            raise ValueError(
                "--algorithm.kl_estimator and --algorithm.kl_gradient are of the KL in the loss, and "
                f"--algorithm.kl_in_reward {algorithm.kl_in_reward} takes it out of there. Leave them out."
            )
    if critic.shared_backbone and (critic.policy_frozen_steps or critic.offload_waiting_optimizer):
        raise ValueError(
            "--critic.shared_backbone has one model and one optimizer: --critic.policy_frozen_steps and "
            "--critic.offload_waiting_optimizer cannot go with it. To train the head alone first, which leaves the "
            "policy as it is, use --critic_warmup_steps."
        )


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


def check_selection(config: AlgorithmConfig) -> None:
    """The range of entropy_fraction."""
    if not 0 < config.entropy_fraction <= 1:
        raise ValueError(
            f"--algorithm.entropy_fraction is {config.entropy_fraction}: it is a share of the tokens, more than 0 and "
            "at most 1."
        )


@dataclass(kw_only=True, slots=True)
class DynamicSamplingConfig:
    enabled: bool = False
    """Drop groups of equal rewards and draw more prompts, in rounds, until num_prompts groups are there (DAPO)."""
    max_rounds: int = 5
    """Rounds of a step; after the last the step learns from the groups it has, be they none."""
    oversample: float = 1.5
    """Each round draws this times as many prompts as are missing."""
    carry_over: int = 1
    """Steps that a group without a place in its own step's batch waits for one, at most; 0 drops it. The ratio of its
    tokens is to the policy that sampled them."""


def check_dynamic_sampling(config: DynamicSamplingConfig, group_size: int) -> None:
    """What the types cannot say, and what cannot be honoured together."""
    if config.max_rounds < 1:
        raise ValueError(f"--dynamic_sampling.max_rounds is {config.max_rounds}: it must be at least 1.")
    if not 1 <= config.oversample <= 100:
        raise ValueError(f"--dynamic_sampling.oversample is {config.oversample}: it must be between 1 and 100.")
    if config.carry_over < 0:
        raise ValueError(f"--dynamic_sampling.carry_over is {config.carry_over}: it must be 0 or above.")
    if config.enabled and group_size < 2:
        raise ValueError(
            f"--dynamic_sampling.enabled compares the rewards of a group, but --group_size is {group_size}: give at "
            "least 2."
        )


@dataclass(kw_only=True, slots=True)
class OverlongConfig:
    buffer: int = 0
    """Tokens before max_new_tokens over which a penalty is added to the reward, growing in a line (DAPO); 0 adds
    none."""
    penalty: float = 1.0
    """What a response of max_new_tokens has less."""
    mask_truncated: bool = False
    """Train on no token of a response that max_new_tokens cut off. Its reward still counts in its group's mean."""


def check_overlong(config: OverlongConfig, max_new_tokens: int) -> None:
    """What the types cannot say, and what would do nothing."""
    if not 0 <= config.buffer <= max_new_tokens:
        raise ValueError(
            f"--overlong.buffer is {config.buffer}: it must be between 0 and --max_new_tokens {max_new_tokens}."
        )
    if not config.penalty > 0:
        raise ValueError(f"--overlong.penalty is {config.penalty}: it must be more than 0.")
    if config.penalty != 1 and not config.buffer:
        raise ValueError("--overlong.penalty does nothing without --overlong.buffer.")


@dataclass(kw_only=True, slots=True)
class DistillationConfig:
    kind: Literal["advantage", "loss"] = "advantage"
    """Where the reverse KL to the teacher goes: into each token's advantage, or as a term of the loss."""
    coef: float = 1.0
    """Its weight."""
    reward_weight: float = 1.0
    """Weight of the advantages that come from rewards; 0 follows the teacher alone."""


def check_distillation(config: DistillationConfig, teacher_model: str) -> None:
    """What the types cannot say, and what would do nothing."""
    if not config.coef > 0 or not config.reward_weight >= 0:
        raise ValueError(
            f"--distillation.coef is {config.coef} and --distillation.reward_weight {config.reward_weight}: the first "
            "must be more than 0, the second at least 0."
        )
    if not teacher_model and config != DistillationConfig():
        raise ValueError("The options --distillation... do nothing without --teacher_model.")


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
class LoraConfig:
    rank: int = 0
    """Train adapters of this rank in place of the weights (LoRA); 0 trains the weights."""
    alpha: float = 0.0
    """An adapter's output is multiplied by alpha / rank; 0 takes alpha = 2 * rank."""
    use_rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead (arXiv:2312.03732)."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Linear layers that get an adapter, by the last part of their names, such as q_proj v_proj; all-linear: every one
    but the output head."""
    path: str = ""
    """Start from this adapter, as peft saves it; rank, alpha and the rest come from it."""

    @property
    def is_on(self) -> bool:
        return self.rank > 0 or bool(self.path)


def check_lora(config: LoraConfig) -> None:
    """What cannot be honoured, alone or together."""
    if config.rank < 0 or not 0 <= config.alpha < math.inf:
        raise ValueError(f"--lora.rank {config.rank} and --lora.alpha {config.alpha} must be at least 0.")
    if not config.target_modules:
        raise ValueError("--lora.target_modules is empty: name linear layers such as q_proj, or give all-linear.")
    if "all-linear" in config.target_modules and len(config.target_modules) > 1:
        raise ValueError("--lora.target_modules: all-linear stands alone, since it takes in every other name.")
    shape = LoraConfig(alpha=config.alpha, use_rslora=config.use_rslora, target_modules=config.target_modules)
    if shape != LoraConfig() and not config.rank:
        raise ValueError(
            "--lora.alpha, --lora.use_rslora and --lora.target_modules describe new adapters: give --lora.rank too. "
            "An adapter of --lora.path has its own."
        )
    if config.path and config.rank:
        raise ValueError(
            "--lora.path comes with its own rank: leave --lora.rank out, or start new adapters by it alone."
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
class JudgeConfig:
    url: str = ""
    """Where the judge answers: the base of an OpenAI-compatible interface, such as http://127.0.0.1:8000/v1."""
    model: str = ""
    """Its model's name there."""
    prompt: str = ""
    """What it is asked: a text, or @FILE, with {question}, {response} and {answer} in it; empty takes one of ours,
    which asks for a score from 0 to 10."""
    score_pattern: str = r"[Ss]core:\s*\**\s*(\d+(?:\.\d+)?)"
    """Regular expression whose first group is the score; the last match in the judge's reply counts."""
    max_score: float = 10.0
    """The score that becomes the reward 1; a reply with a larger one gives no verdict."""
    api_key_env: str = ""
    """Environment variable that holds the API key; empty sends none."""
    temperature: float = 0.0
    """Of the judge's own sampling."""
    max_tokens: int = 1024
    """Longest reply."""
    timeout_s: float = 30.0
    """Of one request."""
    retries: int = 3
    """Further tries after a request that failed in a way that may pass: no connection, time-out, HTTP 408, 409, 425,
    429 and 5xx. The wait before each doubles, from 1 s, or is as long as the server asks."""


def check_judge(config: JudgeConfig) -> None:
    """Numbers that no judge can work with."""
    if config.retries < 0 or config.max_tokens < 1 or not config.temperature >= 0:
        raise ValueError(
            f"--judge.retries {config.retries} and --judge.temperature {config.temperature} must be 0 or above, and "
            f"--judge.max_tokens {config.max_tokens} at least 1."
        )
    if not config.timeout_s > 0 or not config.max_score > 0:
        raise ValueError(
            f"--judge.timeout_s {config.timeout_s} and --judge.max_score {config.max_score} must be above 0."
        )


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
