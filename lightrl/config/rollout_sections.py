"""Sampling, rewards, and the options --rollout.* and --eval.*: what makes a sample, when it is trained, evaluations."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightrl.config.options import check_needed, option, section
from lightrl.config.sections import CodeConfig, JudgeConfig
from lightrl.config.temperatures import ABOVE_ZERO, check_temperatures


@dataclass(kw_only=True)
class SamplingConfig:
    """How many responses are sampled, how, and how they are split into updates."""

    __slots__ = ()

    num_prompts: int = option(16, at_least=1, at_most=1_000_000)
    """Prompts per step, over all ranks."""
    group_size: int = option(16, at_least=1, at_most=1_000_000)
    """Samples per prompt."""
    num_minibatches: int = option(1, at_least=1, check=lambda config: _check_minibatches(config))
    """Optimizer steps per pass over a step's samples. The prompts are split evenly among them."""
    num_epochs: int = option(1, at_least=1)
    """Passes over a step's samples."""
    max_new_tokens: int = option(8, at_least=1)
    """Maximum length of a response, in tokens."""
    temperature: float = option(1.0, above=0, wanted=ABOVE_ZERO, check=check_temperatures)
    """Sampling temperature. The training logprobs are those of the same distribution."""
    stop: tuple[str, ...] = option((), check=lambda config: _check_stop(config.stop))
    """Texts that end a response besides the model's own end tokens. They apply to training and evaluation. The tokens
    up to the one that completes such a text are trained on, and rewards read the text with it."""


def _check_stop(texts: tuple[str, ...]) -> None:
    if "" in texts:
        raise ValueError("--stop has an empty text, which is in every response. Give texts of at least one character.")


def _check_minibatches(config: SamplingConfig) -> None:
    num_prompts, num_minibatches = config.num_prompts, config.num_minibatches
    if num_prompts % num_minibatches:
        low = num_prompts // num_minibatches * num_minibatches
        nearest = f"{low} or {low + num_minibatches}" if low else num_minibatches
        raise ValueError(
            f"--num_prompts {num_prompts} cannot be split evenly into --num_minibatches {num_minibatches}. Nearest "
            f"valid --num_prompts: {nearest}."
        )


@dataclass(kw_only=True, slots=True)
class ScheduleConfig:
    """When samples are started, and when they are trained."""

    over_issue: float = option(0.0, at_least=0, at_most=100)
    """Additional prompts to start at each step, as a share of num_prompts, such as 0.5. A step ends with the first
    num_prompts groups that may be trained; the others continue in the next step. 0: every step waits for all that it
    started."""
    partial: bool = True
    """How an unfinished group continues in the next step. True: its samples go on where they stopped, under the new
    weights. False: unfinished samples begin again at their prompt."""
    keep_cache: bool = False
    """Let samples that continue in the next step keep the keys and values of the weights that made them, instead of
    recomputing them under the new weights. This is faster, but no longer what the trainer computes (docs/schedules.md).
    Engine native, with --rollout.over_issue."""
    max_staleness: int = option(0, at_least=0, at_most=1000)
    """Maximum age of a group when it is trained, in steps since the weights that it was started under. A step waits for
    a group that would become older, unless --rollout.late says otherwise."""
    late: Literal["wait", "drop"] = option("wait")
    """What happens to a group that would become older than max_staleness. wait: a step waits for it. drop: no step
    waits for it; once it is too old it is dropped, and another prompt takes its place. Needs --rollout.over_issue or
    --rollout_ranks."""
    on_policy_min_ratio: float = option(0.0, at_least=0, at_most=1)
    """Share of a step's groups that must have been started under its own weights, such as 0.5; a step waits for them.
    Needs --rollout.late drop."""
    max_token_staleness: int = option(0, at_least=0)
    """Maximum age of a trained token, in steps since the weights that made it; older tokens are left out of the loss.
    0: no limit."""
    tail_batch: int = option(-1, at_least=-1)
    """What happens to slow groups. -1: nothing special. 0: a step waits for them. N: as soon as there are N of them, a
    step trains the oldest num_prompts groups, which have the engine to themselves."""
    tail_after: int = option(3, at_least=1)
    """Number of steps after which an unfinished group counts as slow."""
    agree_every: int = option(16, at_least=1)
    """Number of engine steps after which the ranks tell each other which groups are finished."""
    max_groups: int = option(0, at_least=0)
    """Maximum number of groups in progress at once, over all ranks. In a workflow without a schedule, only the episodes
    of this many groups run at once. 0: no limit."""
    filter: str = ""
    """Function of a scored group that returns whether it may be trained, as package.module:function or
    path/to/file.py:function, or unequal_rewards. A group that it rejects is replaced by another. Empty: all may be
    trained."""

    @property
    def is_scheduled(self) -> bool:
        """Whether samples are made by a schedule that carries them from step to step."""
        return self.samples_can_be_older or bool(self.filter)

    @property
    def samples_can_be_older(self) -> bool:
        """Whether samples may come from older weights than those of the step that learns from them."""
        return self.over_issue > 0 or self.max_staleness > 0

    def check(self) -> None:
        """Raises ValueError for options that do nothing or contradict each other."""
        if self.over_issue > self.max_staleness:
            raise ValueError(
                f"--rollout.over_issue {self.over_issue:g} starts groups that are trained in a later step, which "
                f"--rollout.max_staleness {self.max_staleness} allows for at most {self.max_staleness} times "
                f"num_prompts of them. Give --rollout.max_staleness {max(1, -int(-self.over_issue // 1))} or more."
            )
        defaults = ScheduleConfig()
        names = ("partial", "max_token_staleness", "tail_batch", "tail_after", "agree_every")
        given = [name for name in names if getattr(self, name) != getattr(defaults, name)]
        if given and not self.is_scheduled:
            raise ValueError(
                f"--rollout.{given[0]} does nothing in a run in which every step waits for all its samples. Give "
                "--rollout.over_issue and --rollout.max_staleness, or leave it out."
            )
        if self.tail_batch == -1 and self.tail_after != defaults.tail_after:
            raise ValueError("--rollout.tail_after does nothing without --rollout.tail_batch of 0 or above.")

    def check_late(self, *, has_own_ranks: bool) -> None:
        """Raises ValueError for --rollout.late drop where nothing becomes too old; with ranks that only generate."""
        if self.late == "wait":
            if self.on_policy_min_ratio:
                raise _needs_drop(self.on_policy_min_ratio)
            return
        if not (self.max_staleness if has_own_ranks else self.over_issue):
            needed = "--rollout.max_staleness above 0" if has_own_ranks else "--rollout.over_issue"
            raise ValueError(
                f"--rollout.late drop does nothing without {needed}: every step waits for all that it started."
            )
        if self.tail_batch >= 0:
            raise ValueError(
                f"--rollout.late drop drops the slow groups that --rollout.tail_batch {self.tail_batch} waits for: "
                "leave one of them out."
            )


def _needs_drop(ratio: float) -> ValueError:
    return ValueError(
        f"--rollout.on_policy_min_ratio {ratio:g} needs --rollout.late drop: without it old groups keep their places "
        "in a step."
    )


@dataclass(kw_only=True)
class RecordConfig:
    """The folder that keeps rollouts, or the one that they come from in place of an engine."""

    __slots__ = ()

    record: str = ""
    """Folder to which the scored groups of every step are written, as JSON lines and safetensors. Empty: none are
    kept."""
    record_only: bool = False
    """Sample and score without learning: the weights stay those of the start."""
    from_: str = ""
    """Folder that --rollout.record wrote, to learn from its groups. The run has no engine and does not evaluate."""

    @property
    def is_recorded(self) -> bool:
        """Whether the run writes or reads a record."""
        return bool(self.record or self.from_)

    def check(self) -> None:
        """Raises ValueError for options that do nothing or contradict each other."""
        if self.record_only and not self.record:
            raise ValueError("--rollout.record_only samples for a record: give its folder with --rollout.record.")
        if self.record and self.from_:
            raise ValueError("--rollout.from reads a record, so there is nothing to write: leave --rollout.record out.")

    def check_record(self, *, has_own_ranks: bool) -> None:
        """Raises ValueError for a record of rollouts that do not begin and end in a step of the training ranks."""
        if has_own_ranks:
            raise ValueError(
                "--rollout.record and --rollout.from take rollouts that begin and end in a step: leave out "
                "--rollout_ranks and the options that carry samples from step to step."
            )


@dataclass(kw_only=True, slots=True)
class WorkflowConfig(RecordConfig, ScheduleConfig):
    """How samples are made, scheduled and recorded."""

    workflow: str = ""
    """What makes a sample: environment; tools; multi_turn, which replies to wrong answers; remax, which subtracts the
    reward of a greedy response; agent, a program of yours that calls an OpenAI endpoint; verifiers, an environment of
    that package; serve, programs outside the run; or your own subclass of lightrl.Workflow as package.module:Class or
    path/to/file.py:Class. Empty: one response to the prompt."""
    workflow_args: tuple[str, ...] = ()
    """Arguments of the workflow as name=value, such as environment=my_module:MyEnvironment or
    environment=my_file.py:MyEnvironment, or tools=[my_module:add, my_module:search]."""
    max_turns: int = option(8, at_least=1)
    """Maximum number of turns of the policy in an episode. --max_new_tokens is the limit of a turn."""
    max_context_tokens: int = option(0, at_least=0)
    """Maximum length of an episode with its prompt, in tokens. 0: the model's context, or the tokens that a micro-batch
    may have if those are fewer."""
    episode_timeout_s: float = option(0.0, at_least=0)
    """Seconds after which an episode counts as failed. 0: no limit."""
    turn_wait_s: float = option(0.0, at_least=0, check=lambda config: _check_turn_wait(config))
    """Maximum number of seconds that the engine waits, before each of its steps, for episodes that are between two
    turns, such as in a tool or an agent's request. A schedule then does not depend on how long these take, not even
    after a resume (docs/schedules.md). 0: do not wait. Needs --rollout.over_issue."""

    def check(self) -> None:
        """Raises ValueError for options that do nothing."""
        names = ("workflow_args", "max_turns", "max_context_tokens", "episode_timeout_s")
        given = [name for name in names if getattr(self, name) != getattr(WorkflowConfig(), name)]
        if given and not self.workflow:
            raise ValueError(f"--rollout.{given[0]} does nothing without --rollout.workflow.")
        if self.max_groups and not (self.workflow or self.is_scheduled):
            raise ValueError(
                "--rollout.max_groups does nothing without --rollout.workflow in a run in which every step waits for "
                "all its samples: the engine limits how many it works on. Leave it out."
            )

    def check_reward(self, rewards: Sequence[str]) -> None:
        """Raises ValueError if --reward was left out with a workflow whose episodes bring rewards."""
        if self.workflow in ("environment", "verifiers") and tuple(rewards) == ("exact_match",):
            raise ValueError(
                f"--rollout.workflow {self.workflow} gives its episodes rewards, which --reward exact_match (the "
                "default) would not use. Give --reward episode to learn from them, or --reward exact_match=1 to "
                "compare the text of the episode with the answer all the same."
            )


def _check_turn_wait(config: WorkflowConfig) -> None:
    for switch in ("rollout.workflow", "rollout.over_issue"):
        check_needed("rollout.turn_wait_s", switch, config)


@dataclass(kw_only=True, slots=True)
class EvalScheduleConfig:
    """When a run evaluates, and by which metric it keeps its best model."""

    every: int = option(20, at_least=0)
    """Steps between evaluations. One more runs before the first step and one after the last. 0: never evaluate."""
    best: str = ""
    """Evaluation metric by which the best model is kept, such as eval/accuracy. When it improves on all earlier
    evaluations, the model is written to best/ in the run's folder. Higher is better, unless the name ends in loss;
    NAME:min and NAME:max override this. Empty: keep no best model."""

    @property
    def best_metric(self) -> str:
        """The name in --eval.best."""
        return self.best.removesuffix(":min").removesuffix(":max")

    @property
    def best_is_lowest(self) -> bool:
        """Whether a lower value of the metric is better."""
        return self.best.endswith((":min", "loss"))

    def check(self) -> None:
        """Raises ValueError for a best model that no evaluation can choose."""
        if self.best and not self.every:
            raise ValueError(f"--eval.best {self.best} needs evaluations, and --eval.every 0 makes none: raise it.")
        if self.best and not self.best_metric.startswith("eval/"):
            raise ValueError(
                f"--eval.best {self.best} is no metric of an evaluation, which begins with eval/: give one such as "
                "eval/accuracy, eval/reward, or eval/loss of runs that learn from answers."
            )


@dataclass(kw_only=True, slots=True)
class ExampleEvalConfig(EvalScheduleConfig):
    """Evaluation on examples."""

    max_examples: int = option(0, at_least=0)
    """Evaluate on this many examples, the first ones. 0: on all."""


@dataclass(kw_only=True, slots=True)
class EvalConfig(EvalScheduleConfig):
    """Evaluation on sampled responses."""

    temperature: float = option(1.0, at_least=0)
    """Sampling temperature of the evaluation. 0: greedy."""
    max_new_tokens: int = option(0, at_least=0)
    """Maximum length of a response, or of a turn of a workflow, in an evaluation. 0: --max_new_tokens."""
    top_p: float = option(1.0, above=0, at_most=1)
    """Draw from the likeliest tokens that together have this probability. 1: from all."""
    top_k: int = option(0, at_least=0)
    """Draw from this many of the likeliest tokens. 0: from all."""
    min_new_tokens: int = option(0, at_least=0)
    """Minimum length of a response, in tokens: no end token or stop string ends it earlier."""
    presence_penalty: float = option(0.0, at_least=-2, at_most=2)
    """Number subtracted from the logit of every token that the response already contains. 0: none."""
    frequency_penalty: float = option(0.0, at_least=-2, at_most=2)
    """Number subtracted from the logit of a token for each time that the response already contains it. 0: none."""
    repetition_penalty: float = option(1.0, above=0)
    """Number by which the positive logits of tokens that the prompt or the response already contains are divided, and
    the negative ones multiplied. 1: off."""
    max_prompts: int = option(0, at_least=0)
    """Evaluate on this many prompts, the first ones. 0: on all."""
    n: int = option(1, at_least=1)
    """Number of samples of each prompt."""
    k: tuple[int, ...] = option((), at_least=1)
    """Report pass@k for these k: the probability that at least one of k samples of a prompt is right, estimated from
    all n."""
    majority: bool = False
    """Report maj@N for --eval.n N: the accuracy of the answer that most of the N samples of a prompt give. Rewards
    exact_match, last_number, math and reasoning_gym read answers, and one of your own with answer_of(sample)."""
    majority_k: tuple[int, ...] = option((), at_least=1, check=lambda config: _check_majority_k(config))
    """Also report maj@k for these k: the accuracy of the answer that most of k samples of a prompt give, averaged over
    all choices of k of the n samples."""
    source_field: str = ""
    """Field of a line that names the source of its prompt, such as source; the metrics are then also reported for each
    source."""

    def check(self) -> None:
        """Raises ValueError for a k above n, and for several samples that are all the same."""
        if self.n < max(self.k, default=1):
            raise ValueError(
                f"--eval.k {max(self.k)} needs as many samples of a prompt, and --eval.n is {self.n}: raise it."
            )
        if self.n > 1 and not self.temperature:
            raise ValueError(
                f"--eval.temperature 0 gives {self.n} equal samples of a prompt: raise it, or leave --eval.n at 1."
            )
        if self.majority and self.n < 2:
            raise ValueError("--eval.majority needs several samples of a prompt: give --eval.n, such as 8.")
        if "maj@" in self.best and not self.majority:
            raise ValueError(f"--eval.best {self.best} is not evaluated: give --eval.majority True.")
        kind, _, number = self.best_metric.rpartition("/")[2].partition("@")
        options = {"pass": ("--eval.k", self.k), "avg": ("--eval.n", (self.n,))}
        options["maj"] = ("--eval.majority_k", (self.n, *self.majority_k))
        if kind in options and number not in map(str, options[kind][1]):
            raise ValueError(f"--eval.best {self.best} is not evaluated: give {options[kind][0]} {number}.")


def _check_majority_k(config: EvalConfig) -> None:
    check_needed("eval.majority_k", "eval.majority", config)
    if config.n < max(config.majority_k):
        raise ValueError(
            f"--eval.majority_k {max(config.majority_k)} needs as many samples of a prompt, and --eval.n is "
            f"{config.n}: raise it."
        )


_ANSWERING = ("exact_match", "last_number", "math", "reasoning_gym")  # built-in rewards that read answers


def check_eval(config: Any) -> None:
    """Raises ValueError for options of a run's evaluations that it cannot obey."""
    check_temperatures(config)
    if getattr(config.eval, "majority", False):
        names = [text.split("=")[0] for text in config.reward]
        if not any(name in _ANSWERING or ":" in name for name in names):
            raise ValueError(
                f"--eval.majority needs a reward that reads the answer of a response, and {', '.join(names)} does not: "
                f"use one of {', '.join(_ANSWERING)}, or your own with answer_of(sample)."
            )
    if config.eval.best:
        _check_best(config)


def _check_best(config: Any) -> None:
    """Raises ValueError if a run makes no evaluations that could choose a best model."""
    if getattr(getattr(config, "rollout", None), "from_", ""):
        raise ValueError("--eval.best needs evaluations, and --rollout.from makes none: leave it out.")
    built_in = re.findall(r"builtin:[\w-]+", config.train_data)
    if not config.eval_data and all(name.endswith("-heldout") for name in built_in):  # of which no part is held out
        raise ValueError(
            f"--eval.best needs evaluations, and --train_data {config.train_data} has no held-out part for them: give "
            "data for them by --eval_data."
        )


@dataclass(kw_only=True)
class RewardConfig:
    """How responses are scored."""

    __slots__ = ()

    reward: tuple[str, ...] = ("exact_match",)
    """Rewards, which are summed, each as name or name=weight. Names: exact_match, contains, last_number, math, format,
    length, code, reward_model, judge, reasoning_gym, episode (docs/rewards.md), or your own as package.module:function
    or path/to/file.py:function."""
    reward_args: tuple[str, ...] = ()
    """Parameters of rewards as reward.parameter=value (length.target=200)."""
    reward_for: tuple[str, ...] = ()
    """Records that a reward judges, as reward.field=value. Example: math.data_source=gsm8k code.data_source=apps.
    Several values for a field mean records with any of them. A reward without an entry judges all records."""
    reward_model: str = ""
    """Model of the reward reward_model. It is a folder or name of a sequence-classification model with one output."""
    reward_timeout_s: float = option(60.0, at_least=0)
    """Seconds after which the reward of a sample counts as failed. 0: no limit."""
    max_reward_failures: int = option(0, at_least=0, resume="free")
    """Number of failed rewards that a run tolerates in one scoring. A scoring is that of a step's samples, of a round
    of dynamic sampling, or of an evaluation, over all ranks. One more stops the run."""
    reward_failure_value: str = option("exclude", check=lambda config: _check_failure_value(config))
    """Value of a failed reward if the run goes on. It is a number, or exclude, which leaves the sample out of
    advantages, loss and evaluation."""
    reward_concurrency: int = option(32, at_least=1, resume="free")
    """Number of calls of an async reward that run at once on a rank."""
    reward_workers: int = option(2, at_least=1, resume="free")
    """Number of processes on a rank for isolated rewards, such as math."""
    judge: JudgeConfig = section(JudgeConfig)
    code: CodeConfig = section(CodeConfig)


def _check_failure_value(config: RewardConfig) -> None:
    value = config.reward_failure_value
    try:
        is_number = abs(float(value)) <= 1e30  # neither NaN nor infinity is
    except ValueError:
        is_number = False
    if not is_number:
        raise ValueError(f"--reward_failure_value is {value!r}: it must be a number, or exclude.")
