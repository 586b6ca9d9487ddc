"""Repeat an asynchronous run: python scripts/replay.py RUN --output_dir NEW, or the same under torchrun."""

from lightrl.programs import start

if __name__ == "__main__":
    start("replay")
