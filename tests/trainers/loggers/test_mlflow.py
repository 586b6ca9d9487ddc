"""What MLflow is told; the package itself need not be installed."""

import dataclasses
import os
import sys
import threading
from pathlib import Path
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
    for name in ("set_experiment", "log_params", "log_metrics"):
        setattr(made, name, Mock())
    runs: list[Mock] = []  # those that have begun and not ended, as MLflow keeps them
    made.active_run = Mock(side_effect=lambda: runs[-1] if runs and _begins_runs() else None)
    made.start_run = Mock(side_effect=lambda **options: runs.append(_run(len(runs), **options)) or runs[-1])
    made.end_run = Mock(side_effect=lambda status: runs.pop())
    # Processes that the program starts are to inherit it.
    made.set_tracking_uri = Mock(side_effect=lambda uri: monkeypatch.setenv("MLFLOW_TRACKING_URI", uri))
    made.MlflowClient = Mock(return_value=Mock(search_runs=Mock(return_value=[])))
    made.exceptions = Mock(MlflowException=MlflowError)
    monkeypatch.setitem(sys.modules, "mlflow", made)
    for name in ("TRACKING_URI", "EXPERIMENT_ID", "EXPERIMENT_NAME", "RUN_ID"):
        monkeypatch.delenv(f"MLFLOW_{name}", raising=False)
    return made


def _begins_runs() -> bool:
    """MLflow keeps active runs per thread, and they begin in the first."""
    return threading.current_thread() is threading.main_thread()


def _run(number: int, tags: dict[str, str], **_: Any) -> Mock:
    return Mock(info=Mock(run_id=f"id{number}", experiment_id="7"), data=Mock(tags=tags))


def test_calls(logged_run: LoggedRun, package: Any) -> None:
    long = dataclasses.replace(logged_run, options={**logged_run.options, "reward": "x" * 501})
    logger = MLflowLogger(long)
    logger.log(2, {"loss": 0.5, "eval/pass@4": 1.0, "eval/math (hard)/avg@8": 0.25})
    logger.close()
    package.set_tracking_uri.assert_called_once_with(f"sqlite:///{logged_run.folder}/mlflow.db")
    package.log_params.assert_called_once_with({"lr": "0.5", "judge.key": "***", "reward": "x" * 500})  # as it takes it
    package.log_metrics.assert_called_once_with(
        {"loss": 0.5, "eval/pass_at_4": 1.0, "eval/math _hard_/avg_at_8": 0.25}, step=2, run_id="id0"
    )
    package.end_run.assert_called_once_with("FINISHED")


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("wrong"), "FAILED"), (KeyboardInterrupt(), "KILLED"), (SystemExit(75), "KILLED")]
)
def test_a_run_that_does_not_end_well_is_not_left_running(
    logged_run: LoggedRun, package: Any, error: BaseException, status: str
) -> None:
    logger = MLflowLogger(logged_run)
    telling = threading.Thread(target=logger.fail, args=(error,))  # as the end of a program does
    telling.start()
    telling.join()
    package.MlflowClient().set_terminated.assert_called_once_with("id0", status)
    logger.close()
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


def test_each_run_of_a_process_has_its_own_database(logged_run: LoggedRun, package: Any, tmp_path: Path) -> None:
    second = dataclasses.replace(logged_run, folder=tmp_path / "second")
    for run in (logged_run, second):
        MLflowLogger(run).close()
    asked = [call.args[0] for call in package.set_tracking_uri.mock_calls]
    assert asked == [f"sqlite:///{run.folder}/mlflow.db" for run in (logged_run, second)]


def test_a_run_is_nested_in_that_of_the_program_and_leaves_it_open(logged_run: LoggedRun, package: Any) -> None:
    package.start_run(tags={})
    logger = MLflowLogger(logged_run)
    assert package.start_run.call_args.kwargs["nested"]
    assert package.start_run.call_args.kwargs["experiment_id"] == "7"
    package.set_tracking_uri.assert_not_called()
    package.set_experiment.assert_not_called()
    logger.close()
    logger.close()
    package.end_run.assert_called_once_with("FINISHED")


@pytest.mark.parametrize("name", ["MLFLOW_EXPERIMENT_ID", "MLFLOW_RUN_ID"])
def test_the_place_of_a_platform_is_kept(
    logged_run: LoggedRun, package: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "3")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://there")
    MLflowLogger(logged_run)
    package.set_tracking_uri.assert_not_called()
    package.set_experiment.assert_not_called()
    assert (os.environ[name], os.environ["MLFLOW_TRACKING_URI"]) == ("3", "http://there")


def test_a_run_that_the_platform_names_is_not_looked_for(
    logged_run: LoggedRun, package: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """start_run() without an id takes that of MLFLOW_RUN_ID, though another run of this id may have begun earlier."""
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "3")
    monkeypatch.setenv("MLFLOW_RUN_ID", "4")
    package.MlflowClient().search_runs.return_value = [Mock(info=Mock(run_id="earlier"))]
    MLflowLogger(logged_run)
    assert "run_id" not in package.start_run.call_args.kwargs


def test_a_continued_run_continues_its_run_of_mlflow(logged_run: LoggedRun, package: Any) -> None:
    """After a kill it is still running there, and keeps the parameters that it has."""
    package.set_experiment.return_value = Mock(experiment_id="7")
    found = Mock(info=Mock(run_id="earlier"), data=Mock(params={"lr": "0.1"}))
    package.MlflowClient().search_runs.return_value = [found]
    package.start_run.side_effect = lambda run_id: found
    logger = MLflowLogger(logged_run)
    package.MlflowClient().search_runs.assert_called_once_with(
        ["7"], f"tags.`lightrl.id` = '{logged_run.id}'", max_results=1
    )
    package.start_run.assert_called_once_with(run_id="earlier")
    package.log_params.assert_called_once_with({"judge.key": "***"})
    logger.log(2, {"loss": 0.5})
    package.log_metrics.assert_called_once_with({"loss": 0.5}, step=2, run_id="earlier")
    package.active_run.side_effect, package.end_run.side_effect = [found], None
    logger.close()
    package.end_run.assert_called_once_with("FINISHED")


def test_a_trainer_that_was_not_closed_has_failed(logged_run: LoggedRun, package: Any) -> None:
    MLflowLogger(logged_run)
    MLflowLogger(logged_run).close()
    assert [call.args[0] for call in package.end_run.mock_calls] == ["FAILED", "FINISHED"]
