"""Runs scripts/train_grpo.py, with its options, with a faster start of SGLang."""

import runpy
from pathlib import Path

import sglang_fast_start

if __name__ == "__main__":
    sglang_fast_start.enable()
    runpy.run_path(str(Path(__file__).resolve().parents[2] / "scripts" / "train_grpo.py"), run_name="__main__")
