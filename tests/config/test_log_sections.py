"""The names of --log.to."""

import importlib.util
from typing import Any

import pytest

from lightrl.config import GRPOConfig, LogConfig, RolloutLogConfig


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets wandb alone seem installed."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "wandb" else None)


def test_names_are_separated_by_commas_and_tensorboard_is_on_anyway() -> None:
    assert LogConfig(to="wandb, my.own:Logger,tensorboard,wandb").loggers == ("wandb", "my.own:Logger")
    assert LogConfig(to="tensorboard", tensorboard=False).loggers == ("tensorboard",)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("trackio", r"--log.to trackio needs trackio, which is not installed: pip install \"lightrl\[trackio\]\""),
        ("wandbb", "--log.to wandbb: choose from wandb, trackio, mlflow, swanlab, tensorboard, or give your own as"),
    ],
)
def test_mistakes_show_before_the_run(name: str, wanted: str) -> None:
    options: Any = RolloutLogConfig(to=name)
    with pytest.raises(ValueError, match=wanted):
        GRPOConfig(log=options)
