"""Trains on the ranks that torchrun started: torchrun --nproc_per_node N -m lightrl.train grpo [OPTIONS]."""

import sys

from lightrl.programs import train

if __name__ == "__main__":
    train(sys.argv[1:], "python -m lightrl.train")
