"""What MLflow is told; the package itself need not be installed."""

import sys
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest

from lightrl.trainers.loggers.attach import LoggedRun
from lightrl.trainers.loggers.mlflow import MLflowLogger


def test_calls(logged_run: LoggedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    package: Any = Mock(spec=ModuleType("mlflow"))
    for name in ("set_tracking_uri", "set_experiment", "start_run", "log_params", "log_metrics", "end_run"):
        setattr(package, name, Mock())
    monkeypatch.setitem(sys.modules, "mlflow", package)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    logger = MLflowLogger(logged_run)
    logger.log(2, {"loss": 0.5, "eval/pass@4": 1.0, "eval/math (hard)/avg@8": 0.25})
    logger.close()
    package.set_tracking_uri.assert_called_once_with(f"sqlite:///{logged_run.folder}/mlflow.db")
    package.log_params.assert_called_once_with({"lr": "0.5", "judge.key": "***"})
    package.log_metrics.assert_called_once_with(
        {"loss": 0.5, "eval/pass_at_4": 1.0, "eval/math _hard_/avg_at_8": 0.25}, step=2
    )
    package.end_run.assert_called_once_with()
