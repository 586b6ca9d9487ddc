"""Recompute the hashes of a run's saved weights: python scripts/hash.py RUN. The exit code is 1 if one differs."""

import sys

from lightrl.trainers.hash_run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
