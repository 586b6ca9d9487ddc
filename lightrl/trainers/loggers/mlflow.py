"""Logs to MLflow: to the server that MLFLOW_TRACKING_URI names, or else to a database in the run's folder."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping

from lightrl.imports import import_extra
from lightrl.trainers.loggers.attach import PROJECT, LoggedRun

logger = logging.getLogger(__name__)

_LONGEST = 500  # longest parameter, in characters
_REFUSED = re.compile(r"[^/\w.\- ]")  # characters that MLflow refuses in a name, by an error that would end the run


class MLflowLogger:
    """Logs to a run of MLflow; a continued run gets another run of the same name."""

    def __init__(self, run: LoggedRun) -> None:
        self._mlflow = import_extra("mlflow", extra="mlflow", needed_by="--log.to mlflow")
        if "MLFLOW_TRACKING_URI" not in os.environ:
            self._mlflow.set_tracking_uri(f"sqlite:///{run.folder.resolve() / 'mlflow.db'}")
        self._mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
        self._mlflow.start_run(run_name=run.name, tags={"lightrl.id": run.id})
        self._mlflow.log_params({name: str(value)[:_LONGEST] for name, value in run.options.items()})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics of a step."""
        accepted = {_accepted(name): value for name, value in metrics.items()}
        self._try(lambda: self._mlflow.log_metrics(accepted, step=step), f"the metrics of step {step}")

    def fail(self, error: BaseException) -> None:
        """Ends the run of MLflow as failed or, after a signal or Ctrl-C, as killed."""
        status = "FAILED" if isinstance(error, Exception) else "KILLED"
        self._try(lambda: self._mlflow.end_run(status), "the end of the run")

    def close(self) -> None:
        """Ends the run of MLflow."""
        self._try(self._mlflow.end_run, "the end of the run")

    def _try(self, tell: Callable[[], object], lost: str) -> None:
        """Warns of a server that fails, which the run can do without: metrics.jsonl has the metrics, too."""
        try:
            tell()
        except self._mlflow.exceptions.MlflowException as error:
            logger.warning("MLflow lacks %s: %s", lost, error)


def _accepted(name: str) -> str:
    """Returns a metric's name as MLflow takes it: eval/pass@4 as eval/pass_at_4."""
    return _REFUSED.sub("_", name.replace("@", "_at_"))
