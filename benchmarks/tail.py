"""Compares steps that wait for their longest sample with a schedule that carries long samples over.

python benchmarks/tail.py --models toy mid --steps 6

Lengths are log-normal. Both sides train on the same number of groups; the schedule also has unfinished samples at the
end, whose tokens count as generated. Weights change between steps, so a continued sample is computed again or, with
--keep_cache, goes on after its old keys and values. Seconds are CPU seconds on one thread.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import numpy as np
import torch
from decode import SHAPES, random_model

from lightrl.engines.base import Completion, SamplingParams
from lightrl.engines.colocated import ColocatedEngine
from lightrl.engines.native.engine import NativeEngine
from lightrl.engines.native.kept_rows import KeepingEngine
from lightrl.rollout.scheduler import AsyncScheduler, Rules, Scheduler, SyncScheduler

GROUPS, SAMPLES = 16, 4
MEDIAN, SIGMA, LONGEST = 40, 1.0, 512


@dataclass
class Outcome:
    """What a number of training steps took."""

    engine_steps: int = 0
    tokens: int = 0
    computed_again: int = 0  # tokens that a prefill computed beyond the prompts
    seconds: float = 0.0


def lengths(ticket: int) -> list[int]:
    drawn = np.random.default_rng(1000 + ticket).lognormal(np.log(MEDIAN), SIGMA, size=SAMPLES)
    return [int(length) for length in np.clip(drawn, 1, LONGEST)]


def roll_out(engine: ColocatedEngine, scheduler: Scheduler, num_steps: int, vocab_size: int) -> Outcome:
    made, started = Outcome(), time.process_time()
    computed_before = num_computed(engine)
    left: dict[int, int] = {}  # samples of each ticket that are not finished
    stopped: list[tuple[int, int, Completion | None]] = []
    for step in range(num_steps):
        engine.version = step
        running: dict[int, tuple[int, int]] = {}
        waiting, stopped = stopped, []
        while (batch := scheduler.batch(step)) is None:
            for ticket in scheduler.start(step):
                left[ticket] = SAMPLES
                waiting += [(ticket, index, None) for index in range(SAMPLES)]
            for ticket, index, partial in waiting:
                prompt = np.random.default_rng(ticket).integers(3, vocab_size, 8).tolist()
                params = SamplingParams(
                    max_new_tokens=lengths(ticket)[index], seed=ticket, first_sample=index, ignore_eos=True
                )
                running[engine.submit(prompt, params, partial)] = (ticket, index)
                made.computed_again -= 0 if partial else len(prompt)
            waiting = []
            made.engine_steps += 1
            for completion in engine.step():
                ticket, _ = running.pop(completion.request_id)
                made.tokens += len(completion.output_token_ids)
                left[ticket] -= 1
                if not left[ticket]:
                    scheduler.finish([ticket])
        scheduler.take(batch)
        for completion in engine.abort():
            ticket, index = running.pop(completion.request_id)
            stopped.append((ticket, index, completion if completion.output_token_ids else None))
    made.tokens += sum(len(partial.output_token_ids) for _, _, partial in stopped if partial is not None)
    made.seconds = time.process_time() - started
    made.computed_again += num_computed(engine) - computed_before
    return made


def num_computed(engine: ColocatedEngine) -> int:
    assert isinstance(engine.engine, NativeEngine)
    return engine.engine.num_prefill_tokens


def make_engine(name: str, kind: type[NativeEngine]) -> ColocatedEngine:
    engine = ColocatedEngine(kind(random_model(name), eos_token_ids=(), device=torch.device("cpu"), max_num_seqs=256))
    engine.version = 0
    return engine


def compare(name: str, num_steps: int, over_issue: float, max_staleness: int, kind: type[NativeEngine]) -> None:
    rules = Rules(batch_size=GROUPS, max_staleness=max_staleness, over_issue=over_issue)
    vocab_size = int(SHAPES[name]["vocab_size"])
    waits = roll_out(make_engine(name, NativeEngine), SyncScheduler(rules), num_steps, vocab_size)
    carries = roll_out(make_engine(name, kind), AsyncScheduler(rules), num_steps, vocab_size)
    faster = (carries.tokens / carries.seconds) / (waits.tokens / waits.seconds)
    print(
        f"{name}, over-issue {over_issue:g}, staleness <= {max_staleness}: engine steps {waits.engine_steps} -> "
        f"{carries.engine_steps} ({waits.engine_steps / carries.engine_steps:.2f}x fewer), tokens "
        f"{waits.tokens} -> {carries.tokens} ({carries.computed_again} computed again), "
        f"{waits.tokens / waits.seconds:.0f} -> {carries.tokens / carries.seconds:.0f} tokens per CPU second "
        f"({faster:.2f}x)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models",
        nargs="+",
        choices=sorted(SHAPES),
        default=["toy", "mid"],
        help="random models: toy has 0.8 and mid 42 million parameters (default: both)",
    )
    parser.add_argument("--steps", type=int, default=6, help="training steps (default: %(default)s)")
    parser.add_argument(
        "--over_issue",
        type=float,
        nargs="+",
        default=[0.5, 1.0],
        help="values of --rollout.over_issue (default: 0.5 1)",
    )
    parser.add_argument("--max_staleness", type=int, default=4, help="--rollout.max_staleness (default: %(default)s)")
    parser.add_argument(
        "--keep_cache", action="store_true", help="continue on old keys and values, as --rollout.keep_cache True does"
    )
    arguments = parser.parse_args()
    kind = KeepingEngine if arguments.keep_cache else NativeEngine
    torch.set_num_threads(1)
    for name in arguments.models:
        for over_issue in arguments.over_issue:
            compare(name, arguments.steps, over_issue, arguments.max_staleness, kind)


if __name__ == "__main__":
    main()
