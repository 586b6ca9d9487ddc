"""Runs a script of scripts/ on some ranks, into a folder."""

from __future__ import annotations

import sys
from pathlib import Path

from lightrl.testing import run_program, run_spmd


def run_script(
    script: Path, world: int, flags: list[str], folder: Path, *, expect_failure: bool = False, timeout_s: float = 280
) -> str:
    """Returns what the script said. world: 0 for a process without torchrun's environment."""
    arguments = [*flags, "--output_dir", str(folder)]
    if world == 0:
        command = [sys.executable, str(script), *arguments]
        return run_program(command, timeout_s=timeout_s, expect_failure=expect_failure)
    return run_spmd(script, *arguments, world_size=world, timeout_s=timeout_s, expect_failure=expect_failure)
