"""Prints whether rows of products are independent, after MKL_CBWR was set to the argument, if there is one."""

import os
import sys

from lightrl.exact.environment import VARIABLE, fix_arithmetic

if __name__ == "__main__":
    if len(sys.argv) > 1:
        os.environ[VARIABLE] = sys.argv[1]
    fix_arithmetic()
    print("independent")
