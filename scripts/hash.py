"""Recompute the hashes of a run's saved weights: python scripts/hash.py RUN. The exit code is 1 if one differs."""

import sys

from lightrl.programs import start

if __name__ == "__main__":
    sys.exit(start("hash"))
