"""Repeats one step of a run (`lightrl replay RUN --step N`), bit for bit on as many ranks, or in a debugger."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightrl.checkpoint import CheckpointDirectory
from lightrl.config import GRPOConfig, LateMistakeError, RolloutConfig, exit_with_user_error
from lightrl.rollout.record import step_folder
from lightrl.trainers.earlier_run import read_rows
from lightrl.trainers.fit import StepReport, Trainer, run_program
from lightrl.trainers.health import batches_of
from lightrl.trainers.recorded import learn_from_record
from lightrl.wording import counted

_NOT_COMPARED = ("time/", "memory/", "sync/", "eval/", "step", "tokens/per_second")


def repeat_step(
    build: Callable[[Any], Trainer],
    read_options: Callable[[list[str]], RolloutConfig],
    run: Path,
    *,
    step: int,
    is_debugged: bool = False,
) -> int:
    """Repeats a step, counted from 1, from the newest checkpoint before it; returns 1 if its metrics differ, else 0.

    Args:
        build: Makes the trainer of the run from its options.
        read_options: Returns the run's options with additional arguments.
        is_debugged: Whether to enter the debugger before the step.
    """
    wanted = _metrics_of(run, step)
    before = [done for done in CheckpointDirectory(run / "checkpoints", keep=1).steps() if done < step]
    resumed = ["--resume", str(CheckpointDirectory(run / "checkpoints", keep=1).path(before[-1]))] if before else []
    # A trainer that a program created itself shares no prompts, whatever its config.yaml says.
    whole = [] if "tokens/computed_share" in wanted or not wanted else ["--share_prompts", "False"]
    different: list[str] = []

    with tempfile.TemporaryDirectory(prefix="lightrl-step-") as folder:

        def repeat(trainer: Trainer) -> None:
            if trainer.config.rollout.record:  # that of the run stays as it is
                trainer.config.rollout.record = str(Path(folder) / "record")
            different.extend(_repeat(trainer, run, step, wanted, is_debugged=is_debugged))

        options = read_options(["--output_dir", str(Path(folder) / "run"), "--log.to=", *resumed, *whole])
        run_program(build, options, act=repeat)
    return int(bool(different))


def _repeat(trainer: Trainer, run: Path, step: int, wanted: Mapping[str, Any], *, is_debugged: bool) -> list[str]:
    if trainer.step_index >= step:
        raise LateMistakeError(
            f"--step {step}: the run begins after step {trainer.step_index}, in {trainer.run.checkpoint}, and has no "
            f"checkpoint before that step. Name a later step, or give an earlier checkpoint by --resume."
        )
    _say(trainer, f"step {step} of {run}, from {trainer.run.checkpoint or 'the start'}")
    while trainer.step_index < step - 1:
        trainer.step()
        trainer.finish_step()
    if is_debugged:
        breakpoint()
    record = batches_of(run)
    has_batch = step_folder(record, step - 1).is_dir()
    report = _learn_again(trainer, record) if has_batch else trainer.step()
    trainer.finish_step()
    different = differences(wanted, report.metrics)
    if not wanted:
        _say(trainer, f"{run} has no metrics of step {step} to compare with")
    elif different:
        _say(trainer, "\n".join(["not repeated to the bit:", *different, *_reason(trainer.config.rollout.workflow)]))
    else:
        _say(
            trainer, f"step {step} was repeated to the bit: {len(_compared(wanted, report.metrics))} metrics are equal"
        )
    return different


def _reason(workflow: str) -> list[str]:
    """Returns a line on why a step with a workflow may differ although nothing is wrong."""
    if not workflow:
        return []
    return [
        f"Episodes of --rollout.workflow {workflow} that wait for something outside the engine, such as the requests "
        "of an agent, share other engine steps each time, so that small differences are rounding."
    ]


def _learn_again(trainer: Any, record: Path) -> StepReport:
    """Learns from a kept batch, which lacks the groups that dynamic sampling drew but did not use."""
    config = trainer.config
    draws_more = isinstance(config, GRPOConfig) and config.dynamic_sampling.enabled
    return learn_from_record(trainer, record, has_whole_rollout=not draws_more)


def differences(wanted: Mapping[str, Any], found: Mapping[str, float]) -> list[str]:
    """Returns a line for each metric that differs; a null in a file means a number that is not finite."""
    numbers = {name: found[name] if math.isfinite(found[name]) else None for name in _compared(wanted, found)}
    return [f"{name} was {wanted[name]}, now {new}" for name, new in numbers.items() if new != wanted[name]]


def _compared(wanted: Mapping[str, Any], found: Mapping[str, float]) -> list[str]:
    return sorted(name for name in wanted.keys() & found.keys() if not name.startswith(_NOT_COMPARED))


def _metrics_of(run: Path, step: int) -> dict[str, Any]:
    """Returns the metrics of a step; ends the program for one beyond the next, which would take new steps first."""
    rows = read_rows(run / "metrics.jsonl")
    last = max((int(row["step"]) for row in rows), default=0)
    if rows and step > last + 1:
        told = f"--step {step}: {run} has {counted(last, 'step')}, so replay takes at most {last + 1}, the next one."
        exit_with_user_error(ValueError(told))
    found: dict[str, Any] = next((row for row in reversed(rows) if row["step"] == step), {})
    return found


def _say(trainer: Trainer, text: str) -> None:
    if trainer.strategy.comm.is_main:
        sys.stdout.write(f"{text}\n")
