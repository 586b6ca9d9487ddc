"""The loop around a trainer's steps: set-up, evaluation, logging, checkpoints, resume."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from lightrl.builtin import model as builtin_model
from lightrl.config import BUILTIN_MODEL, RunConfig
from lightrl.data.media import PromptEncoder
from lightrl.data.prompts import HELD_OUT, load_records
from lightrl.metrics import Statistics, Stopwatch, memory_in_use
from lightrl.models.lora import require_peft
from lightrl.models.multimodal import MediaProcessor
from lightrl.models.policy import check_model_folder, load_config, load_tokenizer
from lightrl.records import Experience
from lightrl.strategy import StrategyBase, create_strategy
from lightrl.trainers.console import RunConsole, Shown
from lightrl.trainers.run_folder import RunFolder, find_checkpoint, new_run_path

logger = logging.getLogger(__name__)

_COUNTED = ("prompt", "response", "trained")  # the metrics tokens/... that make tokens/per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What a step gives the loop."""

    metrics: dict[str, float]  # over all ranks
    experience: Sequence[Experience] = ()  # of this rank; the first are logged


class Trainer(ABC):
    """Builds everything a config names and runs steps. Construction stops at the first thing that is wrong."""

    kind: ClassVar[str]  # names a run's folder
    shown: ClassVar[Shown] = Shown()

    def __init__(self, config: RunConfig, *, strategy: StrategyBase | None = None) -> None:
        self.config = config
        require_peft(config.lora)
        self.strategy = strategy or create_strategy(config)
        self.strategy.setup_distributed()
        self.step_index = 0
        self.statistics = Statistics()
        self.watch = Stopwatch()
        self.folder, self._checkpoint = self._open_folder()
        with self.strategy.comm.phase("set-up", local=True):
            if self._checkpoint is not None and not self._checkpoint.is_dir():
                raise FileNotFoundError(f"{self._checkpoint} is not there for every rank: use a folder that all see.")
            records = self._records()
        self.model_path = self._find_model()
        with self.strategy.comm.phase("set-up", local=True):
            self.strategy.check_model_config(load_config(self.model_path, trust_remote_code=config.trust_remote_code))
            self.tokenizer = load_tokenizer(self.model_path, trust_remote_code=config.trust_remote_code)
            self.media = MediaProcessor.load(self.model_path, trust_remote_code=config.trust_remote_code)
            self.encoder = PromptEncoder(self.media) if self.media is not None else None
            self.read_data(*records)
        self.strategy.tokenizer = self.tokenizer
        self.strategy.media = self.media
        self.model = self.build_models()
        if config.ema_decay:
            self.strategy.keep_average(self.model, config.ema_decay)
        with self.strategy.comm.phase("set-up"):
            self._resume()
            self.strategy.set_global_step(self.step_index)
            self.get_ready()

    # ---- What a trainer writes ---------------------------------------------------------------------------------

    @abstractmethod
    def read_data(self, train: list[Any], evaluation: list[Any]) -> None:
        """Turns the records of --train_data and --eval_data into what the steps take; rank by rank, no collectives."""

    @abstractmethod
    def build_models(self) -> nn.Module:
        """Loads and prepares all models; returns the one that is trained, saved and resumed."""

    @abstractmethod
    def take_step(self) -> StepReport:
        """Draws the batch of step_index and learns from it once."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Over all ranks; changes no state of the training. Empty where there is nothing to evaluate on."""

    @abstractmethod
    def describe_batches(self) -> str:
        """The batch arithmetic in one line."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside the model, as plain values: the place in the data above all."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What state_dict gave."""

    def companions(self) -> dict[str, nn.Module]:
        """Models that are trained beside it, saved and resumed in the same checkpoint."""
        return {}

    def get_ready(self) -> None:
        """The last part of the set-up, after a checkpoint was read."""

    def log_samples(self, experience: Sequence[Experience]) -> None:
        """Writes some of what a step learned from; every rank calls it."""

    def save_models(self, folder: Path) -> None:
        """Writes what a user takes away: every rank calls it."""
        self.strategy.save_pretrained(self.model, folder)
        if self.strategy.comm.is_main:
            saved = self.tokenizer if self.media is None else self.media.processor
            saved.save_pretrained(folder)

    # ---- Set-up ------------------------------------------------------------------------------------------------

    def _open_folder(self) -> tuple[RunFolder, Path | None]:
        """Rank 0 looks and decides, and what is wrong is raised on all: ranks may see different files."""
        comm = self.strategy.comm
        found: tuple[Path, Path | None] | str = ""
        if comm.is_main:
            try:
                root = Path(self.config.output_dir) if self.config.output_dir else new_run_path(self.kind)
                folder = RunFolder(root.absolute())
                folder.check(self.config)
                found = folder.root, find_checkpoint(self.config, folder.checkpoints)
            except (ValueError, OSError) as error:
                found = str(error)
        found = comm.broadcast_object(found)
        if isinstance(found, str):
            raise ValueError(found)
        return RunFolder(found[0]), found[1]

    def _records(self) -> tuple[list[Any], list[Any]]:
        train = load_records(self.config.train_data)
        eval_source = self.config.eval_data
        if not eval_source and self.config.train_data in HELD_OUT:
            eval_source = HELD_OUT[self.config.train_data]
        return train, load_records(eval_source) if eval_source else []

    def _find_model(self) -> str:
        """The path or name to load; the built-in model is made by rank 0 while the others wait."""
        if self.config.model != BUILTIN_MODEL:
            with self.strategy.comm.phase("set-up", local=True):
                check_model_folder(self.config.model)
            return self.config.model
        path = ""
        with self.strategy.comm.phase("building the built-in model", local=True):
            if self.strategy.comm.is_main:
                path = str(builtin_model.builtin_model_path(on_progress=self.strategy.print))
        return self.strategy.comm.broadcast_object(path)

    def _resume(self) -> None:
        if self._checkpoint is None:
            return
        _, state = self.strategy.load_ckpt(
            self.model, str(self._checkpoint.parent), tag=self._checkpoint.name, **self._beside()
        )
        self.step_index = int(state["step"])
        try:
            self.load_state_dict(state)
        except KeyError as error:
            raise ValueError(
                f"{self._checkpoint} holds no {error}: its run had other options. Continue it with those in its "
                "config.yaml."
            ) from error

    # ---- The loop ----------------------------------------------------------------------------------------------

    def fit(self) -> dict[str, float]:
        """Trains to max_steps; returns the last step's metrics."""
        config, comm = self.config, self.strategy.comm
        with comm.phase("set-up", local=True):
            if comm.is_main:
                self.folder.open(config, self.step_index)
        board = self._tensorboard()
        metrics: dict[str, float] = {}
        with RunConsole(
            self.shown, enabled=comm.is_main, first_step=self.step_index, max_steps=config.max_steps
        ) as console:
            self._announce(console)
            if self.step_index == 0:
                metrics = self._evaluate(console)
                self._log(board, 0, metrics)
            while self.step_index < config.max_steps:
                metrics = self._one_step(console)
                self._log(board, self.step_index, metrics)
                if self._is_due(config.checkpoint.every):
                    self._save()
        self._finish(board, console)
        return metrics

    def _announce(self, console: RunConsole) -> None:
        console.say(f"run folder: {self.folder.root}")
        console.say(self.describe_batches())
        if self.step_index:
            console.say(f"continuing after step {self.step_index} from {self._checkpoint}")

    def _one_step(self, console: RunConsole) -> dict[str, float]:
        started = time.perf_counter()
        report = self.take_step()
        if self.config.optim.schedule_unit == "rl_step":
            self.strategy.step_schedules()
        seconds = time.perf_counter() - started
        self.step_index += 1
        metrics = dict(report.metrics)
        metrics |= self.watch.take()
        metrics["time/step"] = seconds
        metrics["tokens/per_second"] = sum(metrics.get(f"tokens/{part}", 0.0) for part in _COUNTED) / seconds
        metrics |= memory_in_use()
        self.log_samples(report.experience)
        console.step_done(self.step_index, metrics)
        if self._is_due(self.eval_every):
            metrics |= self._evaluate(console)
        return metrics

    @property
    @abstractmethod
    def eval_every(self) -> int:
        """Steps between evaluations; 0 never evaluates."""

    def _is_due(self, every: int) -> bool:
        return every > 0 and (self.step_index % every == 0 or self.step_index == self.config.max_steps)

    def _evaluate(self, console: RunConsole) -> dict[str, float]:
        if self.eval_every == 0:
            return {}
        with self.watch.measure("time/eval"):
            metrics = self.evaluate()
        if not metrics:
            return {}
        console.evaluated(self.step_index, metrics)
        return metrics | dict(self.watch.take())

    # ---- Output ------------------------------------------------------------------------------------------------

    def _tensorboard(self) -> Any:
        if not self.strategy.comm.is_main or not self.config.log.tensorboard:
            return None
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  (slow to import, and only one rank needs it)

        return SummaryWriter(str(self.folder.root / "tensorboard"), purge_step=self.step_index + 1)

    def _log(self, board: Any, step: int, metrics: dict[str, float]) -> None:
        """Step 0 is the evaluation before any training; step n is what the n-th step did."""
        if not self.strategy.comm.is_main or not metrics:
            return
        self.folder.append_metrics(step, metrics)
        if board is not None:
            for name, value in metrics.items():
                board.add_scalar(name, value, step)

    def _save(self) -> None:
        with self.watch.measure("time/checkpoint"):
            self.strategy.set_global_step(self.step_index)
            self.strategy.save_ckpt(
                self.model,
                str(self.folder.checkpoints),
                max_num=self.config.checkpoint.keep,
                max_mem=0,
                client_state={"step": self.step_index, **self.state_dict()},
                **self._beside(),
            )

    def _beside(self) -> dict[str, Any]:
        """Left out where there is none, for strategies that know of no companions."""
        companions = self.companions()
        return {"companions": companions} if companions else {}

    def _finish(self, board: Any, console: RunConsole) -> None:
        self.strategy.finish_saving()
        self.save_models(self.folder.final)
        if self.config.ema_decay:
            with self.strategy.averaged_weights(self.model):
                self.save_models(self.folder.final_ema)
        if self.strategy.comm.is_main:
            console.final_table(self.folder.metrics())
            console.say(f"model: {self.folder.final}")
        if board is not None:
            board.close()

    def close(self) -> None:
        """Ends the engine and leaves the process group."""
        self.strategy.close()
