"""Repeat an asynchronous run: python scripts/replay.py RUN --output_dir NEW, or the same under torchrun."""

import sys

from lightrl.programs import start

if __name__ == "__main__":
    sys.exit(start("replay"))
