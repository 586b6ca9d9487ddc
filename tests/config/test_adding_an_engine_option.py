"""An engine option is added in one file: this one declares, parses, checks, saves, resumes and reads a new one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightrl.config import GRPOConfig, StrategyOptions, option, parse_config
from lightrl.strategy import create_strategy
from lightrl.trainers.run_folder import RunFolder


@dataclass(kw_only=True, slots=True)
class ToyConfig(GRPOConfig):
    """Train with an engine of one's own."""

    engine_toys: int = option(2, at_least=1, resume="free")
    """Number of toys."""
    engine_rule: str = "fair"
    """Rule by which they are shared."""


class ToyEngine:
    """An engine reads its option from the strategy's options; a strategy hands it those."""

    def __init__(self, options: StrategyOptions) -> None:
        assert isinstance(options, ToyConfig)
        self.toys = options.engine_toys


def test_it_is_read_from_the_command_line_and_reaches_the_engine(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("engine_rule: strict\nengine_toys: 5\n")
    config = parse_config(ToyConfig, ["--config", str(tmp_path / "run.yaml"), "--engine_toys", "3"])
    assert (config.engine_toys, config.engine_rule) == (3, "strict")
    assert ToyEngine(create_strategy(config).options).toys == 3


def test_it_is_checked_and_described(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="--engine_toys is 0: it must be at least 1"):
        ToyConfig(engine_toys=0)
    with pytest.raises(SystemExit):
        parse_config(ToyConfig, ["--help-all"])
    assert "Number of toys. (default: 2)" in capsys.readouterr().out


@pytest.mark.parametrize(("changed", "refused"), [({"engine_toys": 4}, ""), ({"engine_rule": "none"}, "engine_rule")])
def test_a_resumed_run_may_change_what_the_field_says(tmp_path: Path, changed: dict[str, Any], refused: str) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.open(ToyConfig(), 0)
    folder.append_metrics(1, {})
    if not refused:
        folder.check(ToyConfig(**changed))
        return
    with pytest.raises(ValueError, match="belongs to another run: engine_rule was 'fair', now 'none'"):
        folder.check(ToyConfig(**changed))
