"""Diagnoses the curves of a run: bad steps, a reward that stopped rising, and what changed at that time.

Every finding contains the numbers that it is based on, and what to try next.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from lightrl.config.health_section import GroupHealthConfig, RolloutHealthConfig
from lightrl.report.run_files import RunFiles
from lightrl.report.suspicion import paid_wrongly
from lightrl.trainers.health import findings as findings_of_step
from lightrl.wording import counted

_FEWEST = 9  # steps that a trend needs
_RUINED = "One update ruined the policy"
_OF_PPO = "critic.value_coef"  # the option of a run that learns from groups of equal rewards, too
_RISE = 0.05  # share of the reward's range below which a change does not count


class Finding(NamedTuple):
    """A sentence about a run."""

    level: Literal["good", "note", "warning"]
    title: str
    text: str
    metric: str = ""  # name of the metric whose curve shows it


class Change(NamedTuple):
    """The values of a metric in the first third of a run, and after the reward stopped rising."""

    early: float
    late: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Evidence:
    """The evidence by which the causes of a plateau are judged."""

    run: RunFiles
    change: Mapping[str, Change]  # by metric
    best: float  # the highest reward that a sample can have, as far as the log shows
    has_risen: bool  # by more than the reward varies from step to step
    has_fallen: bool  # clearly below its highest value
    since: int  # the step at which the reward stopped rising

    def option(self, name: str, default: float = 0.0) -> float:
        value = self.run.config.get(name)
        return float(value) if isinstance(value, int | float) else default


def diagnose(run: RunFiles) -> list[Finding]:
    """Returns the findings about a run, beginning with the trend of the reward."""
    trend, bad = [*_trend(run)], [*_bad_steps(run)]
    ruined = _ruined_at(run) if any(finding.title == _RUINED for finding in trend) else None
    if ruined is not None:
        bad = _with_consequences(bad, run.values("reward/mean")[ruined][0])
    findings = [item.finding for item in bad]
    return [*trend, *findings, *(Finding("note", "Damaged log", text) for text in run.damaged)]


# ---- Bad steps -------------------------------------------------------------------------------------------------------


class _Bad(NamedTuple):
    """A kind of --health.* warning, and the steps at which it occurred."""

    metric: str
    steps: Sequence[int]
    finding: Finding


def _with_consequences(bad: Sequence[_Bad], step: int) -> list[_Bad]:
    """Merges the warnings that appeared only after the policy was ruined at a step into one sentence."""
    after = [item for item in bad if min(item.steps) >= step]
    if not after:
        return [*bad]
    told = "; ".join(f"{item.metric} ({_spans(item.steps)})" for item in after)
    text = f"Bad steps of {told}. They most likely come from that update: fix that first."
    follows = Finding("note", "What followed", text, after[0].metric)
    return [*(item for item in bad if item not in after), _Bad("", [], follows)]


def _bad_steps(run: RunFiles) -> Iterator[_Bad]:
    """Yields the warnings of --health.*, each kind once with its steps."""
    limits = RolloutHealthConfig() if _OF_PPO in run.config else GroupHealthConfig()
    for item in dataclasses.fields(limits):
        value = run.config.get(f"health.{item.name}")
        if isinstance(value, int | float):
            setattr(limits, item.name, value)
    steps: dict[str, list[int]] = {}
    texts: dict[str, str] = {}
    for row in run.metrics:
        numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
        missing = {name: float("nan") for name, value in row.items() if value is None}
        for name, text in findings_of_step(numbers | missing, limits).items():
            steps.setdefault(name, []).append(row["step"])
            texts[name] = text
    for name, bad in sorted(steps.items(), key=lambda pair: -len(pair[1])):
        title = f"{name} is bad in {counted(len(bad), 'step')} ({_spans(bad)})"
        yield _Bad(name, bad, Finding("warning", title, f"Last: {texts[name]}", name))


def _spans(steps: Sequence[int]) -> str:
    """Formats ascending numbers as ranges, such as 1-3, 7, 9-12."""
    spans: list[list[int]] = []
    for step in steps:
        if spans and step == spans[-1][-1] + 1:
            spans[-1][1:] = [step]
        else:
            spans.append([step])
    shown = [f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans]
    return ", ".join(shown[:4]) + (", ..." if len(shown) > 4 else "")


# ---- The trend of the reward -----------------------------------------------------------------------------------------


def _trend(run: RunFiles) -> Iterator[Finding]:
    rewards = run.values("reward/mean")
    if len(rewards) < _FEWEST:
        return
    smooth = smoothed([value for _, value in rewards])
    spread = max(smooth) - min(smooth)
    noise = _noise([value for _, value in rewards], smooth)
    first, last = f"{smooth[0]:.3g}", f"{smooth[-1]:.3g}"
    has_fallen = spread > _flat(noise) and max(smooth) - smooth[-1] > max(0.2 * spread, 4 * noise)
    if spread <= _flat(noise):
        title = "The reward never rose"
        text = f"It stays within {min(smooth):.3g} and {max(smooth):.3g}, as much as it varies from step to step."
        if not spread:
            text = f"It is {first} in every step."
        start = 0
    elif has_fallen:
        top = smooth.index(max(smooth))
        title = f"The reward fell after step {rewards[top][0]}"
        rise = f"rose from {first} to {max(smooth):.3g}" if top else f"was highest at the start, {first},"
        text = f"It {rise} and ended at {last} (smoothed)."
        start = top
    else:
        start = plateau(smooth, noise)
        if start >= 0.8 * len(smooth):
            yield Finding("good", "The reward was still rising", f"From {first} to {last}. Train for more steps.")
            return
        title = f"The reward stopped rising at about step {rewards[start][0]}"
        text = f"It rose from {first} to {smooth[start]:.3g} by then, and ended at {last} (smoothed)."
    evidence = _evidence(run, rewards[start][0], has_risen=spread > _flat(noise), has_fallen=has_fallen)
    solved = _near_the_top(evidence)
    yield Finding("note" if solved else "warning", title, text, "reward/mean")
    told = (_paid_wrongly(evidence), solved, _gap_to_evaluation(evidence)) if solved else _causes(evidence)
    causes = [cause for cause in told if cause]
    yield from causes
    if not causes:
        yield Finding("note", "No cause stands out", _NO_CAUSE)


_NO_CAUSE = (
    "Entropy, groups, gradients, lengths and mismatch look as they should. Read samples of the last steps, sorted by "
    "reward, and compare with a run of another --lr or --seed."
)


def smoothed(values: Sequence[float]) -> list[float]:
    """Returns the moving average of the values, over windows of a tenth of the run."""
    half = max(1, len(values) // 20)
    return [statistics.fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def _noise(values: Sequence[float], smooth: Sequence[float]) -> float:
    """Returns the standard error of a smoothed value."""
    width = 2 * max(1, len(values) // 20) + 1
    spread = statistics.pstdev([value - mean for value, mean in zip(values, smooth, strict=True)])
    return float(spread / width**0.5)


def _flat(noise: float) -> float:
    """Returns the range that a smoothed curve may have by chance."""
    return max(6 * noise, 1e-9)


def plateau(smooth: Sequence[float], noise: float) -> int:
    """Returns the index after which a curve rises no further, apart from small changes."""
    margin = max(_RISE * (max(smooth) - min(smooth)), 2 * noise)
    return next(index for index, value in enumerate(smooth) if max(smooth[index:]) - value <= margin)


def _evidence(run: RunFiles, since: int, *, has_risen: bool, has_fallen: bool) -> _Evidence:
    rewards = run.values("reward/mean")
    before, last = rewards[0][0] - 1, rewards[-1][0]  # a run that branched off another one begins late
    third = (last - before) // 3
    early_end, late_start = before + max(1, third), max(since, last - max(3, third))
    change = {}
    for metric in run.metric_names:
        pairs = run.values(metric)
        early = [value for step, value in pairs if before < step <= early_end]
        late = [value for step, value in pairs if step >= late_start]
        if early and late:
            change[metric] = Change(statistics.fmean(early[: max(3, len(early) // 3)]), statistics.fmean(late))
    sampled = [item["reward"] for item in run.samples if isinstance(item.get("reward"), int | float)]
    best = max([*sampled, *(value for _, value in rewards)])
    return _Evidence(run=run, change=change, best=best, has_risen=has_risen, has_fallen=has_fallen, since=since)


def _causes(evidence: _Evidence) -> Iterator[Finding]:
    collapse = _collapse(evidence)
    if collapse is not None:
        yield collapse
        return  # anything odd after that is a consequence
    is_explained = False
    for cause in _CAUSES:
        found = cause(evidence)
        if found is not None:
            yield found
            is_explained = True
            if cause in _EXPLAIN_THE_REST:
                return
    if evidence.has_fallen and not is_explained:
        yield _lost(evidence)


def _ruined_at(run: RunFiles) -> int | None:
    """Returns the index at which the reward fell suddenly and for good, if it did."""
    rewards = [value for _, value in run.values("reward/mean")]
    for index in range(1, len(rewards) - _FEWEST // 2):
        before, since = rewards[index - 1], statistics.fmean(rewards[index:])
        if before >= 0.5 * max(rewards) > 0 and max(rewards[index], since) <= 0.3 * before:
            return index
    return None


def _collapse(evidence: _Evidence) -> Finding | None:
    index = _ruined_at(evidence.run)
    if index is None:
        return None
    steps, rewards = zip(*evidence.run.values("reward/mean"), strict=True)
    since = statistics.fmean(rewards[index:])
    told = (
        f"It was {rewards[index - 1]:.3g} in step {steps[index - 1]}, {rewards[index]:.3g} in step {steps[index]}, and"
    )
    remedy = f"Lower --lr (here {evidence.option('lr'):g}), and go on from a checkpoint before it."
    return Finding(
        "warning",
        _RUINED,
        f"{told} {since:.3g} on average since: the update between them changed the policy too much. {remedy}",
        "reward/mean",
    )


def _lost(evidence: _Evidence) -> Finding:
    told = f"Nothing else stands out. Then --lr (here {evidence.option('lr'):g}) is most often too high:"
    remedy = f"try a third of it, and go on from a checkpoint before step {evidence.since}."
    return Finding("warning", "What was learnt is lost again", f"{told} {remedy}", "reward/mean")


def _paid_wrongly(evidence: _Evidence) -> Finding | None:
    paid = paid_wrongly(evidence.run.samples)
    return paid and Finding("warning", paid.title, paid.text, "reward/mean")


def _still_rises(evidence: _Evidence) -> Finding | None:
    metric = "eval/reward" if evidence.run.values("eval/reward") else "eval/accuracy"
    values = evidence.run.values(metric)
    since = [(step, value) for step, value in values if step >= evidence.since]
    if evidence.has_fallen or not evidence.has_risen or len(since) < 2:
        return None
    (step, before), (_, last) = since[0], since[-1]
    numbers = [value for _, value in values]
    if last < max(numbers) or last - before <= _RISE * (max(numbers) - min(numbers)):
        return None
    told = f"{metric} rose from {before:.3g} at step {step} to {last:.3g}. The reward depends on a step's prompts too:"
    remedy = "train for more steps, or raise --num_prompts."
    return Finding("note", "The evaluation still rises", f"{told} {remedy}", metric)


def _equal_groups(evidence: _Evidence) -> Finding | None:
    change, reward = evidence.change.get("reward/equal_groups"), evidence.change["reward/mean"]
    if change is None or change.late < 0.75 or _OF_PPO in evidence.run.config:
        return None
    is_solved = reward.late > 0.5 * evidence.best > 0
    remedy = (
        "Most prompts are solved: use harder ones, or let --dynamic_sampling.enabled True draw others."
        if is_solved
        else "Most prompts are never solved: use easier ones, a larger --group_size, or teach the format first by sft."
    )
    told = f"In {change.late:.0%} of the groups all samples have the same reward (early: {change.early:.0%}): their"
    return Finding("warning", "Few groups teach anything", f"{told} advantages are 0. {remedy}", "reward/equal_groups")


def _near_the_top(evidence: _Evidence) -> Finding | None:
    late = evidence.change["reward/mean"].late
    if evidence.best <= 0 or late < 0.85 * evidence.best:
        return None
    told = f"The mean is {late:.3g}, and the highest reward of a sample that the log shows is {evidence.best:.3g}."
    return Finding("good", "There is little left to gain", f"{told} Only harder prompts can show more.", "reward/mean")


def _entropy(evidence: _Evidence) -> Finding | None:
    change = evidence.change.get("entropy")
    if change is None or change.early <= 0 or change.late > 0.5 * change.early:
        return None
    told = f"Entropy fell from {change.early:.3g} to {change.late:.3g}: samples of a prompt are nearly the same."
    remedy = "Raise --temperature or --algorithm.entropy_coef, or --algorithm.clip_high (0.28 in configs/dapo.yaml)."
    return Finding("warning", "The policy explores little", f"{told} {remedy}", "entropy")


def _learning_rate(evidence: _Evidence) -> Finding | None:
    highest = max((value for _, value in evidence.run.values("lr")), default=0.0)
    change = evidence.change.get("lr")
    if change is None or not highest or change.late > 0.2 * highest:
        return None
    told = f"It was {change.late:.3g} on average after the reward stopped, and {highest:.3g} at its highest."
    return Finding("warning", "The learning rate had decayed", f"{told} See --optim.schedule and --max_steps.", "lr")


def _clipping(evidence: _Evidence) -> Finding | None:
    change = evidence.change.get("clip_fraction")
    if change is None or change.late < 0.2:
        return None
    told = f"The clip removes the gradient of {change.late:.0%} of the tokens (early: {change.early:.0%})."
    return Finding("warning", "Updates are clipped", f"{told} Lower --lr or --num_epochs.", "clip_fraction")


def _mismatch(evidence: _Evidence) -> Finding | None:
    change = evidence.change.get("mismatch/mean_abs")
    if change is None or change.late < 0.02:
        return None
    told = f"Their logprobs differ by {change.late:.3g} on average (early: {change.early:.3g}): samples come from"
    remedy = "Compare the dtypes, look at sync/canary_max_abs, and use --algorithm.correction tis."
    return Finding("warning", "Engine and trainer drift apart", f"{told} another policy. {remedy}", "mismatch/mean_abs")


def _cut_off(evidence: _Evidence) -> Finding | None:
    change = evidence.change.get("tokens/truncated")
    if change is None or change.late < 0.15:
        return None
    longest = evidence.option("max_new_tokens")
    told = f"{change.late:.0%} of the responses end at --max_new_tokens {longest:g} (early: {change.early:.0%})."
    remedy = "Raise it if their texts are to the point, or teach shorter ones by --overlong.buffer."
    return Finding("warning", "Responses are cut off", f"{told} {remedy}", "tokens/truncated")


def _all_cut_off(evidence: _Evidence) -> Finding | None:
    change = evidence.change.get("tokens/truncated")
    return None if change is None or min(change) < 0.9 else _cut_off(evidence)


def _lengths(evidence: _Evidence) -> Finding | None:
    change = evidence.change.get("tokens/response_mean")
    if change is None or not change.early or 0.5 < change.late / change.early < 2:
        return None
    told = f"From {change.early:.3g} to {change.late:.3g} tokens. Read samples: the reward may favour length."
    return Finding("note", "Responses changed their length", told, "tokens/response_mean")


def _held_back(evidence: _Evidence) -> Finding | None:
    change, coefficient = evidence.change.get("kl"), evidence.option("algorithm.kl_coef")
    if change is None or not coefficient or coefficient * change.late < 0.01:
        return None
    told = f"The KL to the starting model is {change.late:.3g} per token, and --algorithm.kl_coef is {coefficient:g}."
    return Finding("note", "The KL term holds the policy back", f"{told} Lower the coefficient.", "kl")


def _unmoved(evidence: _Evidence) -> Finding | None:
    norm = evidence.change.get("grad_norm")
    watched = [name for name in ("entropy", "tokens/response_mean") if name in evidence.change]
    if evidence.has_risen or not watched or norm is None or not norm.late:
        return None
    if any(_has_moved([value for _, value in evidence.run.values(name)]) for name in watched):
        return None
    stays = ", ".join(
        f"{name} {evidence.change[name].early:.3g} to {evidence.change[name].late:.3g}" for name in watched
    )
    told = f"Nothing but chance changes ({stays}), though the gradients have a norm of {norm.late:.3g}."
    lr = evidence.option("lr")
    remedy = f"Raise --lr (here {lr:g}) tenfold. If that changes nothing, the reward does not depend on what is learnt."
    return Finding("warning", "The policy hardly changes", f"{told} {remedy}", watched[0])


def _has_moved(values: Sequence[float]) -> bool:
    """Returns whether the means of the first and the last third differ by more than chance explains."""
    third = len(values) // 3
    if third < 2:
        return True  # too few values to say that nothing changed
    first, last = values[:third], values[-third:]
    error = ((statistics.variance(first) + statistics.variance(last)) / third) ** 0.5
    return bool(abs(statistics.fmean(first) - statistics.fmean(last)) > 3 * error)


def _failures(evidence: _Evidence) -> Finding | None:
    change = evidence.change.get("reward/failures")
    if change is None or not change.late:
        return None
    told = f"{change.late:.3g} rewards fail in a step (early: {change.early:.3g}); the run's log has the first ones."
    return Finding("warning", "Rewards fail", told, "reward/failures")


def _gap_to_evaluation(evidence: _Evidence) -> Finding | None:
    metric = "eval/reward" if evidence.run.values("eval/reward") else "eval/accuracy"
    values = [value for _, value in evidence.run.values(metric)]
    change = evidence.change["reward/mean"]
    if len(values) < 3 or max(values) - values[-1] <= 0.1 * abs(max(values)) or change.late <= change.early:
        return None
    told = f"{metric} fell from {max(values):.3g} to {values[-1]:.3g} while the reward in training rose."
    remedy = "The policy may exploit the reward or know the training prompts: read the suspicious samples."
    return Finding("warning", "Training and evaluation part", f"{told} {remedy}", metric)


_CAUSES: Sequence[Callable[[_Evidence], Finding | None]] = (
    _all_cut_off,
    _paid_wrongly,
    _held_back,
    _unmoved,
    _equal_groups,
    _entropy,
    _gap_to_evaluation,
    _learning_rate,
    _clipping,
    _mismatch,
    _cut_off,
    _lengths,
    _failures,
    _still_rises,
)
_EXPLAIN_THE_REST = (_all_cut_off, _paid_wrongly, _unmoved)


def summary(run: RunFiles) -> dict[str, Any]:
    """Returns the key figures of a run, which a reader asks for first."""
    told: dict[str, Any] = {"steps": run.metrics[-1]["step"] if run.metrics else 0}
    for metric in ("reward/mean", "eval/accuracy", "eval/reward", "loss"):
        values = run.values(metric)
        if values:
            told[metric] = f"{values[0][1]:.3g} to {values[-1][1]:.3g}"
    seconds = sum(value for _, value in run.values("time/step"))
    told["time in steps"] = f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 3600:.2f} h"
    return told
