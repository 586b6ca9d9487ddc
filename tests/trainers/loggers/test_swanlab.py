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
    monkeypatch.delenv("SWANLAB_MODE", raising=False)
    logger = SwanLabLogger(logged_run)
    logger.log(2, {"loss": 0.5})
    logger.close()
    assert package.init.call_args.kwargs["mode"] == "local"
    assert package.init.call_args.kwargs["config"] == {"lr": 0.5, "judge.key": "***"}
    package.log.assert_called_once_with({"loss": 0.5}, step=2)
    package.finish.assert_called_once_with()
