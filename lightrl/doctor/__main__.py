"""Runs the checks on the ranks that torchrun started: torchrun --nproc_per_node N -m lightrl.doctor [OPTIONS]."""

import sys

from lightrl.doctor.report import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
