"""What MLflow is told; the package itself need not be installed."""

import sys
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest

from lightrl.trainers.loggers.attach import LoggedRun
from lightrl.trainers.loggers.mlflow import MLflowLogger


class MlflowError(Exception):
    """Stands for MlflowException, by which MLflow tells of a server that does not answer."""


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Any:
    made: Any = Mock(spec=ModuleType("mlflow"))
    for name in ("set_tracking_uri", "set_experiment", "start_run", "log_params", "log_metrics", "end_run"):
        setattr(made, name, Mock())
    made.exceptions = Mock(MlflowException=MlflowError)
    monkeypatch.setitem(sys.modules, "mlflow", made)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return made


def test_calls(logged_run: LoggedRun, package: Any) -> None:
    logger = MLflowLogger(logged_run)
    logger.log(2, {"loss": 0.5, "eval/pass@4": 1.0, "eval/math (hard)/avg@8": 0.25})
    logger.close()
    package.set_tracking_uri.assert_called_once_with(f"sqlite:///{logged_run.folder}/mlflow.db")
    package.log_params.assert_called_once_with({"lr": "0.5", "judge.key": "***"})
    package.log_metrics.assert_called_once_with(
        {"loss": 0.5, "eval/pass_at_4": 1.0, "eval/math _hard_/avg_at_8": 0.25}, step=2
    )
    package.end_run.assert_called_once_with()


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("wrong"), "FAILED"), (KeyboardInterrupt(), "KILLED"), (SystemExit(75), "KILLED")]
)
def test_a_run_that_does_not_end_well_is_not_left_running(
    logged_run: LoggedRun, package: Any, error: BaseException, status: str
) -> None:
    MLflowLogger(logged_run).fail(error)
    package.end_run.assert_called_once_with(status)


def test_a_server_that_fails_during_the_run_is_only_warned_of(
    logged_run: LoggedRun, package: Any, caplog: pytest.LogCaptureFixture
) -> None:
    logger = MLflowLogger(logged_run)
    package.log_metrics.side_effect = package.end_run.side_effect = MlflowError("API request failed")
    logger.log(2, {"loss": 0.5})
    logger.close()
    assert caplog.messages == [
        "MLflow lacks the metrics of step 2: API request failed",
        "MLflow lacks the end of the run: API request failed",
    ]
    package.log_metrics.side_effect = ValueError("no defect of the server")
    with pytest.raises(ValueError, match="no defect"):
        logger.log(3, {"loss": 0.5})
