"""The program that StrategyContract starts on every rank: trains each variant, runs each check, writes a report.

python -m lightrl.testing.strategy_program FOLDER [--continue_from FOLDER] [--only_parity] [--reduces_often]
    [--only_by_batches] [--variants NAME ...] [--steps N] --strategy NAME [options of train_grpo.py]
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightrl.config import GRPOConfig, parse_config
from lightrl.strategy import StrategyBase, create_strategy
from lightrl.testing import strategy_checks
from lightrl.testing.strategy_parity import VARIANTS, train
from lightrl.testing.tiny_training import STEPS


class Report:
    """Writes to disk after each part what was done so far, because a rank that fails ends the program."""

    def __init__(self, strategy: StrategyBase, folder: Path) -> None:
        self._strategy = strategy
        self._path = folder / "report.json"
        self._content: dict[str, Any] = {"done": []}

    def run(self, name: str, function: Callable[[], Any]) -> Any:
        """Runs one part on all ranks and records that it is done."""
        self._say({"running": name})
        self._strategy.trained.entries.clear()
        self._strategy.max_norm = 1.0
        result = function()
        self._strategy.comm.barrier()
        self._say({"running": None, "done": [*self._content["done"], name]})
        return result

    def add(self, **content: Any) -> None:
        """Adds values to the report."""
        self._say(content)

    def _say(self, content: dict[str, Any]) -> None:
        self._content |= content
        if self._strategy.comm.is_main:
            self._path.write_text(json.dumps(self._content))


def run_parity(strategy: StrategyBase, report: Report, folder: Path, names: list[str], steps: int) -> None:
    """Trains in each named way and writes the parameters for the test to compare."""
    for name in names:
        index, variant = list(VARIANTS).index(name), VARIANTS[name]
        trained = report.run(name, partial(train, strategy, variant, steps))
        report.add(**{f"trained {name}": {"losses": trained.losses, "norms": trained.norms}})
        if strategy.comm.is_main:
            torch.save(trained.parameters, folder / f"variant{index}.pt")


def run_checks(
    strategy: StrategyBase, report: Report, folder: Path, continue_from: Path | None, *, by_calls: bool
) -> None:
    """Runs every check of StrategyContract and reports each by name."""
    for check in strategy_checks.CHECKS if by_calls else strategy_checks.CHECKS_BY_BATCHES:
        report.run(check.__name__.removeprefix("check_"), partial(check, strategy))
    report.run("export", partial(strategy_checks.check_export, strategy, folder))
    report.run("save_for_others", partial(strategy_checks.check_save_for_others, strategy, folder))
    if continue_from is not None:
        found = report.run("reshard", partial(strategy_checks.train_on_from, strategy, continue_from))
        report.add(continued=found)


def main() -> None:
    """Runs what the test asked for on this rank, and writes the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--continue_from", type=Path)
    parser.add_argument("--only_parity", action="store_true")
    parser.add_argument("--reduces_often", action="store_true")
    parser.add_argument("--only_by_batches", action="store_true")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments, flags = parser.parse_known_args()
    strategy = create_strategy(parse_config(GRPOConfig, flags))
    strategy.setup_distributed()
    report = Report(strategy, arguments.folder)
    try:
        run_parity(strategy, report, arguments.folder, arguments.variants, arguments.steps)
        if not arguments.only_parity:
            if not arguments.reduces_often:
                reduced_once = strategy_checks.check_one_reduction_per_update
                report.run("one_reduction_per_update", partial(reduced_once, strategy))
            by_calls = not arguments.only_by_batches
            run_checks(strategy, report, arguments.folder, arguments.continue_from, by_calls=by_calls)
    except Exception:
        sys.stderr.write(f"rank {strategy.comm.rank}:\n{traceback.format_exc()}\n")
        sys.stderr.flush()
        raise SystemExit(1) from None  # immediately: the other ranks wait in a collective until torchrun ends them
    strategy.close()


if __name__ == "__main__":
    main()
