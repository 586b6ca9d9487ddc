"""Any command line is read, or refused with exit code 2."""

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightrl.config import GRPOConfig, option, parse_config, section

ROOT = Path(__file__).parents[2]


@dataclass(kw_only=True)
class Inner:
    """A section."""

    share: float = option(0.5, at_least=0, at_most=1)


@dataclass(kw_only=True)
class Outer:
    """A config."""

    width: int = option(1, at_least=1)
    bound: float | None = None
    names: tuple[str, ...] = ()
    inner: Inner = section(Inner)


def test_the_help_may_be_cut_short() -> None:
    """As by `| head`: the reader closes the pipe after the first lines."""
    script = f"{sys.executable} {ROOT / 'scripts' / 'train_grpo.py'} --help | head -n 3; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.startswith("usage: ")
    assert done.stdout.endswith("\n0\n")
    assert done.stderr == ""


def test_an_option_with_too_many_values_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, told in (
        (["--log.to", "wandb", "mlflow", "--lr", "1"], "--log.to takes one value, and 2 follow: wandb mlflow. Join"),
        (["--log.to=wandb", "mlflow"], "Join names by commas: --log.to wandb,mlflow."),
        (["--num-prompts", "4", "-8"], "--num_prompts takes one value, and 2 follow: 4 -8."),
    ):
        with pytest.raises(SystemExit):
            parse_config(GRPOConfig, argv)
        assert told in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse_config(GRPOConfig, ["--reward", "exact_match", "math", "--nothing", "1", "2"])
    assert "takes one value" not in capsys.readouterr().err


WORDS = st.sampled_from(
    ["--lr", "--optim.betas", "--model", "--reward", "--eval.every", "--config", "--", "-", "--=", "--lr=", "--optim",
     "1", "-1", "1e999", "nan", "True", "None", "", "a=b", "@x", "\ud800", "\0", "--seed=\u0661", "0x1", "1_0",
     "--nothing"]
) | st.text(max_size=8)  # fmt: skip


def read_or_refused(kind: type[Any], argv: list[str]) -> None:
    output, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        try:
            assert isinstance(parse_config(kind, argv), kind)
        except SystemExit as end:
            assert end.code in ({0, 2} if {"-h", "--help"} & set(argv) else {2}), argv  # noqa: PT017
            assert output.getvalue() or errors.getvalue()


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(argv=st.lists(WORDS, max_size=5))
def test_any_command_line_is_read_or_refused(argv: list[str]) -> None:
    read_or_refused(Outer, argv)


@settings(max_examples=6, deadline=None, derandomize=True, database=None)  # a third of a second each
@given(argv=st.lists(WORDS, min_size=1, max_size=3))
@example(argv=["--config"])
@example(argv=["--config=/"])
@example(argv=["--model", "\ud800"])
def test_any_command_line_of_a_run_is_read_or_refused(argv: list[str]) -> None:
    read_or_refused(GRPOConfig, argv)
