"""What SwanLab is told; the package itself need not be installed."""

import sys
from typing import Any
from unittest.mock import Mock

import pytest

from lightrl.trainers.loggers.attach import LoggedRun
from lightrl.trainers.loggers.swanlab import SwanLabLogger


def test_calls(logged_run: LoggedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    package: Any = Mock()
    monkeypatch.setitem(sys.modules, "swanlab", package)
    for name in ("SWANLAB_MODE", "SWANLAB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    logger = SwanLabLogger(logged_run)
    logger.log(2, {"loss": 0.5})
    logger.close()
    assert package.init.call_args.kwargs["mode"] == "local"
    assert (package.init.call_args.kwargs["project"], package.init.call_args.kwargs["experiment_name"]) == (
        "lightrl",
        "run",
    )
    assert not package.init.call_args.kwargs.keys() & {"id", "resume"}
    assert package.init.call_args.kwargs["config"] == {"lr": 0.5, "judge.key": "***"}
    package.log.assert_called_once_with({"loss": 0.5}, step=2)
    package.finish.assert_called_once_with()


@pytest.mark.parametrize("mode", ["cloud", "online"])
def test_the_service_continues_the_experiment_of_a_run(
    mode: str, logged_run: LoggedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    package: Any = Mock()
    monkeypatch.setitem(sys.modules, "swanlab", package)
    monkeypatch.setenv("SWANLAB_MODE", mode)
    for name in ("SWANLAB_RUN_ID", "SWANLAB_RESUME"):
        monkeypatch.delenv(name, raising=False)
    SwanLabLogger(logged_run)
    given = package.init.call_args.kwargs
    assert (given["id"], given["resume"]) == ("0123abcd0000000000000", "allow")  # 21 characters
    monkeypatch.setenv("SWANLAB_RUN_ID", "mine")
    SwanLabLogger(logged_run)
    assert package.init.call_args.kwargs["id"] == "mine"
