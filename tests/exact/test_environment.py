"""The proof of independent rows holds with the setting of MKL, and fails without it."""

from __future__ import annotations

import sys

import pytest
import torch

from lightrl.exact.environment import VARIABLE
from lightrl.testing.spmd import run_program

_PROGRAM = """
import sys
from lightrl.exact.environment import fix_arithmetic
try:
    fix_arithmetic()
except ValueError as error:
    sys.exit(str(error))
print("independent")
"""


def _run(setting: str, *, fails: bool) -> str:
    env = {VARIABLE: setting} if setting else {}
    return run_program([sys.executable, "-c", _PROGRAM], timeout_s=60, env=env, expect_failure=fails)


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")
def test_rows_are_independent_with_the_setting_and_refused_without() -> None:
    assert "independent" in _run("", fails=False)
    assert f"{VARIABLE}=AUTO" in _run("AUTO", fails=True)
