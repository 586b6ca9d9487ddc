"""Logs to MLflow: to the server that MLFLOW_TRACKING_URI names, or else to a database in the run's folder."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from lightrl.imports import import_extra
from lightrl.trainers.loggers.attach import PROJECT, LoggedRun

logger = logging.getLogger(__name__)

_LONGEST = 500  # longest parameter, in characters
_OURS = "lightrl.id"  # tag of the runs that begin here
_REFUSED = re.compile(r"[^/\w.\- ]")  # characters that MLflow refuses in a name, by an error that would end the run


class MLflowLogger:
    """Logs to a run of MLflow; a continued run continues that, unless it is nested in a run of the user's program."""

    def __init__(self, run: LoggedRun) -> None:
        self._mlflow = import_extra("mlflow", extra="mlflow", needed_by="--log.to mlflow")
        outer = self._outer_run()
        experiment = self._choose_place(run) if outer is None else ""
        self._client = self._mlflow.MlflowClient()
        place = {"nested": True, "experiment_id": outer.info.experiment_id} if outer else {}
        before = self._earlier_part(run, experiment) if experiment else None
        if before is None:
            started = self._mlflow.start_run(run_name=run.name, tags={_OURS: run.id}, **place)
        else:
            started = self._mlflow.start_run(run_id=before.info.run_id)
        self._id, self._status = started.info.run_id, "FINISHED"
        known = before.data.params if before else ()  # MLflow refuses another value for a parameter
        options = {name: str(value)[:_LONGEST] for name, value in run.options.items() if name not in known}
        self._try(lambda: self._mlflow.log_params(options), "the options")  # a run of MLFLOW_RUN_ID may have others

    def _outer_run(self) -> Any:
        """Returns the run of MLflow that the user's program has begun, in which this one is nested; None without one.

        Ends the run of an earlier trainer of the same process that was not closed after an error.
        """
        while (active := self._mlflow.active_run()) is not None and _OURS in active.data.tags:
            self._mlflow.end_run("FAILED")
        return active

    def _earlier_part(self, run: LoggedRun, experiment: str) -> Any:
        """Returns the run of MLflow that this one continues, which a kill may have left running; None if it is new."""
        found = self._client.search_runs([experiment], f"tags.`{_OURS}` = '{run.id}'", max_results=1)  # the newest
        return next(iter(found), None)

    def _choose_place(self, run: LoggedRun) -> str:
        """Names the server and the experiment where the user has not.

        Returns the experiment's id; empty if MLFLOW_RUN_ID names the run itself.
        """
        given = set(os.environ)
        if "MLFLOW_TRACKING_URI" not in given:
            self._mlflow.set_tracking_uri(f"sqlite:///{run.folder.resolve() / 'mlflow.db'}")
        experiment = os.environ.get("MLFLOW_EXPERIMENT_ID", "")
        if not given & {"MLFLOW_EXPERIMENT_ID", "MLFLOW_RUN_ID"}:
            made = self._mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
            experiment = str(made.experiment_id)
        for name in {"MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_ID"} - given:
            os.environ.pop(name, None)  # MLflow writes it, and the next run would take it for the user's
        return "" if "MLFLOW_RUN_ID" in given else experiment

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics of a step."""
        accepted = {_accepted(name): value for name, value in metrics.items()}
        write = partial(self._mlflow.log_metrics, accepted, step=step, run_id=self._id)
        self._try(write, f"the metrics of step {step}")

    def fail(self, error: BaseException) -> None:
        """Ends the run of MLflow as failed or, after a signal or Ctrl-C, as killed.

        The client does it, because it is told in a thread of its own, in which no run of MLflow is active.
        """
        self._status = "FAILED" if isinstance(error, Exception) else "KILLED"
        self._try(lambda: self._client.set_terminated(self._id, self._status), "the end of the run")

    def close(self) -> None:
        """Ends the run of MLflow."""
        active = self._mlflow.active_run()
        if active is not None and active.info.run_id == self._id:  # otherwise it is over, and this is the user's own
            self._try(lambda: self._mlflow.end_run(self._status), "the end of the run")

    def _try(self, tell: Callable[[], object], lost: str) -> None:
        """Warns of a server that fails, which the run can do without: metrics.jsonl has the metrics, too."""
        try:
            tell()
        except self._mlflow.exceptions.MlflowException as error:
            logger.warning("MLflow lacks %s: %s", lost, error)


def _accepted(name: str) -> str:
    """Returns a metric's name as MLflow takes it: eval/pass@4 as eval/pass_at_4."""
    return _REFUSED.sub("_", name.replace("@", "_at_"))
