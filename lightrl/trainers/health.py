"""How a run reacts to steps with bad metrics: it warns, and stops after too many of them.

The metrics are the same on every rank, so all ranks decide alike. A run with only good steps calls only findings().
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from lightrl.comm import RankError
from lightrl.records import ScoredGroup
from lightrl.rollout.record import write_groups
from lightrl.trainers.observer import Observer
from lightrl.wording import counted

logger = logging.getLogger(__name__)

_PASSED_STEPS = 10  # steps without a warning, after which the same one is given again
_MOST_WITHOUT_SAMPLES = 10  # steps; weights that nothing trains will hardly make a workflow accept what it rejects
_REJECTED = "episode/filtered"


class UnhealthyRunError(RankError):
    """Raised after too many bad steps in a row."""


# ---- What is bad -----------------------------------------------------------------------------------------------------

_FINITE = ("loss", "grad_norm", "kl", "entropy", "reward/mean", "ratio/mean", "mismatch/mean_abs", "critic/loss")
_NONE_LEFT = {  # why a step may have no reward at all, by the metric that counts it
    "reward/failures": "no sample has a reward: {:.0f} rewards failed. Look at the first failures, which are logged "
    "above.",
    _REJECTED: "no sample is left to learn from: the workflow rejected {:.0f} of them by returning None. Let it reject "
    f"fewer: {_MOST_WITHOUT_SAMPLES} such steps in a row, or --health.max_bad_steps, end the run.",
    "rollout/filtered": "no group is left to learn from: --rollout.filter rejected {:.0f} of them. Let it reject "
    "fewer, and let --health.max_bad_steps end such a run.",
}
_SKIPPED = ("skipped_updates", "critic/skipped_updates")


class Limit(NamedTuple):
    """A bound on a metric, by the option that sets it."""

    metric: str
    option: str  # of --health.*
    is_bad: Callable[[float, Any], bool]  # of the metric
    text: str
    remedy: str

    def warning(self, metrics: Mapping[str, float], limits: Any) -> str:
        """Returns the warning about a step beyond the limit."""
        text = self.text.format(value=metrics[self.metric])
        return f"{text} (--health.{self.option} {getattr(limits, self.option):g}). {self.remedy}"


LIMITS = (
    Limit(
        "entropy",
        "min_entropy",
        lambda value, limits: value < limits.min_entropy,
        "the entropy of the policy has collapsed to {value:.3g}",
        "Raise --algorithm.entropy_coef or set --algorithm.entropy_target, lower --lr, or add --algorithm.kl_coef.",
    ),
    Limit(
        "reward/equal_groups",
        "max_equal_groups",
        lambda value, limits: value > limits.max_equal_groups,
        "{value:.1%} of the prompts got the same reward for all samples, which teach nothing",
        "Use prompts neither too easy nor too hard, a larger --group_size, or --dynamic_sampling.enabled True.",
    ),
    Limit(
        "mismatch/mean_abs",
        "max_mismatch",
        lambda value, limits: value > limits.max_mismatch,
        "the logprobs of the engine differ from the trainer's by {value:.3g} on average",
        "Compare the dtypes of engine and trainer, look at sync/canary_max_abs, and correct with "
        "--algorithm.correction tis.",
    ),
    Limit(
        "tokens/truncated",
        "max_truncated",
        lambda value, limits: value > limits.max_truncated,
        "{value:.1%} of the responses were cut off",
        "Raise --max_new_tokens (for episodes also --rollout.max_context_tokens), or check that the model's end token "
        "is the one that the chat template uses.",
    ),
    Limit(
        "episode/failed_share",
        "max_failed_episodes",
        lambda value, limits: value > limits.max_failed_episodes,
        "{value:.1%} of the episodes failed, and reward/mean is that of the others",
        "Read the first failure, which is logged above. An episode that should count as a bad one must end with a low "
        "reward in place of an error.",
    ),
    Limit(
        "tokens/response_mean",
        "min_response_tokens",
        lambda value, limits: value <= limits.min_response_tokens,
        "the responses have {value:.3g} tokens on average, and an empty one has its end token",
        "If they are empty, check the chat template and the reward, which may prefer that, or lower --lr. If one token "
        "is a whole response, set --health.min_response_tokens 0.",
    ),
)


def findings(metrics: Mapping[str, float], limits: Any) -> dict[str, str]:
    """Returns the problems of a step by metric, each a sentence with the number and a remedy.

    limits: the options --health.*; a run that samples no responses has none of those in LIMITS.
    """
    found = {name: _not_finite(name) for name in _FINITE if not math.isfinite(metrics.get(name, 0.0))}
    found |= {name: _skipped(metrics[name]) for name in _SKIPPED if metrics.get(name, 0.0) > 0}
    known = [limit for limit in LIMITS if limit.metric in metrics and hasattr(limits, limit.option)]
    found |= {item.metric: item.warning(metrics, limits) for item in known if item.is_bad(metrics[item.metric], limits)}
    if "reward/mean" not in metrics:
        found |= {name: text.format(metrics[name]) for name, text in _NONE_LEFT.items() if metrics.get(name, 0.0) > 0}
    return found


def _not_finite(name: str) -> str:
    return f"{name} is not finite. Look at the samples of the step and at the functions of your own that it comes from."


def _skipped(share: float) -> str:
    return (
        f"{share:.1%} of the updates were skipped on all ranks, for the reason logged above. If there was nothing to "
        "train, look at what leaves samples out: failed rewards, a filter or --overlong.mask_truncated. If a number "
        "was not finite, lower --lr or --optim.max_norm, or look at the loss and the reward for a division by 0."
    )


# ---- Reactions -------------------------------------------------------------------------------------------------------


class BadSteps(Observer):
    """Warns when a problem begins in the steps of a run, and stops the run after too many bad steps."""

    def __init__(self, trainer: Any) -> None:
        self.count = 0  # in a row
        self._trainer = trainer
        self._found: Mapping[str, str] = {}  # in the last step
        self._last_seen: dict[str, int] = {}  # step of each kind
        self._empty_steps: list[int] = []  # the latest in a row of which the workflow rejected every sample
        self._groups: Sequence[ScoredGroup] | None = None  # of the last step, if it was told of them

    def see(self, problems: Mapping[str, str]) -> None:
        """Takes the findings of a step; raises UnhealthyRunError on every rank after too many bad steps in a row."""
        self._found, allowed = problems, self._trainer.config.health.max_bad_steps
        self._warn()
        if allowed:
            self._count(allowed)
        elif self._found.keys() & _NONE_LEFT.keys() == {_REJECTED}:  # neither a judge nor a filter has a share in it
            self._require_samples(self._trainer.step_index)

    def _warn(self) -> None:
        step = self._trainer.step_index
        for name in sorted(self._found):
            seen, self._last_seen[name] = self._last_seen.get(name), step
            is_new = seen is None or step - seen > _PASSED_STEPS
            if is_new and self._trainer.strategy.comm.is_main:
                logger.warning("Step %d: %s", step, _capital(self._found[name]))

    def _count(self, allowed: int) -> None:
        self.count = self.count + 1 if self._found else 0
        if self._trainer.strategy.comm.any(self.count >= allowed):
            self._stop()

    def _require_samples(self, step: int) -> None:
        self._empty_steps = [*(self._empty_steps if self._empty_steps[-1:] == [step - 1] else []), step]
        if len(self._empty_steps) >= _MOST_WITHOUT_SAMPLES:
            told = (
                f"The workflow has left no sample in {_MOST_WITHOUT_SAMPLES} steps in a row, so nothing was trained: "
                "it rejected all by returning None. Let it reject fewer, or allow more such steps by "
                "--health.max_bad_steps."
            )
            raise UnhealthyRunError(
                told if self._trainer.strategy.comm.is_main else "the run was stopped; rank 0 says why"
            )

    def after_rollouts(self, groups: Sequence[ScoredGroup]) -> None:
        """Keeps the groups that the trainer learns from, as they may be the last batch before the run stops."""
        self._groups = groups

    def _stop(self) -> NoReturn:
        comm, root, step = self._trainer.strategy.comm, self._trainer.folder.root, self._trainer.step_index
        replay = ""
        if self._groups is not None:
            with comm.phase("writing the batch", local=True):
                write_groups(batches_of(root), step - 1, self._groups, rank=comm.rank, world=comm.world)
            replay = f" Its batch is in {batches_of(root)}: `lightrl replay {root} --step {step}` repeats it."
        reasons = " ".join(_capital(text) for _, text in sorted(self._found.items()))
        told = f"{counted(self.count, 'bad step')} in a row, as many as --health.max_bad_steps allows. "
        told += f"Step {step}: {reasons}"
        raise UnhealthyRunError(told + replay if comm.is_main else "the run was stopped; rank 0 says why")


def _capital(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}"


def batches_of(run: Path) -> Path:
    """Returns the folder in which a run keeps the batches of the steps that made it stop."""
    return run / "bad_batches"


def bad_steps(trainer: Any) -> BadSteps:
    """Returns the trainer's counter of bad steps, as the observer that keeps the last batch."""
    made: BadSteps = trainer.bad_steps
    return made
