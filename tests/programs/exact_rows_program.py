"""Prints whether rows of products are independent; with an argument, without the two things that make them so."""

import os
import sys

from lightrl.exact import environment

if __name__ == "__main__":
    if len(sys.argv) > 1:
        os.environ[environment.VARIABLE] = sys.argv[1]
        environment.LEAST_ROWS = 1
    environment.fix_arithmetic()
    print("independent")
