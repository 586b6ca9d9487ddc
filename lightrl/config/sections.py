"""The groups of options that trainers read, one dataclass for each feature."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from lightrl.config.options import check_needed, named_values, option
from lightrl.config.profile_option import check_profile
from lightrl.config.sharing import check_sharing

# ---- Algorithm ---------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig:
    """What a policy learns: advantage, loss, correction, KL and entropy."""

    advantage: str = "grpo"
    """How a sample's reward becomes its advantage: grpo, dr_grpo, rloo, reinforce, reinforce_plus_plus,
    reinforce_plus_plus_baseline, remax, opo, gpg, cpgd, pass_at_k, gdpo, or your own as package.module:function or
    path/to/file.py:function."""
    advantage_args: tuple[str, ...] = ()
    """Parameters of the advantage as name=value, such as normalize_std=false of grpo. docs/algorithms.md lists all."""
    loss: str = "ppo_clip"
    """Policy loss: ppo_clip, policy_gradient, gspo, gspo_token, gmpo, vespo, cispo, sapo, cpgd, clip_cov, kl_cov,
    dppo_tv, dppo_kl, or your own as package.module:function or path/to/file.py:function."""
    clip_low: float | None = None
    """How far below 1 the ratio may fall before the loss clips it (a token's ratio; a response's for gspo). None: the
    loss's own bound, which is 0.2 for ppo_clip, cpgd and clip_cov, 0.4 for gmpo (of the log ratio), 1 for cispo, 3e-4
    for gspo and gspo_token. A loss that does not clip refuses the option."""
    clip_high: float | None = None
    """How far above 1 the ratio may rise before the loss clips it. None: the loss's own bound, which is 0.2 for
    ppo_clip, cpgd and clip_cov, 0.4 for gmpo (of the log ratio), 4 for cispo, 4e-4 for gspo and gspo_token."""
    loss_args: tuple[str, ...] = ()
    """Further parameters of the loss as name=value, such as dual_clip=3 of ppo_clip."""
    selection_args: tuple[str, ...] = ()
    """Parameters of the choice of tokens that clip_cov (fraction=2e-4 low=1 high=5) and kl_cov (fraction=2e-3) treat
    differently. Tokens are chosen from the whole update."""
    entropy_fraction: float = option(
        1.0, above=0, at_most=1, wanted="it is a share of the tokens, more than 0 and at most 1"
    )
    """Share of an update's tokens whose policy loss counts: those of highest entropy. 1: all tokens count."""
    aggregation: str = "token_mean"
    """Mean over tokens and sequences: token_mean, sequence_mean, sequence_mean_token_sum, sequence_mean_token_sum_norm,
    or your own as package.module:function or path/to/file.py:function. The denominator always spans all ranks and
    micro-batches."""
    aggregation_args: tuple[str, ...] = ()
    """Parameters of the aggregation, such as length=1024 of sequence_mean_token_sum_norm."""
    correction: str = "none"
    """Weight of a token from the ratio of the trainer's probability to the engine's: none, tis, mis, icepop, reject, or
    your own as package.module:function or path/to/file.py:function."""
    correction_args: tuple[str, ...] = ()
    """Parameters of the correction, such as cap=2 of tis."""
    off_policy_mask: float = option(0.0, at_least=0)
    """Leave out the policy loss of a sequence with a negative advantage if the mean of log(engine / policy) over its
    tokens is above this (DeepSeek-V3.2). 0: leave out none. 0.5 is usual."""
    kl_coef: float = option(0.0, at_least=0)
    """Weight in the loss of the KL penalty to the frozen starting model. 0: load no reference model."""
    kl_estimator: str = option("k3", check=partial(check_needed, "algorithm.kl_estimator", "algorithm.kl_coef"))
    """Estimator of the KL to the reference per token: k1, k2, k3 (Schulman 2020), or your own as
    package.module:function or path/to/file.py:function. k1 needs --algorithm.kl_gradient kl."""
    kl_estimator_args: tuple[str, ...] = option(
        (), check=partial(check_needed, "algorithm.kl_estimator_args", "algorithm.kl_coef")
    )
    """Parameters of your own KL estimator as name=value."""
    kl_gradient: Literal["own", "kl"] = option(
        "own", check=partial(check_needed, "algorithm.kl_gradient", "algorithm.kl_coef")
    )
    """Gradient of the KL penalty. own: the gradient of the estimator. kl: the gradient of the KL itself."""
    kl_weighted: bool = option(False, check=partial(check_needed, "algorithm.kl_weighted", "algorithm.kl_coef"))
    """Multiply the KL of a token by the ratio of the policy loss, so that its estimate stays right in later updates of
    a step. With --algorithm.kl_gradient kl this is the estimate of DeepSeek-V3.2."""
    kl_target: float = option(0.0, at_least=0)
    """Target of the mean KL per trained token: kl_coef is adjusted after each step (Ziegler 2019). 0: it stays."""
    kl_horizon: int = option(
        10_000, above=0, check=partial(check_needed, "algorithm.kl_horizon", "algorithm.kl_target")
    )
    """Number of samples over which --algorithm.kl_target can change kl_coef by a fifth."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus in the loss."""
    entropy_target: float = option(0.0, at_least=0)
    """Mean entropy per trained token to aim for. Below it, entropy_coef grows by entropy_step after each step; above
    it, entropy_coef shrinks and is not applied (Skywork-OR1). 0: keep entropy_coef as given."""
    entropy_step: float = option(
        0.005, above=0, check=partial(check_needed, "algorithm.entropy_step", "algorithm.entropy_target")
    )
    """Change of entropy_coef per step if it has a target."""
    old_logprobs: Literal["recompute", "engine"] = "recompute"
    """The ratio's denominator. recompute: the trainer's forward before the update. engine: the engine's logprobs."""
    proximal: Literal["auto", "recompute", "interpolate", "sampler"] = "auto"
    """Policy that the clip compares with. recompute: the policy before the update. interpolate: a mean, by a token's
    age, of the policy that sampled and the one being updated; it needs no forward. Both weight a token by the ratio of
    this policy to the one that sampled (decoupled PPO), through --algorithm.correction, or tis if that is none.
    sampler: the policy that sampled. auto: recompute if an option of --rollout lets samples be older than the weights;
    otherwise the policy before the update, or for a surplus group of older weights the policy that sampled."""

    @property
    def is_decoupled(self) -> bool:
        """Whether the clip compares with another policy than the one that the correction weighs against."""
        return self.proximal in ("recompute", "interpolate")

    @property
    def used_correction(self) -> str:
        """The correction of the run: decoupled PPO has one."""
        return "tis" if self.is_decoupled and self.correction == "none" else self.correction

    @property
    def ratio_to(self) -> Literal["recompute", "engine", "interpolate"]:
        """Source of the ratio's denominator."""
        if self.proximal == "interpolate":
            return "interpolate"
        return "engine" if self.proximal == "sampler" else self.old_logprobs

    def check(self) -> None:
        """Raises ValueError for options that do not go together."""
        if self.is_decoupled and self.old_logprobs == "engine":
            raise ValueError(
                f"--algorithm.proximal {self.proximal} compares with another policy than the one that sampled, and "
                "--algorithm.old_logprobs engine with that one. Leave one of them out."
            )
        if self.kl_target and not self.kl_coef:
            raise ValueError(
                f"--algorithm.kl_target {self.kl_target} needs a --algorithm.kl_coef above 0 to start from: 0 times "
                "anything stays 0. Use 0.01."
            )
        if (self.kl_estimator, self.kl_gradient) == ("k1", "own"):
            raise ValueError(
                "--algorithm.kl_estimator k1 in the loss does not keep the policy near the reference: the mean of its "
                "own gradient is 0. Add --algorithm.kl_gradient kl, or use k2 or k3. PPO can have k1 in the reward "
                "(--algorithm.kl_in_reward k1)."
            )
        if self.entropy_target and self.entropy_coef < 0:
            raise ValueError(
                f"--algorithm.entropy_coef {self.entropy_coef} is negative, and --algorithm.entropy_target holds it in "
                "[0, 1]. Leave one of them out."
            )


@dataclass(kw_only=True, slots=True)
class PPOAlgorithmConfig(AlgorithmConfig):
    """What policy and critic learn."""

    advantage: str = "gae"
    """How rewards and values per token become advantages and returns: gae, returns_to_go, turn_returns, or your own as
    package.module:function or path/to/file.py:function."""
    advantage_args: tuple[str, ...] = ()
    """Parameters of the advantage as name=value, such as gamma=1 lam=0.95 of gae."""
    truncation: Literal["terminal", "bootstrap"] = "terminal"
    """What the critic's target assumes after a response that max_new_tokens cut off. terminal: no further reward.
    bootstrap: the critic's value of the last state."""
    kl_in_reward: Literal["none", "k1", "k2", "k3"] = "none"
    """Subtract kl_coef times this estimate of the KL from each token's reward, instead of adding it to the loss."""
    reward_normalization: Literal["none", "running"] = "none"
    """running: subtract the mean of all rewards of the run so far and divide by their standard deviation."""
    reward_clip: float = option(0.0, at_least=0)
    """Clip normalized rewards to [-reward_clip, reward_clip]. 0: do not clip."""
    reward_at: Literal["end", "turns"] = "end"
    """Token that gets a reward. end: the last of the sample. turns: what a turn earned, such as the reward of an
    environment's step, goes to the last token of the turn, and the rest to the end."""
    advantage_normalization: Literal["none", "whiten", "running"] = "whiten"
    """Subtract the mean of the advantages and divide by their standard deviation. whiten: over the tokens of the step.
    running: over the tokens of the run so far."""
    advantage_clip: float = option(0.0, at_least=0)
    """Clip normalized advantages to [-advantage_clip, advantage_clip]. 0: do not clip."""

    def check(self) -> None:
        """Raises ValueError for a KL in the reward that the other options contradict."""
        if self.kl_in_reward == "none":
            return
        if not self.kl_coef:
            raise ValueError(
                f"--algorithm.kl_in_reward {self.kl_in_reward} needs a --algorithm.kl_coef above 0. Use 0.01."
            )
        if (self.kl_estimator, self.kl_gradient, self.kl_weighted) != ("k3", "own", False):
            raise ValueError(
                "--algorithm.kl_estimator, --algorithm.kl_gradient and --algorithm.kl_weighted apply to the KL in the "
                f"loss, and --algorithm.kl_in_reward {self.kl_in_reward} takes it out of there. Leave them out."
            )

    def check_reward_at(self, rewards: Collection[str]) -> None:
        """Raises ValueError where rewards by turn are not what the samples are scored by."""
        if self.reward_at == "end":
            return
        if self.reward_normalization != "none" or self.reward_clip:
            raise ValueError(
                "--algorithm.reward_at turns gives turns what they earned, as it is: leave out "
                "--algorithm.reward_normalization and --algorithm.reward_clip, which change a sample's reward."
            )
        if "episode" not in rewards:
            raise ValueError(
                f"--algorithm.reward_at turns needs --reward episode, with no other weight than 1; it is "
                f"{' '.join(rewards)}. Only the rewards of an episode belong to turns."
            )


@dataclass(kw_only=True, slots=True)
class CriticConfig:
    """The critic of PPO and how it learns."""

    shared_backbone: bool = False
    """Use one model with two heads, one optimizer and one loss instead of a separate critic."""
    value_coef: float = option(1.0, above=0)
    """Weight of the value loss. On a shared backbone it is added to the policy's loss."""
    value_clip: float = option(0.2, at_least=0)
    """A value that has moved further than this towards its target since before the update gets no gradient. 0: do not
    clip."""
    head_init_std: float = option(0.0, at_least=0)
    """Standard deviation of a new value head's weights. 0: all values start at 0."""
    policy_frozen_steps: int = option(0, at_least=0)
    """Number of steps, from the first of the run, in which only the critic learns."""
    offload_waiting_optimizer: bool = False
    """Keep the policy's optimizer states in host memory while the critic learns, and vice versa."""

    def check(self) -> None:
        """Raises ValueError for options that a shared backbone cannot honour."""
        if self.shared_backbone and (self.policy_frozen_steps or self.offload_waiting_optimizer):
            raise ValueError(
                "--critic.shared_backbone has one model and one optimizer: --critic.policy_frozen_steps and "
                "--critic.offload_waiting_optimizer cannot go with it. To train the head alone first, which leaves the "
                "policy as it is, use --critic_warmup_steps."
            )


@dataclass(kw_only=True, slots=True)
class DynamicSamplingConfig:
    """Replacement of groups whose rewards are all equal (DAPO)."""

    enabled: bool = False
    """Drop groups whose rewards are all equal and sample more prompts, in rounds, until there are num_prompts groups
    (DAPO)."""
    max_rounds: int = option(
        5, at_least=1, check=partial(check_needed, "dynamic_sampling.max_rounds", "dynamic_sampling.enabled")
    )
    """Maximum number of rounds in a step. After the last one the step learns from the groups it has, even if none."""
    oversample: float = option(
        1.5,
        at_least=1,
        at_most=100,
        check=partial(check_needed, "dynamic_sampling.oversample", "dynamic_sampling.enabled"),
    )
    """Number of prompts that a round samples for each missing group."""
    carry_over: int = option(
        1, at_least=0, check=partial(check_needed, "dynamic_sampling.carry_over", "dynamic_sampling.enabled")
    )
    """Maximum number of steps for which a surplus group is kept for a later batch. 0: drop surplus groups. The ratio of
    their tokens is relative to the policy that sampled them."""
    reward: str = option("", check=partial(check_needed, "dynamic_sampling.reward", "dynamic_sampling.enabled"))
    """A reward whose values must differ too, such as math beside a length reward. Empty: only the sum must differ."""


@dataclass(kw_only=True, slots=True)
class OverlongConfig:
    """Treatment of responses that are long or cut off."""

    buffer: int = option(0, at_least=0)
    """Number of tokens before max_new_tokens over which a penalty on the reward grows linearly (DAPO). 0: none."""
    penalty: float = option(1.0, above=0, check=partial(check_needed, "overlong.penalty", "overlong.buffer"))
    """Penalty subtracted from the reward of a response that reaches max_new_tokens."""
    mask_truncated: bool = False
    """Leave responses that max_new_tokens cut off, and episodes that ended because the context was full, out of the
    loss. Their rewards still count in the means of their groups."""

    def check_buffer(self, longest: int, *, has_episodes: bool) -> None:
        """Raises ValueError for a buffer that is longer than a response, or where an episode has several."""
        if has_episodes:
            raise ValueError(
                "--overlong.buffer is about the length of a response, which an episode of --rollout.workflow lacks: "
                "--max_new_tokens is the limit of a turn. Leave it out, or count in the workflow's own reward."
            )
        if self.buffer > longest:
            raise ValueError(
                f"--overlong.buffer is {self.buffer}: it must be between 0 and --max_new_tokens {longest}."
            )


@dataclass(kw_only=True, slots=True)
class DistillationConfig:
    """How the policy follows --teacher_model."""

    kind: Literal["advantage", "loss"] = "advantage"
    """Where the reverse KL to the teacher is applied. advantage: to each token's advantage. loss: as a term of the
    loss."""
    coef: float = option(1.0, above=0)
    """Weight of the reverse KL to the teacher."""
    reward_weight: float = option(1.0, at_least=0)
    """Weight of the advantages that come from rewards. 0: follow the teacher alone."""


# ---- Data --------------------------------------------------------------------------------------------------------


def template_arguments(data: PromptFieldsConfig) -> dict[str, Any]:
    """Returns --data.chat_template_args as a dict."""
    return named_values(data.chat_template_args, "data.chat_template_args")


@dataclass(kw_only=True, slots=True)
class PromptFieldsConfig:
    """How a line of a data file becomes a prompt."""

    prompt_field: str = "prompt"
    """Field of a line that holds the prompt: a string, or a list of chat messages."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """Whether string prompts are rendered through the tokenizer's chat template. auto: if it has one."""
    chat_template_file: str = ""
    """File with a chat template (Jinja) to use instead of the tokenizer's. It is saved with the model."""
    chat_template_args: tuple[str, ...] = option((), check=template_arguments)
    """Variables of the chat template as name=value, such as enable_thinking=false."""
    image_field: str = "images"
    """Field with the path of an image or a list of paths, relative to the data file. Empty: read no images."""
    video_field: str = "videos"
    """Field with the path of a video or a list of paths: .npy arrays [frames, height, width, 3] of uint8, or animated
    .gif or .webp files. Empty: read no videos."""
    too_long: Literal["error", "skip"] = "error"
    """What happens to a line that is too long. error: the run stops at its start. skip: it is left out and counted."""
    stream: bool = option(False, resume="free")
    """Leave the training data on disk and read a line when it is drawn, for data larger than memory: .jsonl and
    .parquet files, folders and hf:. Every line is still checked at the start. Order and results stay the same."""


@dataclass(kw_only=True, slots=True)
class DataConfig(PromptFieldsConfig):
    """How a line of a data file becomes a prompt with an answer."""

    prompt_field: str = "prompt"
    """Field of a line that holds the prompt: a string, or a list of chat messages. If a line has no such field, its
    field "messages" is read."""
    answer_field: str = "answer"
    """Field that rewards compare a response with. Dots reach into nested fields, as in reward_model.ground_truth."""
    curriculum: str = ""
    """Function that weighs the prompts by the results so far, as package.module:function or path/to/file.py:function,
    or half_solved, which prefers prompts solved about half the time. Empty: every prompt once in each epoch."""

    def check_curriculum(self, *, is_recorded: bool) -> None:
        """Raises ValueError for a curriculum in a run whose prompts are those of a record."""
        if self.curriculum and is_recorded:
            raise ValueError(
                "--data.curriculum takes no part in --rollout.record and --rollout.from: leave one of them out."
            )


@dataclass(kw_only=True, slots=True)
class ExampleDataConfig(PromptFieldsConfig):
    """How a line of a data file becomes a prompt with its answers."""

    max_tokens: int = option(0, at_least=0)
    """Maximum length of prompt and answer together, in tokens. 0: the model's context."""


@dataclass(kw_only=True, slots=True)
class ResponseDataConfig(ExampleDataConfig):
    """How a line of a data file becomes a prompt with a response to imitate."""

    response_field: str = "response"
    """Field with the response to learn, a string. If a line has no such field, its field "messages" is read as a whole
    conversation."""
    train_on: Literal["all", "last"] = "all"
    """Turns of the assistant to learn from in a conversation: all but those of weight 0, or only the last."""


@dataclass(kw_only=True, slots=True)
class PairDataConfig(ExampleDataConfig):
    """How a line of a data file becomes a pair of answers."""

    chosen_field: str = "chosen"
    """Field with the preferred answer: a string, the assistant's messages after the prompt, or a whole conversation.
    Its last turn counts."""
    rejected_field: str = "rejected"
    """Field with the other answer, in the same form."""


@dataclass(kw_only=True, slots=True)
class MarginPairDataConfig(PairDataConfig):
    """How a line of a data file becomes a pair of answers with a margin."""

    margin_field: str = "margin"
    """Field with the margin by which the chosen answer should score higher. A line without it has margin 0."""


# ---- Rewards -------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class JudgeConfig:
    """The language model of the reward `judge`."""

    url: str = ""
    """Base URL of the judge's OpenAI-compatible interface, such as http://127.0.0.1:8000/v1."""
    model: str = ""
    """Model name to request."""
    prompt: str = ""
    """Prompt to the judge: a text, or @FILE, with {question}, {response} and {answer} in it. Empty: a built-in prompt
    that asks for a score from 0 to 10."""
    score_pattern: str = r'(?<!_)(?i:score)["*]*\s*[:\uff1a]["*\s]*(\d+(?:\.\d+)?)'
    """Regular expression whose first group is the score. The last match in the judge's reply counts."""
    max_score: float = option(10.0, above=0)
    """Score that gives the reward 1. A reply with a larger score gives no verdict."""
    api_key_env: str = ""
    """Environment variable that holds the API key. Empty: send no key."""
    temperature: float = option(0.0, at_least=0)
    """Sampling temperature of the judge."""
    max_tokens: int = option(1024, at_least=1)
    """Maximum length of a reply, in tokens."""
    timeout_s: float = option(30.0, above=0)
    """Timeout of one request, in seconds."""
    retries: int = option(3, at_least=0)
    """Number of further tries after a failure that may pass: no connection, timeout, HTTP 408, 409, 425, 429 and 5xx.
    The wait before a try is what the server asks for, or starts at 1 s and doubles, plus up to half of it at random."""


@dataclass(kw_only=True, slots=True)
class CodeConfig:
    """How the reward `code` runs the programs in responses."""

    unsafe: bool = option(False, resume="free")
    """Run programs without a sandbox, as your own user, where the system does not allow one. Without this option such a
    run is refused. SECURITY.md says what the sandbox promises."""


# ---- Looking on --------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class ProfileConfig:
    """What is recorded of the time that a run takes."""

    __slots__ = ()

    profile: str = option("", resume="free", check=check_profile)
    """Record where the time goes, in profile/ of the run's folder. timeline: the phases of every rank, in
    timeline.json. A step (3) or steps (3-5): also a trace of torch's profiler, and on a GPU a snapshot of its memory.
    Open traces with https://ui.perfetto.dev. Empty: record nothing."""


# ---- Sharing -----------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class SharingConfig:
    """What the samples of a prompt share."""

    __slots__ = ()

    share_prompts: Literal["auto", True, False] = option("auto", resume="free", check=check_sharing)
    """Compute a prompt once for all its samples in a micro-batch. Other common prefixes are shared, too. This saves
    time and memory, and changes results only by rounding (docs/shared_prompts.md). auto: on a CPU in float32, where
    options and models allow it. True: always, or stop with the reason; groups then stay together in micro-batches."""
