"""Commands that a test starts end with the test."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from lightrl.testing import run_program


def test_a_command_ends_if_the_test_is_interrupted(tmp_path: Path) -> None:
    pid = tmp_path / "pid"

    def interrupt(*_: Any) -> None:
        if pid.exists() and time.time() - pid.stat().st_mtime > 0.3:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_program(["bash", "-c", f"echo $$ > {pid}; exec sleep 30"], timeout_s=20)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
