"""Makes samples with a text and an answer, for the tests of rewards."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import numpy
from made_samples import made_sample

from lightrl.records import FinishReason, Prompt, Sample
from lightrl.rewards import NoVerdictError, isolated_reward
from lightrl.rewards.reward_set import make_runner
from lightrl.rewards.scoring import FailureBudget, ScoringLimits


def answered(
    text: str,
    answer: Any = None,
    *,
    position: int = 0,
    sample_index: int = 0,
    num_tokens: int = 0,
    prompt_text: str = "",
    finish_reason: FinishReason = "stop",
    fields: dict[str, Any] | None = None,
) -> Sample:
    return made_sample(
        prompt=Prompt(index=10 + position, text=prompt_text, token_ids=(1,), answer=answer, fields=fields or {}),
        position=position,
        sample_index=sample_index,
        response_ids=(7,) * num_tokens,
        finish_reason=finish_reason,
        text=text,
    )


@isolated_reward(timeout_s=1.5)
def doing_as_told(sample: Sample, *, scale: float = 1.0) -> float:
    """The response says what happens."""
    if sample.text == "sleep":
        time.sleep(100)
    if sample.text == "hang in C":
        max(range(10**13))
    if sample.text == "crash":
        import os

        os._exit(7)
    if sample.text == "exit":
        raise SystemExit(0)
    if sample.text == "eat":
        return float(len(bytearray(4 << 30)))
    if sample.text == "no verdict":
        raise NoVerdictError("who knows")
    print("a print does no harm")
    return float(sample.text) * scale


def even(sample: Sample) -> float | None:
    """1 for an even number; odd ones are for another reward."""
    return 1.0 if int(sample.text) % 2 == 0 else None


@isolated_reward()
def even_elsewhere(sample: Sample) -> float | None:
    return even(sample)


@isolated_reward(timeout_s=0.5, no_verdict_if_stopped=True)
def forgiving(sample: Sample) -> float:
    return doing_as_told(sample)


@isolated_reward(timeout_s=200)
def patient(sample: Sample) -> float:
    return doing_as_told(sample)


@isolated_reward()
def meeting(sample: Sample, *, folder: str, count: int) -> float:
    """Waits until so many samples are being scored."""
    (Path(folder) / sample.text).touch()
    while len(list(Path(folder).iterdir())) < count:
        time.sleep(0.01)
    return 1.0


def counting_what_a_program_reads(sample: Sample) -> float:
    """A checker that takes its input from stdin, and is given none."""
    return float(len(subprocess.run(["head", "-c", "1"], stdout=subprocess.PIPE, check=True, timeout=5).stdout))


class Unshown:
    """Has no text."""

    def __repr__(self) -> str:
        raise RuntimeError("cannot be shown")


def returning_what_is_asked(sample: Sample) -> Any:
    """The response is the expression to return."""
    return eval(sample.text, {"numpy": numpy, "Unshown": Unshown})


def run(reward: Any, samples: list[Sample], *, max_failures: int = 0, **limits: Any) -> tuple[list[Any], FailureBudget]:
    runner, budget = make_runner(reward, ScoringLimits(**limits), name="mine"), FailureBudget(max_failures)
    try:
        return runner.run(samples, budget), budget
    finally:
        runner.close()
