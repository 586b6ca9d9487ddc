"""The exact engine's logprobs are the exact policy's, to the last bit; without any one safeguard they are not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import exact_scores_program
import pytest
import torch

from lightrl.exact.environment import VARIABLE
from lightrl.testing import run_program

needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")


def run(mode: str, **env: str) -> Any:
    command = [sys.executable, str(Path(str(exact_scores_program.__file__))), mode]
    output = run_program(command, timeout_s=200, env={"OMP_NUM_THREADS": "1", **env})
    (line,) = (line for line in output.splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


@needs_mkl
def test_engine_and_policy_agree_to_the_last_bit_and_by_each_safeguard() -> None:
    """For families that are fused and one that is not, at two temperatures, over whole runs, and with an adapter."""
    result = run("exact")
    assert {name: largest for name, largest in result["largest"].items() if largest != 0} == {}
    assert set(exact_scores_program.FAMILIES) - set(result["fused"]) == {"modules"}
    assert result["same_hash"]  # old logprobs of the engine are those of the trainer
    without = result["without"]
    assert without.pop("all are put back") == 1
    assert {name for name, difference in without.items() if not difference > 0} == set()


@needs_mkl
def test_without_the_setting_of_mkl_they_differ() -> None:
    assert run("default", **{VARIABLE: "AUTO"}) > 0
