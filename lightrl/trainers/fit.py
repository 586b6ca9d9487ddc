"""The life of a trainer: a loop around its steps, and a program with an exit code around the loop.

The loop evaluates, logs, writes checkpoints and the final model, and shows the run to people.
"""

from __future__ import annotations

import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from operator import methodcaller
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar, NoReturn, Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn

from lightrl.config import RunConfig
from lightrl.metrics import Stopwatch, memory_in_use
from lightrl.records import Experience
from lightrl.strategy import StrategyBase
from lightrl.strategy.saving.state_files import HASH_FILE
from lightrl.trainers.disk_errors import Log, forgive_disk_errors, raise_with_folder
from lightrl.trainers.health import BadSteps, findings
from lightrl.trainers.lifetime import end_failed, end_with_torchrun, ended_by_signals, is_under_torchrun
from lightrl.trainers.run import RunContext, open_run
from lightrl.trainers.run_folder import TrainerConfig, disown

_COUNTED = ("prompt", "response", "trained")  # metrics tokens/... that tokens/per_second adds up
_LINES_PER_RUN = 20  # printed if there is no terminal
_LONGEST_SILENCE_S = 60.0  # after which a slow run prints the next step, too
_OBSERVERS = {  # option -> what makes the observer that it asks for
    "profile": "lightrl.trainers.profiling:Profile",
    "export.every": "lightrl.trainers.export:Export",
    "hub.push": "lightrl.trainers.export:Export",
    "log.tokens": "lightrl.trainers.token_log:token_log",
    "rollout.workflow": "lightrl.trainers.transcript:Transcript",
    "health.max_bad_steps": "lightrl.trainers.health:bad_steps",
    "log.to": "lightrl.trainers.loggers.attach:Loggers",
    "eval.majority": "lightrl.trainers.evaluation:MajorityVotes",
    "eval.best": "lightrl.trainers.best:Best",
    "ema_decay": "lightrl.trainers.export:AverageExport",  # last, so that the others see its exports
}
_SHARING = "lightrl.sharing.run:sharing"  # the only one that can come before another of _MAKERS
_MAKERS = {  # what makes the class of a trainer from an ordinary one, by the option that asks; the first that is on
    "exact": "lightrl.exact.run:exact",
    "rollout_ranks": "lightrl.trainers.separate:in_role",
    "rollout.record": "lightrl.trainers.recorded:recorded",
    "rollout.from_": "lightrl.trainers.recorded:recorded",
    "data.curriculum": "lightrl.trainers.curriculum:with_curriculum",
    "rollout.over_issue": "lightrl.trainers.scheduled:scheduled",
    "rollout.max_staleness": "lightrl.trainers.scheduled:scheduled",
    "rollout.filter": "lightrl.trainers.scheduled:scheduled",
}


Act = Callable[[Any], object]  # an action on the trainer or server that a program has built


class Stateful(Protocol):
    """A part of a trainer whose state checkpoints hold."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Any) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """The names of the metrics that a trainer prints."""

    step: tuple[str, ...] = ("reward/mean", "episode/failed_share", "tokens/per_second", "entropy")
    evaluation: tuple[str, ...] = ("eval/accuracy", "eval/reward")
    table: tuple[str, ...] = ("eval/accuracy", "reward/mean", "entropy")  # a share in front is drawn as a bar


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The result of a step, for the loop."""

    metrics: dict[str, float]  # over all ranks
    experience: Sequence[Experience] = ()  # this rank's; the first samples are logged


class Trainer(ABC):
    """Base class of trainers. A subclass builds its models in `__init__` and implements the step.

    Its `__init__` calls this one first, sets `model`, adds to `saved` and `companions`, and then calls `resume()`.
    """

    kind: ClassVar[str]  # used in the name of a run's folder
    shown: Shown = Shown()
    config: Any  # the subclass names its own class of options
    model: nn.Module  # trained, saved and resumed
    batches: str = ""  # the batch arithmetic in one line, printed at the start
    step_index: int = 0  # number of finished steps
    attached: tuple[str, ...] = ()  # import paths of the observers that an earlier fit() has attached
    # Import path of what changed an ordinary class for --rollout_ranks, a schedule or a record; None for any run.
    made_by: ClassVar[str | None] = ""
    sharing: ClassVar[tuple[str | bool, ...]] = ("auto", False)  # values of --share_prompts that the class can obey

    def __init__(self, run: RunContext | TrainerConfig, *, strategy: StrategyBase | None = None) -> None:
        """Takes an open `run`, or options to open one, then perhaps with the caller's own `strategy`."""
        config = run.config if isinstance(run, RunContext) else run
        if self.made_by not in (None, _maker_of(config)) or getattr(config, "share_prompts", False) not in self.sharing:
            raise _ignored_options(self)
        self.run = run if isinstance(run, RunContext) else open_run(run, kind=self.kind, strategy=strategy)
        self.config, self.strategy, self.folder = self.run.config, self.run.strategy, self.run.folder
        self.statistics = self.strategy.statistics  # includes what strategy.stats has recorded before the first step
        self.watch = Stopwatch(self.strategy.comm.span)
        self.observers = self.run.observers  # called at the moments of fit()
        self.saved: dict[str, Stateful] = {}  # parts whose state checkpoints hold, by name
        self.companions: dict[str, nn.Module] = {}  # models trained beside `model`, saved in the same checkpoint

    @abstractmethod
    def step(self) -> StepReport:
        """Draws the batch of step step_index and learns from it once."""

    def finish_step(self) -> None:
        """Counts a step that was made, and moves the schedules whose unit is a trainer step; call it after step()."""
        if self.config.optim.schedule_unit == "rl_step":
            self.strategy.trained.step_schedules()
        self.step_index += 1

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Returns metrics over all ranks, without any effect on the training; empty without evaluation data."""

    def export(self, folder: Path) -> None:
        """Writes the models for their users and tells the observers; every rank must call it."""
        with self.strategy.comm.phase("export"):
            try:
                self.save_models(folder)
            except Exception as error:
                raise_with_folder(error, folder)
        for observer in self.observers:
            observer.after_export(folder)

    def save_models(self, folder: Path) -> None:
        """Writes the models into a folder, for export(); every rank must call it."""
        if self.strategy.comm.is_main:
            (folder / HASH_FILE).unlink(missing_ok=True)  # of an earlier model: the hash says that the folder is whole
            (self.run.tokenizer if self.run.media is None else self.run.media.processor).save_pretrained(folder)
        self.strategy.save_pretrained(self.model, folder)  # which ends with the hash

    def fit(self) -> dict[str, float]:
        """Trains to max_steps; returns the metrics of the last step."""
        return fit(self)

    def close(self) -> None:
        """Ends the observers and the engine, leaves the process group, and gives up the run's folder."""
        for part in list[Any]((*self.observers, self.strategy)):
            part.close()
        disown(self.folder.root, self.folder.number)
        vars(self).update(dict.fromkeys(("fit", "step", "evaluate"), _refuse_closed))

    @cached_property
    def bad_steps(self) -> BadSteps:
        """The counter that warns of bad steps and stops the run after too many; created with the first one."""
        return BadSteps(self)

    @contextmanager
    def timed(self, name: str, phase: str) -> Iterator[None]:
        """Adds the seconds of the body to metric time/NAME, and names the phase in other ranks' errors."""
        with self.watch.measure(f"time/{name}"), self.strategy.comm.phase(phase):
            yield

    # ---- Checkpoints -------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Reads the checkpoint from which the run continues, if any. Call it when all models are prepared."""
        if self.config.ema_decay:
            self.strategy.keep_average(self.model, self.config.ema_decay)
        with self.strategy.comm.phase("set-up"):
            if self.run.checkpoint is not None:
                self._load(self.run.checkpoint)
            self.strategy.set_global_step(self.step_index)

    def _load(self, checkpoint: Path) -> None:
        _, state = self.strategy.load_ckpt(self.model, str(checkpoint.parent), tag=checkpoint.name, **self._extras())
        self.step_index = int(state["step"])
        resolve_name("lightrl.trainers.branched_schedule:end_schedules_with_run")(self, checkpoint)
        try:
            for name, part in self.saved.items():
                part.load_state_dict(state[name])
        except KeyError as error:
            raise ValueError(
                f"{checkpoint} holds no {error}: its run had other options. Continue it with those in its config.yaml."
            ) from error

    def save(self) -> None:
        """Writes a checkpoint of this step; every rank must call it."""
        state = {"step": self.step_index, **{name: part.state_dict() for name, part in self.saved.items()}}
        folder, kept = str(self.folder.checkpoints), self.config.checkpoint.keep
        with self.watch.measure("time/checkpoint"):
            self.strategy.set_global_step(self.step_index)
            self.strategy.save_ckpt(self.model, folder, max_num=kept, max_mem=0, client_state=state, **self._extras())

    def _extras(self) -> dict[str, Any]:
        """Returns the companions as an argument, if there are any: a user's strategy may not know it."""
        return {"companions": self.companions} if self.companions else {}


# ---- The program -----------------------------------------------------------------------------------------------------


def run_trainer(trainer_class: Callable[[Any], Trainer], config: RunConfig) -> None:
    """Trains and cleans up. A failure ends the process, with 2 for an error the user can correct, otherwise 1."""
    run_program(partial(build_trainer, trainer_class), config)


def build_trainer(trainer_class: Callable[[Any], Trainer], config: RunConfig) -> Trainer:
    """Returns the trainer of a run, made from the class or from a variant that the options ask for."""
    make, sharing = trainer_class, _SHARING if getattr(config, "share_prompts", False) is True else ""
    for maker in filter(None, (sharing, _maker_of(config))):  # by name, because these modules import this one
        make = resolve_name(maker)(make)
    trainer = make(config)
    if isinstance(trainer_class, type) and isinstance(trainer, Trainer) and getattr(config, "may_share_prompts", False):
        resolve_name("lightrl.sharing.model:share_by_itself")(trainer)
    return trainer


def run_program(build: Callable[[Any], Any], config: RunConfig, act: Act = methodcaller("fit")) -> None:
    """Builds a trainer or a server of samples from the config, and applies `act`, by default a run to its end."""
    if not torch.cuda.is_available():
        # transformers imports deepspeed if it is installed, which then warns on stdout that it chose the CPU.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.basicConfig(level=logging.WARNING, format=f"[rank {os.environ.get('RANK', '0')}] %(message)s")
    if is_under_torchrun():
        end_with_torchrun()
    trainer: Trainer | None = None
    try:
        trainer = build(config)
        act(trainer)
        trainer.close()
    except BaseException as error:  # exit(0) in a user's code is no success
        end_failed(error, trainer)


def _maker_of(config: RunConfig) -> str:
    """Returns the import path of what changes the trainer's class for this run; empty for an ordinary run."""
    return next((maker for option, maker in _MAKERS.items() if _is_on(option, config)), "")


def observers(config: RunConfig) -> tuple[str, ...]:
    """Returns the import paths of the makers of the observers that the options ask for; none by default."""
    return tuple(dict.fromkeys(part for option, part in _OBSERVERS.items() if _is_on(option, config)))


def _is_on(option: str, config: RunConfig) -> bool:
    section, _, name = option.rpartition(".")
    return bool(getattr(getattr(config, section, None) if section else config, name, False))


def _refuse_closed(*_: Any, **__: Any) -> NoReturn:
    """Stands for the methods of a trainer that has been closed."""
    raise RuntimeError(
        "The trainer is closed: its engine, its process group and its folder are given up. Evaluate before close(), or "
        "make a new trainer; one with the same output_dir and resume='auto' continues the run."
    )


def _ignored_options(trainer: Trainer) -> ValueError:
    name = type(trainer).__name__
    return ValueError(
        f"{name} by itself takes no part in --exact, in --share_prompts, in --rollout_ranks, in a schedule "
        "(--rollout.over_issue, max_staleness, filter ...), in --data.curriculum or in a record (--rollout.record, "
        f"--rollout.from). Call run_trainer({name}, config) of lightrl.trainers.fit, or leave them out."
    )


# ---- The loop --------------------------------------------------------------------------------------------------------


def fit(trainer: Trainer) -> dict[str, float]:
    """Trains to max_steps: evaluates, logs and saves as the options say. Returns the metrics of the last step."""
    config, comm, folder = trainer.config, trainer.strategy.comm, trainer.folder
    with comm.phase("set-up", local=True):
        if comm.is_main:
            folder.open(trainer.run.config, trainer.step_index)  # as it was given, so that it starts the same run again
    trainer.observers += [resolve_name(part)(trainer) for part in observers(config) if part not in trainer.attached]
    trainer.attached = observers(config)
    console = RunConsole(trainer.shown, enabled=comm.is_main, first_step=trainer.step_index, max_steps=config.max_steps)
    open_log, forgives = partial(RunLog, trainer), config.checkpoint.on_disk_error == "continue"
    log: Log = forgive_disk_errors(trainer, open_log) if forgives else open_log()
    with console.progress, closing(log), ended_by_signals(trainer) as goes_on:
        console.say(f"run folder: {folder.root}\n{trainer.batches}")
        metrics: dict[str, float] = {}
        if trainer.step_index:
            console.say(continuation(trainer))
        elif config.eval.every and (metrics := _evaluate(trainer, console)):
            _log(trainer, log, metrics)
        while goes_on():
            metrics = _one_step(trainer, log)
            console.step_done(trainer.step_index, metrics)
            if _is_due(trainer, config.eval.every):
                metrics |= _evaluate(trainer, console)
            _log(trainer, log, metrics)
            if (problems := findings(metrics, config.health)) or config.health.max_bad_steps:
                trainer.bad_steps.see(problems)
            if _is_due(trainer, config.checkpoint.every):
                trainer.save()
    trainer.strategy.saver.finish()
    trainer.export(folder.final)
    if comm.is_main:
        console.final_table(folder.metrics())
        console.say(f"model: {folder.final}")
    return metrics


def continuation(trainer: Trainer) -> str:
    """Describes where a run continues, and whether it has a step left."""
    told = f"continuing after step {trainer.step_index} from {trainer.run.checkpoint or 'memory'}"
    max_steps = trainer.config.max_steps
    return told if trainer.step_index < max_steps else f"{told}: --max_steps {max_steps} leaves no step to do"


def _one_step(trainer: Trainer, log: Log) -> dict[str, float]:
    started = time.perf_counter()
    with ExitStack() as around:
        for observer in reversed(trainer.observers):  # the observers act in their order after a step
            around.enter_context(observer.around_step(trainer.step_index + 1))
        report = trainer.step()
        trainer.finish_step()
    seconds = time.perf_counter() - started
    log.write_samples(report.experience)
    counted = sum(report.metrics.get(f"tokens/{part}", 0.0) for part in _COUNTED)
    times = {**trainer.watch.take(), "time/step": seconds, "tokens/per_second": counted / seconds}
    return report.metrics | times | memory_in_use()


def _log(trainer: Trainer, log: Log, metrics: dict[str, float]) -> None:
    log.write(metrics)
    for observer in trainer.observers:
        observer.after_metrics(trainer.step_index, metrics)


def _evaluate(trainer: Trainer, console: RunConsole) -> dict[str, float]:
    with trainer.watch.measure("time/eval"):
        metrics = trainer.evaluate()
    if metrics:
        console.evaluated(trainer.step_index, metrics)
    return metrics and metrics | dict(trainer.watch.take())


def _is_due(trainer: Trainer, every: int) -> bool:
    """Returns whether an action is due that recurs every so many steps, and after the last; 0 means never."""
    return every > 0 and (trainer.step_index % every == 0 or trainer.step_index == trainer.config.max_steps)


class RunLog:
    """Writes the files of a run: metrics.jsonl, samples.jsonl, tensorboard/. Every rank calls it, rank 0 writes."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._comm, step = trainer, trainer.strategy.comm, trainer.step_index
        self._num_samples = getattr(trainer.config.log, "samples_per_step", 0)
        self._board: Any = None
        if self._comm.is_main and trainer.config.log.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  (slow to import, needed on one rank only)

            self._board = SummaryWriter(str(trainer.folder.root / "tensorboard"), purge_step=step and step + 1)

    def write(self, metrics: dict[str, float]) -> None:
        """Logs the metrics of the last step; step 0 is the evaluation before any training."""
        if self._comm.is_main:
            with self._comm.phase("log"):
                self._trainer.folder.append_metrics(self._trainer.step_index, metrics)
                self.draw(metrics)

    def draw(self, metrics: dict[str, float]) -> None:
        """Adds the numbers to TensorBoard's, as one event: the writer's thread wakes once, and not for each number."""
        if self._board is not None:
            scalars = [{"tag": name, "simple_value": value} for name, value in metrics.items()]
            self._board.file_writer.add_summary({"value": scalars}, self._trainer.step_index)
            self._board.flush()  # before the step can be in a checkpoint, since a killed run goes on after that

    def write_samples(self, experience: Sequence[Experience]) -> None:
        """Logs the first samples of the step by position, whichever ranks have them."""
        if not self._num_samples:
            return
        gathered = self._comm.all_gather_object(list(experience[: self._num_samples]))
        if self._comm.is_main:
            first = sorted(chain.from_iterable(gathered), key=lambda item: item.key)[: self._num_samples]
            self._trainer.folder.append_samples(self._trainer.step_index, first, self._columns)

    def _columns(self, item: Experience) -> dict[str, Any]:
        """Returns the entries that the observers add to the line of a sample."""
        return {name: value for one in self._trainer.observers for name, value in one.sample_columns(item).items()}

    def close(self) -> None:
        """Writes what TensorBoard has not written yet."""
        if self._board is not None:
            self._board.close()


class RunConsole:
    """Shows a run: a progress bar on a terminal, else plain lines; a table at the end. Silent if not enabled."""

    def __init__(self, shown: Shown, *, enabled: bool, first_step: int, max_steps: int) -> None:
        self._shown, self._max_steps, self._said_at = shown, max_steps, time.monotonic()
        self._console = Console(quiet=not enabled, highlight=False)
        columns = (BarColumn(), "{task.fields[status]}", TimeElapsedColumn(), "ETA", TimeRemainingColumn())
        is_shown = enabled and self._console.is_terminal
        self.progress = Progress("step", MofNCompleteColumn(), *columns, console=self._console, disable=not is_shown)
        self._task = self.progress.add_task("train", total=max_steps, completed=first_step, status="")

    def say(self, text: str) -> None:
        """Prints a line."""
        self._console.print(text, markup=False, soft_wrap=True)

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the metrics of a finished step; step counts from 1."""
        texts = [_text(name, metrics[name]) for name in self._shown.step if name in metrics]
        self.progress.update(self._task, completed=step, status="  ".join(texts[:2]))
        is_due = step % max(1, self._max_steps // _LINES_PER_RUN) == 0 or step == self._max_steps
        if not self._console.is_terminal and (is_due or time.monotonic() - self._said_at > _LONGEST_SILENCE_S):
            self._said_at = time.monotonic()
            self.say("  ".join([f"step {step}/{self._max_steps}", *texts]))

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints the results of an evaluation."""
        names = [name for name in self._shown.evaluation if name in metrics]
        self.say("  ".join([f"step {step}", *(f"{name} {metrics[name]:.3f}" for name in names)]))

    def final_table(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Prints the evaluations of the run, one per line."""
        first, *others = self._shown.table
        table, seconds = Table("step", first, "", *others, "seconds"), 0.0
        for row in rows:
            seconds += row.get("time/step") or 0.0
            if row.get(first) is not None:
                bar = "" if first == "eval/reward" else "#" * round(20 * min(max(row[first], 0.0), 1.0))
                cells = [f"{row[name]:.3f}" if row.get(name) is not None else "" for name in (first, *others)]
                table.add_row(str(row["step"]), cells[0], bar, *cells[1:], f"{seconds:.0f}")
        if table.row_count:
            self._console.print(table)


def _text(name: str, value: float) -> str:
    return f"{value:,.0f} tokens/s" if name == "tokens/per_second" else f"{name.removesuffix('/mean')} {value:.3f}"
