"""The command line of `lightrl plan`, and its help, which is there at once."""

from __future__ import annotations

import sys

import pytest

from lightrl.programs import main
from lightrl.testing import run_program


@pytest.mark.parametrize("words", [["--help"], ["grpo", "--help"], ["grpo", "--lr", "1e-6", "-h"]])
def test_the_help_explains_the_options_of_the_plan(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: lightrl plan grpo")
    assert "--device_memory STR\n" in said
    assert said.endswith(" --help explains the options of the trainer.\n")
    assert "lightrl train grpo" in said.splitlines()[-1]


def test_help_with_a_word_searches_the_trainers_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["plan", "grpo", "--help", "lora"])
    assert not end.value.code
    assert "--lora.rank INT\n" in capsys.readouterr().out


def test_the_help_loads_no_torch() -> None:
    code = "import sys; from lightrl.programs import main; main(['plan', '--help']); sys.exit('torch' in sys.modules)"
    assert "--device_memory" in run_program([sys.executable, "-c", code], timeout_s=100)
