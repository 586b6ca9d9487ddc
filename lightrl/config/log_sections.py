"""What a run logs besides metrics.jsonl, and to which loggers."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from lightrl.config.options import option

LOGGERS = ("wandb", "trackio", "mlflow", "swanlab")  # each the name of a package, and of the extra that installs it


@dataclass(kw_only=True, slots=True)
class LogConfig:
    """What a run logs besides metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard files beside metrics.jsonl."""
    to: str = option("", resume="free")
    """Loggers that get the same metrics, separated by commas: wandb, trackio, mlflow, swanlab (each needs the extra of
    its name), tensorboard, or a class of your own as package.module:Class or path/to/file.py:Class.
    docs/metrics.md has their settings."""

    @property
    def loggers(self) -> tuple[str, ...]:
        """The names of --log.to; tensorboard only if it is not on anyway."""
        names = [name.strip() for name in self.to.split(",") if name.strip()]
        return tuple(name for name in dict.fromkeys(names) if name != "tensorboard" or not self.tensorboard)

    def check(self) -> None:
        """Raises ValueError for a logger that is unknown or not installed."""
        check_loggers(self.loggers)


@dataclass(kw_only=True, slots=True)
class RolloutLogConfig(LogConfig):
    """What a run logs besides metrics.jsonl, with its samples."""

    samples_per_step: int = option(4, at_least=0)
    """Number of samples written to samples.jsonl at each step."""
    tokens: bool = False
    """Write each token of these samples with its advantage, ratio, mask, weight version, logprob and entropy, and each
    of several rewards, for `lightrl report`."""


def check_loggers(names: Sequence[str]) -> None:
    """Raises ValueError for a name that is unknown, or whose package is not installed."""
    for name in names:
        if name in LOGGERS and importlib.util.find_spec(name) is None:
            raise ValueError(f'--log.to {name} needs {name}, which is not installed: pip install "lightrl[{name}]".')
        if name not in (*LOGGERS, "tensorboard") and ":" not in name:
            known = ", ".join((*LOGGERS, "tensorboard"))
            raise ValueError(
                f"--log.to {name}: choose from {known}, or give your own as package.module:Class "
                "or path/to/file.py:Class."
            )
