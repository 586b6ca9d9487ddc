"""StrategyContract: the tests that every strategy must pass, including a user's own."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from lightrl.config import StrategyOptions
from lightrl.strategy.torch_native import SingleStrategy
from lightrl.testing import strategy_checks, strategy_program
from lightrl.testing.spmd import SpmdError, run_program, run_spmd
from lightrl.testing.strategy_parity import VARIANTS
from lightrl.testing.tiny_training import Trained, plain_training, same

reference = cache(plain_training)


def _names(checks: Iterable[Callable[..., None]]) -> list[str]:
    return [check.__name__.removeprefix("check_") for check in checks]


class Run(NamedTuple):
    """The result of one start of the program on `world` ranks."""

    world: int
    folder: Path
    report: dict[str, Any]
    output: str  # what the run printed if it failed, otherwise empty

    def require(self, name: str) -> None:
        """Fails if this part of the program failed, and skips if an earlier part did."""
        if name in self.report["done"]:
            return
        culprit = self.report.get("running")
        text = f"on {self.world} rank(s): {self.output}"
        if culprit == name or culprit is None:
            pytest.fail(text)
        pytest.skip(f"{culprit} failed before it")


class Alone(NamedTuple):
    """A run in one process, which runs on several ranks continue."""

    folder: Path  # holds a checkpoint
    continued: list[tuple[float, float]]  # (loss, gradient norm) of the steps after it


class StrategyParity:
    """The part of the contract that compares trainings.

    Subclass it like StrategyContract, for further options of a strategy whose other tests run elsewhere.
    """

    strategy: ClassVar[str]
    flags: ClassVar[tuple[str, ...]] = ()  # further command-line options, such as ("--fsdp.replicate_size", "2")
    world_sizes: ClassVar[tuple[int, ...]] = (1, 3)  # 3 divides few sizes, so shards are uneven
    reduces_once: ClassVar[bool] = True  # False if gradients are reduced (and sharded) at each micro-batch
    runs_by_calls: ClassVar[bool] = True  # False if no rank can run the model by itself, as in a pipeline
    variants: ClassVar[tuple[str, ...]] = tuple(VARIANTS)  # the ways to train, by name
    timeout_s: ClassVar[float] = 280
    cwd: ClassVar[Path | None] = None  # the folder where the strategy is importable; None: where pytest runs
    env: ClassVar[Mapping[str, str]] = {}
    _only_parity: ClassVar[bool] = True

    @pytest.fixture(scope="class")
    @classmethod
    def alone(cls, tmp_path_factory: pytest.TempPathFactory) -> Alone:
        """Trains in one process without this strategy: two steps, a checkpoint, and two more steps."""
        folder = tmp_path_factory.mktemp("alone")
        single = single_process()
        strategy_checks.check_save_for_others(single, folder)
        return Alone(folder, strategy_checks.train_on_from(single, folder))

    @pytest.fixture(scope="class")
    @classmethod
    def runs(cls, tmp_path_factory: pytest.TempPathFactory, alone: Alone) -> list[Run]:
        """Provides one start of the program for each number of ranks."""
        return [cls._start(world, tmp_path_factory.mktemp(f"world{world}"), alone) for world in cls.world_sizes]

    @classmethod
    def _start(cls, world: int, folder: Path, alone: Alone) -> Run:
        arguments = [str(folder), "--continue_from", str(alone.folder), "--strategy", cls.strategy, *cls.flags]
        arguments += ["--variants", *cls.variants]
        arguments += ["--only_parity"] if cls._only_parity else []
        arguments += [] if cls.reduces_once else ["--reduces_often"]
        arguments += [] if cls.runs_by_calls else ["--only_by_batches"]
        output = ""
        try:
            if world == 1:
                command = [sys.executable, "-m", strategy_program.__name__, *arguments]
                run_program(command, timeout_s=cls.timeout_s, cwd=cls.cwd, env=cls.env)
            else:
                run_spmd(
                    str(strategy_program.__file__), *arguments, world_size=world, timeout_s=cls.timeout_s,
                    cwd=cls.cwd, env=cls.env,
                )  # fmt: skip
        except SpmdError as error:
            output = str(error)
        path = folder / "report.json"
        return Run(world, folder, json.loads(path.read_text()) if path.exists() else {"done": []}, output)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Makes one test of each way to train."""
        if "variant" in metafunc.fixturenames:
            metafunc.parametrize("variant", self.variants)

    def test_training_equals_plain_training(self, runs: list[Run], variant: str) -> None:
        """Compares losses, gradient norms and parameters after three steps, for every split of the samples."""
        chosen = VARIANTS[variant]
        wanted = reference(chosen.make_optimizer, chosen.max_norm, frozen=chosen.frozen)
        for run in runs:
            run.require(variant)
            found = run.report[f"trained {variant}"]
            parameters = torch.load(run.folder / f"variant{list(VARIANTS).index(variant)}.pt", weights_only=True)
            compare(Trained(found["losses"], found["norms"], parameters), wanted, is_adam=chosen.max_norm > 0)


class StrategyContract(StrategyParity):
    """The tests for one strategy. Subclass it in a test file and name the strategy; pytest then runs the contract.

        class TestMyStrategy(StrategyContract):
            strategy = "my_pkg.my_module:MyStrategy"

    The ranks are started once for each world size, and every test reads the report of that start.
    """

    _only_parity = False

    @pytest.mark.parametrize("check", _names(strategy_checks.CHECKS))
    def test_check(self, runs: list[Run], check: str) -> None:
        """Requires that one of lightrl.testing.strategy_checks passed."""
        if not self.runs_by_calls and check not in _names(strategy_checks.CHECKS_BY_BATCHES):
            pytest.skip("no rank can run the model of this strategy by itself")
        for run in runs:
            run.require(check)

    def test_gradients_are_reduced_once_per_update(self, runs: list[Run]) -> None:
        if not self.reduces_once:
            pytest.skip("this strategy reduces in every micro-batch")
        for run in runs:
            run.require("one_reduction_per_update")

    def test_the_export_loads_in_transformers(self, runs: list[Run]) -> None:
        for run in runs:
            run.require("export")
            model: Any = AutoModelForCausalLM.from_pretrained(run.folder / "hf")
            trained = torch.load(run.folder / "exported.pt", weights_only=True)
            same({name: p.detach() for name, p in model.named_parameters()}, trained)
            assert model.lm_head.weight is model.model.embed_tokens.weight

    def test_a_checkpoint_is_read_at_another_world_size_and_by_another_strategy(
        self, runs: list[Run], alone: Alone
    ) -> None:
        for run in runs:
            run.require("save_for_others")
            run.require("reshard")
            for found in (run.report["continued"], strategy_checks.train_on_from(single_process(), run.folder)):
                for (loss, norm), (wanted_loss, wanted_norm) in zip(found, alone.continued, strict=True):
                    assert loss == pytest.approx(wanted_loss, abs=1e-5)
                    assert norm == pytest.approx(wanted_norm, rel=1e-4)


def single_process() -> SingleStrategy:
    """Makes a single-process strategy, the reference for the others."""
    strategy = SingleStrategy(0, 1.0, 1, 1, StrategyOptions(exact_batches=True))
    strategy.setup_distributed()
    return strategy


def compare(found: Trained, wanted: Trained, *, is_adam: bool) -> None:
    """Asserts that the losses, norms and parameters of two trainings agree."""
    assert_close(torch.tensor(found.losses), torch.tensor(wanted.losses), atol=1e-5, rtol=0)
    assert_close(torch.tensor(found.norms), torch.tensor(wanted.norms), atol=0, rtol=1e-4)
    assert sorted(found.parameters) == sorted(wanted.parameters)
    atol = 1e-4 if is_adam else 1e-5  # AdamW turns a gradient of 1e-9 into a step of the size of lr
    for name, value in wanted.parameters.items():
        assert_close(found.parameters[name], value, atol=atol, rtol=0, msg=partial("{}: {}".format, name))
