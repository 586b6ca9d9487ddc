"""The loggers of --log.to, as an observer: rank 0 hands them the metrics that metrics.jsonl gets."""

from __future__ import annotations

import inspect
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Protocol

from lightrl.checkpoint import save_bytes
from lightrl.config import LateMistakeError
from lightrl.config.command_line import flatten
from lightrl.config.options import as_dict
from lightrl.imports import load_object, require_call
from lightrl.torch_settings import settings_kept
from lightrl.trainers.disk_errors import forgive
from lightrl.trainers.observer import Observer

BUILTIN = {
    "tensorboard": "lightrl.trainers.loggers.tensorboard:TensorBoardLogger",
    "wandb": "lightrl.trainers.loggers.wandb:WandbLogger",
    "trackio": "lightrl.trainers.loggers.trackio:TrackioLogger",
    "mlflow": "lightrl.trainers.loggers.mlflow:MLflowLogger",
    "swanlab": "lightrl.trainers.loggers.swanlab:SwanLabLogger",
}
PROJECT = "lightrl"  # default, unless the service's own environment variable names another
_FORM = "A logger is a class with __init__(run), log(step, metrics) and close() (docs/metrics.md)."
_ID_FILE = "logger_id"  # lets a continued run stay the same run in the service
_SECRET = re.compile(r"(^|[._])(key|secret|token|password)$")
_USER_OF_URL = re.compile(r"//[^/@\s]+@")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """Facts about the run that a logger logs."""

    name: str  # name of the run's folder
    id: str  # unchanged when the run is continued
    folder: Path
    step: int  # steps done before
    options: Mapping[str, Any]  # by full name, without secrets


class Logger(Protocol):
    """Interface of a logger; the class, perhaps a user's, is called with a LoggedRun on rank 0 only."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics of a step; step 0 is the evaluation before any training."""

    def close(self) -> None:
        """Writes what has not been written yet."""


class Loggers(Observer):
    """The loggers that a trainer's options name; only rank 0 has any."""

    def __init__(self, trainer: Any) -> None:
        """Creates the loggers; every rank must call it."""
        self._trainer, self._comm = trainer, trainer.strategy.comm
        with self._comm.phase("loggers", local=True):
            own = {name: _own(name) for name in trainer.config.log.loggers if name not in BUILTIN}  # all ranks complain
            self._loggers = _start(trainer.config.log.loggers, own, trainer) if self._comm.is_main else []

    def after_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Passes the metrics to the loggers."""
        for logger in self._loggers:
            with self._comm.phase("log"), settings_kept(f"The logger {type(logger).__name__}"):
                self._forgiven(partial(logger.log, step, metrics))

    def _forgiven(self, write: Callable[[], None]) -> None:
        """Writes; if the options ask for it, only warns of a disk error."""
        if self._trainer.config.checkpoint.on_disk_error == "continue":
            forgive(self._trainer, write, "a logger lacks the metrics of this step")
        else:
            write()

    def after_failure(self, error: BaseException) -> None:
        """Tells the loggers that have the method fail(error), which a logger need not have."""
        for logger in self._loggers:
            getattr(logger, "fail", _ignore)(error)

    def close(self) -> None:
        """Closes the loggers."""
        for logger in self._loggers:
            logger.close()


def _ignore(error: BaseException) -> None:
    """Stands for the method that a logger lacks."""


def _start(names: tuple[str, ...], own: Mapping[str, Any], trainer: Any) -> list[Logger]:
    folder = trainer.folder.root
    run = LoggedRun(
        name=folder.resolve().name,
        id=_id_of(folder),
        folder=folder,
        step=trainer.step_index,
        options=public_options(trainer.config),
    )
    return [_made(name, own[name], run) if name in own else resolve_name(BUILTIN[name])(run) for name in names]


def _made(name: str, kind: Any, run: LoggedRun) -> Logger:
    """Makes a user's logger; raises LateMistakeError if a function of the user's made something else."""
    with settings_kept(f"The logger {name!r}"):
        made = kind(run)
    if not all(callable(getattr(made, method, None)) for method in ("log", "close")):
        raise LateMistakeError(f"The logger {name!r} returned {made!r:.80}, which has no log() or no close(). {_FORM}")
    if not inspect.isclass(kind):  # the methods of a class were checked before the run
        _require_calls(type(made))
    return made  # type: ignore[no-any-return]


def _own(name: str) -> Any:
    """Loads a user's class; what it lacks is found here, because close() is called only when the training is over."""
    try:
        kind = load_object(name, builtin=BUILTIN, what="logger", example="MyLogger")
        inspect.signature(kind).bind(None)
    except TypeError as error:
        raise LateMistakeError(f"The logger {name!r} is called with a LoggedRun: {error}. {_FORM}") from error
    except (ValueError, OSError, ImportError) as error:
        raise LateMistakeError(str(error)) from error
    missing = [method for method in ("log", "close") if not callable(getattr(kind, method, None))]
    if missing and inspect.isclass(kind):
        raise LateMistakeError(f"The logger {name!r} has no method {' and no method '.join(missing)}. {_FORM}")
    if inspect.isclass(kind):
        _require_calls(kind)
    return kind


def _require_calls(kind: type) -> None:
    """Raises LateMistakeError for a class whose log() or close(), an ordinary method, takes other arguments."""
    for method, arguments in (("log", ("step", "metrics")), ("close", ())):
        function = inspect.getattr_static(kind, method, None)
        if inspect.iscoroutinefunction(function):
            raise LateMistakeError(f"The logger's {kind.__name__}.{method} is async, and nothing awaits it. {_FORM}")
        if inspect.isfunction(function):
            try:
                require_call(f"The logger's {kind.__name__}.{method}", function, "self", *arguments)
            except ValueError as error:
                raise LateMistakeError(f"{error} {_FORM}") from error


def _id_of(folder: Path) -> str:
    """Returns the id under which services know the run; a new folder gets a new one."""
    path = folder / _ID_FILE
    if not path.is_file():
        save_bytes(path, f"{uuid.uuid4().hex[:8]}\n".encode())  # an empty file would give every start another run
    return path.read_text().strip()


def public_options(config: Any) -> dict[str, Any]:
    """Returns all options by name, without possible secrets: keys, tokens, and users in URLs."""
    return {name: public(name, value) for name, value in flatten(as_dict(config))}


def public(name: str, value: Any) -> Any:
    """Returns an option without secrets; its texts may be arguments, such as api_key=SECRET."""
    if isinstance(value, list):
        return [public(name, item) for item in value]
    if not isinstance(value, str):
        return value
    argument, separator, content = value.partition("=")
    if separator and content and _SECRET.search(argument):
        return f"{argument}=***"
    return "***" if value and _SECRET.search(name) else _USER_OF_URL.sub("//***@", value)
