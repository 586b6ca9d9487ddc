"""The options of each kind of run: the fields are the flags, the --help, the YAML keys and the saved config.yaml."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from lightrl.config.adapters import check_adapters, check_others
from lightrl.config.export_sections import ExportOptions
from lightrl.config.health_section import GroupHealthConfig, HealthConfig, RolloutHealthConfig
from lightrl.config.kept_cache import KEEPING_ENGINE, check_keep_cache
from lightrl.config.log_sections import LogConfig, RolloutLogConfig
from lightrl.config.options import check_options, constant, option, section, without
from lightrl.config.reference_section import ReferenceOptions
from lightrl.config.rollout_sections import (
    EvalConfig,
    ExampleEvalConfig,
    RewardConfig,
    SamplingConfig,
    WorkflowConfig,
    check_eval,
)
from lightrl.config.sections import (
    AlgorithmConfig,
    CriticConfig,
    DataConfig,
    DistillationConfig,
    DynamicSamplingConfig,
    ExampleDataConfig,
    MarginPairDataConfig,
    OverlongConfig,
    PairDataConfig,
    PPOAlgorithmConfig,
    ResponseDataConfig,
    SharingConfig,
)
from lightrl.config.strategy import CriticTrainingConfig, EngineConfig, ExactConfig, StrategyOptions
from lightrl.config.truncation import check_truncation, truncated_engine

BUILTIN_MODEL = "builtin:addition"
_TIMED = ("auto", "single", "ddp", "fsdp")  # strategies with which --share_prompts auto has been timed

# ---- Every run ---------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class BasicConfig:
    """What is trained, on what, for how long, and where the run is kept."""

    __slots__ = ()

    config: str = option("", resume="free")
    """YAML file with any of these options. A flag on the command line overrides the file."""
    dry_run: bool = option(False, resume="free")
    """Report the memory that the run needs on these ranks, and exit. For other machines, use `lightrl plan`."""
    model: str = BUILTIN_MODEL
    """Hugging Face folder or name. builtin:addition: a small model that is made on first use."""
    strategy: str = option("auto", resume="free")
    """How the model is distributed: single, ddp, fsdp, deepspeed, megatron. Give your own class as
    package.module:MyStrategy or path/to/file.py:MyStrategy. auto: single in one process, else fsdp."""
    train_data: str = BUILTIN_MODEL
    """Training data: files, a data set, or a built-in task. A .jsonl, .json, .parquet, .csv or .tsv file, a pattern
    like '*.jsonl', hf:NAME[/CONFIG][:SPLIT], a data set's folder, reasoning_gym:TASK, or builtin:addition. A sum such
    as 'a.jsonl + b.jsonl*2' mixes several."""
    eval_data: str = option("", resume="free")
    """Data for evaluation, in the form of train_data. Empty: the held-out part of builtin:addition if that is the
    training data, else none."""
    max_steps: int = option(200, at_least=0, resume="free")
    """Number of steps. A step samples responses to num_prompts prompts and learns from them."""
    output_dir: str = option("", resume="free")
    """Folder of the run. Empty: a new folder under runs/."""
    resume: str = option("auto", resume="free")
    """auto: continue from the newest complete checkpoint, if any. never: fail if the folder already holds a run. PATH:
    start from this checkpoint, or from the newest of this run; later, continue from the new run's own checkpoints."""
    micro_batch_size: int = option(0, at_least=0, wanted="it must be 0 (by tokens) or above", resume="free")
    """Samples (or pairs of answers) per forward and backward on a rank. 0: as many as max_tokens_per_microbatch allows.
    It changes memory and speed, never the result."""
    max_tokens_per_microbatch: int = option(16384, at_least=1, resume="free")
    """Maximum number of tokens per forward and backward on a rank. Used if micro_batch_size is 0. A pair is never
    split."""


@dataclass(kw_only=True, slots=True)
class LoraConfig:
    """Training of low-rank adapters instead of the weights."""

    rank: int = option(0, at_least=0)
    """Rank of the adapters that are trained instead of the weights (LoRA). 0: train the weights."""
    alpha: float = option(0.0, at_least=0)
    """Scale of the adapters: their output is multiplied by alpha / rank. 0: alpha is 2 * rank."""
    use_rslora: bool = False
    """Multiply the adapters' output by alpha / sqrt(rank) instead (arXiv:2312.03732)."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Linear layers with an adapter, by the last part of their names, such as q_proj. all-linear: all that can have one
    (docs/lora.md)."""
    path: str = ""
    """Adapter to start from: a folder that peft wrote. Rank, alpha and the rest come from it. The reference of a KL
    penalty or of DPO is the model without it."""
    engine: Literal["auto", "merged", "unmerged"] = "auto"
    """How the engine applies adapters: merged into its weights, or unmerged, beside them. auto: unmerged with --dtype
    bfloat16 and --engine native or vllm, if neither another option nor, with vllm, an adapter of the vision tower needs
    merged weights; otherwise merged."""
    others: tuple[str, ...] = ()
    """Further adapters, not trained, that the engine applies where a request asks for them, as NAME=FOLDER, such as
    opponent=runs/old/final/adapter. Each folder is one that peft wrote. Needs --lora.engine unmerged and --engine
    native, vllm or sglang."""

    @property
    def is_on(self) -> bool:
        """Whether adapters are trained."""
        return self.rank > 0 or bool(self.path)

    def check(self) -> None:
        """Raises ValueError for options that do nothing or contradict each other."""
        if not self.target_modules:
            raise ValueError("--lora.target_modules is empty: name linear layers such as q_proj, or give all-linear.")
        if "all-linear" in self.target_modules and len(self.target_modules) > 1:
            raise ValueError("--lora.target_modules: all-linear stands alone, since it takes in every other name.")
        shape = LoraConfig(alpha=self.alpha, use_rslora=self.use_rslora, target_modules=self.target_modules)
        if (shape != LoraConfig() or (self.engine != "auto" and not self.path)) and not self.rank:
            raise ValueError(
                "--lora.alpha, --lora.use_rslora, --lora.target_modules and --lora.engine describe new adapters: give "
                "--lora.rank too. An adapter of --lora.path has its own, and takes --lora.engine and --lora.others."
            )
        if self.others:
            check_others(self)
        if self.path and self.rank:
            raise ValueError("--lora.path comes with its own rank: leave out --lora.rank, or --lora.path for new ones.")


@dataclass(kw_only=True, slots=True)
class RunConfig(StrategyOptions, ExportOptions, BasicConfig):
    """Options of every trainer: a model, a way to spread it, data, an optimizer, a folder."""

    ema_decay: float = option(0.0, at_least=0, below=1, wanted="it must be 0 (none) or between 0 and 1, such as 0.99")
    """Decay of an exponential moving average of the weights, such as 0.99. It is the share of the average that each
    update keeps. final_ema/ holds the average at the end. 0: no average."""
    lora: LoraConfig = section(LoraConfig, check=check_adapters)
    log: LogConfig = section(LogConfig, resume="free")
    health: HealthConfig = section(HealthConfig, resume="free")
    exact_batches: bool = constant(lambda: True)

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def samples_per_update(self) -> int:
        """Samples in an optimizer step, over all ranks."""
        raise NotImplementedError

    @property
    def optimizer_steps_per_step(self) -> int:
        """Optimizer steps in a trainer step."""
        raise NotImplementedError

    @property
    def schedule_length(self) -> int:
        """Length of the learning-rate schedule, in units of --optim.schedule_unit."""
        per_step = 1 if self.optim.schedule_unit == "rl_step" else self.optimizer_steps_per_step
        return self.max_steps * per_step


# ---- Runs that sample their own responses ------------------------------------------------------------------------


@dataclass(kw_only=True)
class TruncationConfig:
    """The part of the vocabulary that responses are drawn from."""

    __slots__ = ()

    top_p: float = option(1.0, above=0, at_most=1, check=check_truncation)
    """Draw from the likeliest tokens that together have this probability. 1: from all. The training logprobs are those
    of the same distribution (docs/truncated_sampling.md)."""
    top_k: int = option(0, at_least=0, check=check_truncation)
    """Draw from this many of the likeliest tokens. 0: from all."""

    @property
    def is_truncated(self) -> bool:
        """Whether responses are drawn from a part of the vocabulary."""
        return self.top_p < 1 or self.top_k > 0


@dataclass(kw_only=True, slots=True)
class RolloutConfig(SharingConfig, TruncationConfig, SamplingConfig, RewardConfig, RunConfig):
    """Options of a trainer that generates and scores its own samples."""

    rollout_ranks: int = option(0, at_least=0, resume="free")
    """Number of ranks, the last ones, that only generate. The others only train. 0: every rank does both in turn."""
    data: DataConfig = section(DataConfig, check=lambda config: _check_data(config))
    rollout: WorkflowConfig = section(WorkflowConfig, check=lambda config: _check_rollout(config))
    eval: EvalConfig = section(EvalConfig, resume="free", check=check_eval)
    log: RolloutLogConfig = section(RolloutLogConfig, resume="free")
    health: RolloutHealthConfig = section(RolloutHealthConfig, resume="free")

    @property
    def may_share_prompts(self) -> bool:
        """Whether the run shares prompts without being asked, if its device is a CPU and its models allow it.

        Only where sharing has been timed, and where no option needs whole sequences.
        """
        is_timed = self.dtype == "float32" and self.strategy in _TIMED and self.distributed.device != "cuda"
        is_whole = self.exact or self.routing.is_on or self.compile or self.tp_size > 1 or self.is_truncated
        return self.share_prompts == "auto" and is_timed and not is_whole

    @property
    def engine_path(self) -> str:
        """Name or import path of the engine; there is one of its own for top-p and top-k, and for a kept cache."""
        if self.is_truncated:
            return truncated_engine(self)
        return KEEPING_ENGINE if self.rollout.keep_cache else self.engine

    @property
    def samples_can_be_older(self) -> bool:
        """Whether a step may learn from samples of older weights than the engine has."""
        return self.rollout.max_staleness > 0

    @property
    def policy_schedule_length(self) -> int:
        """Length of the policy's learning-rate schedule, in units of --optim.schedule_unit."""
        return self.schedule_length

    @property
    def samples_per_step(self) -> int:
        """Samples in a trainer step, over all ranks."""
        return self.num_prompts * self.group_size

    @property
    def samples_per_update(self) -> int:
        """Samples in an optimizer step, over all ranks."""
        return self.samples_per_step // self.num_minibatches

    @property
    def optimizer_steps_per_step(self) -> int:
        """Optimizer steps in a trainer step."""
        return self.num_epochs * self.num_minibatches


def _check_data(config: RolloutConfig) -> None:
    config.data.check_curriculum(is_recorded=config.rollout.is_recorded)


def _check_rollout(config: RolloutConfig) -> None:
    config.rollout.check_reward(config.reward)
    config.rollout.check_late(has_own_ranks=config.rollout_ranks > 0)
    if config.rollout.keep_cache:
        check_keep_cache(config)
    if config.rollout.is_recorded:
        config.rollout.check_record(has_own_ranks=config.rollout_ranks > 0 or config.rollout.is_scheduled)
    if config.rollout.max_staleness and isinstance(config, GRPOConfig | PPOConfig):
        _decouple_from_older(config)


def _decouple_from_older(config: GRPOConfig | PPOConfig) -> None:
    """Resolves --algorithm.proximal auto, so that config.yaml says what the run computes."""
    algorithm = config.algorithm
    if algorithm.proximal == "auto" and algorithm.old_logprobs == "recompute":
        config.algorithm = dataclasses.replace(algorithm, proximal="recompute")


def _check_horizon(config: GRPOConfig | PPOConfig) -> None:
    algorithm, samples_per_step = config.algorithm, config.samples_per_step
    if algorithm.kl_target and algorithm.kl_horizon < samples_per_step:
        raise ValueError(
            f"--algorithm.kl_horizon {algorithm.kl_horizon} is less than the {samples_per_step} samples of a step: the "
            f"coefficient would jump. Use at least {10 * samples_per_step}."
        )


@dataclass(kw_only=True, slots=True)
@without(CriticTrainingConfig)
class GRPOConfig(ReferenceOptions, RolloutConfig):
    """Train a language model by GRPO."""

    teacher_model: str = ""
    """Model that scores the policy's own samples token by token. It is a Hugging Face folder or name, with the same
    tokenizer (on-policy distillation). Empty: no teacher."""
    algorithm: AlgorithmConfig = section(AlgorithmConfig, check=_check_horizon)
    dynamic_sampling: DynamicSamplingConfig = section(
        DynamicSamplingConfig, check=lambda config: _check_dynamic_sampling(config)
    )
    overlong: OverlongConfig = section(OverlongConfig, check=lambda config: _check_overlong(config))
    distillation: DistillationConfig = section(DistillationConfig, check=lambda config: _check_teacher(config))
    health: GroupHealthConfig = section(GroupHealthConfig, resume="free")

    @property
    def samples_can_be_older(self) -> bool:
        """Whether a step may learn from samples of older weights than the engine has."""
        return self.dynamic_sampling.enabled or self.rollout.max_staleness > 0

    def scores_first(self, *, has_older: bool, selects: bool) -> bool:
        """Returns whether the policy scores all samples of a step before its first update.

        A single update needs no such pass, since its own forward gives the logprobs before it, unless tokens are
        selected by their scores or a sample is compared with another policy.

        Args:
            has_older: Whether a sample has tokens of older weights.
            selects: Whether tokens are selected over a whole update.
        """
        return selects or ((has_older or self.optimizer_steps_per_step > 1) and self.algorithm.ratio_to == "recompute")


def _check_dynamic_sampling(config: GRPOConfig) -> None:
    if config.dynamic_sampling.enabled and config.group_size < 2:
        text = "--dynamic_sampling.enabled compares the rewards of a group, but --group_size is"
        raise ValueError(f"{text} {config.group_size}: give at least 2.")


def _check_overlong(config: GRPOConfig) -> None:
    if config.overlong.buffer:
        config.overlong.check_buffer(config.max_new_tokens, has_episodes=bool(config.rollout.workflow))


def _check_teacher(config: GRPOConfig) -> None:
    if not config.teacher_model:
        raise ValueError("The options --distillation... do nothing without --teacher_model.")


@dataclass(kw_only=True, slots=True)
class PPOConfig(ReferenceOptions, RolloutConfig):
    """Train a language model by PPO with a critic."""

    critic_model: str = ""
    """Model that the critic starts from. It is a language model, a reward model, or the final_critic/ of a run, with
    the policy's tokenizer. Empty: --model."""
    critic: CriticConfig = section(CriticConfig)
    algorithm: PPOAlgorithmConfig = section(PPOAlgorithmConfig, check=_check_horizon)

    def check(self) -> None:
        """Raises ValueError for options that do not go together."""
        self.algorithm.check_reward_at(self.reward)
        if self.optim.min_lr > self.critic_lr:
            raise ValueError(
                f"--optim.min_lr {self.optim.min_lr} is above --critic_lr {self.critic_lr}, and the critic's "
                "schedule ends there too. Give --optim.min_lr_ratio in its place."
            )
        if self.critic.shared_backbone and self.critic_model:
            raise ValueError(
                f"--critic_model {self.critic_model} is a model of its own, and --critic.shared_backbone has none. "
                "Leave one of them out."
            )

    @property
    def policy_schedule_length(self) -> int:
        """Length of the policy's schedule: updates that --critic.policy_frozen_steps leaves out do not count.

        With --optim.schedule_unit rl_step they count, as steps of the run.
        """
        frozen = 0 if self.optim.schedule_unit == "rl_step" else min(self.critic.policy_frozen_steps, self.max_steps)
        per_step = self.schedule_length // max(1, self.max_steps)
        return self.schedule_length - frozen * per_step

    def scores_first(self, *, has_older: bool, is_frozen: bool) -> bool:
        """Returns whether the policy scores all samples of a step before its first update.

        A single update needs no such pass, since its own forward gives the logprobs before it, unless the reward has a
        KL term, a sample is compared with another policy, or the policy is frozen, so that no update can measure the
        mismatch.

        Args:
            has_older: Whether a sample has tokens of older weights.
            is_frozen: Whether only the critic learns in the step.
        """
        source, several = self.algorithm.ratio_to, self.optimizer_steps_per_step > 1 or has_older
        is_wanted = self.algorithm.kl_in_reward != "none" or is_frozen
        return (several and source == "recompute") or (is_wanted and source != "engine")


# ---- Runs that learn from the answers in their data --------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
@without(EngineConfig, ExactConfig, CriticTrainingConfig)
class OfflineConfig(RunConfig):
    """Options of a trainer whose data contains the answers."""

    max_steps: int = option(0, at_least=0, resume="free")
    """Number of steps, over as many epochs as they take. 0: num_epochs passes over the data."""
    num_epochs: int = option(1, at_least=1)
    """Passes over the data if max_steps is 0. The last batch may be smaller."""
    batch_size: int = option(64, at_least=1)
    """Examples (or pairs) per step, over all ranks. A step is one optimizer step."""
    eval_data: str = option("", resume="free")
    """Data for evaluation, in the form of train_data. Empty: the held-out part of a built-in data set, if any."""
    data: ExampleDataConfig = section(ExampleDataConfig)
    eval: ExampleEvalConfig = section(ExampleEvalConfig, resume="free", check=check_eval)

    @property
    def samples_per_update(self) -> int:
        """Examples (or pairs) in an optimizer step, over all ranks."""
        return self.batch_size

    @property
    def optimizer_steps_per_step(self) -> int:
        """Optimizer steps in a trainer step: one."""
        return 1


@dataclass(kw_only=True, slots=True)
class SFTConfig(OfflineConfig):
    """Train a language model on responses."""

    train_data: str = "builtin:addition-answers"
    """Training data: files, a data set, or a built-in task. A .jsonl, .json, .parquet, .csv or .tsv file, a pattern
    like '*.jsonl', hf:NAME[/CONFIG][:SPLIT], a data set's folder, or builtin:addition-answers. A line has a prompt and
    a response, or messages."""
    data: ResponseDataConfig = section(ResponseDataConfig)


@dataclass(kw_only=True, slots=True)
class PairConfig(OfflineConfig):
    """Options of a trainer that learns from pairs of answers."""

    train_data: str = "builtin:addition-pairs"
    """Training data: files, a data set, or a built-in task. A .jsonl, .json, .parquet, .csv or .tsv file, a pattern
    like '*.jsonl', hf:NAME[/CONFIG][:SPLIT], a data set's folder, or builtin:addition-pairs. A line has a prompt,
    chosen and rejected answers, or two chats."""
    data: PairDataConfig = section(PairDataConfig)


@dataclass(kw_only=True, slots=True)
class RMConfig(PairConfig):
    """Train a reward model on pairs of answers."""

    centring_coef: float = option(0.0, at_least=0)
    """Weight in the loss of (chosen score + rejected score)^2. It keeps the scores around 0; 0.01 is usual."""
    data: MarginPairDataConfig = section(MarginPairDataConfig)


@dataclass(kw_only=True, slots=True)
class DPOConfig(ReferenceOptions, PairConfig):
    """Train a language model on pairs of answers by DPO."""

    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """Loss of a pair. sigmoid: the loss of the DPO paper."""
    beta: float = option(0.1, above=0)
    """How strongly the policy is held to the model it started from. A small value lets it move far."""
    label_smoothing: float = option(0.0, at_least=0, below=0.5)
    """Share of pairs whose labels are taken to be wrong. Loss sigmoid only."""
    length_normalized: bool = False
    """Compare means of the answers' log-ratios over tokens, not sums."""
    nll_coef: float = option(0.0, at_least=0)
    """Weight in the loss of the chosen answer's mean -log p. It keeps that answer from becoming less likely."""

    def check(self) -> None:
        """Raises ValueError for an option of another loss."""
        if self.label_smoothing and self.loss != "sigmoid":
            raise ValueError(f"--label_smoothing belongs to --loss sigmoid, not to {self.loss}: leave it out.")
