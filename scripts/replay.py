"""Repeat an asynchronous run: python scripts/replay.py RUN --output_dir NEW, or the same under torchrun."""

import sys

if __name__ == "__main__":
    from lightrl.trainers.recorded_run import replay

    replay(sys.argv[1:])
