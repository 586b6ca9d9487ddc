"""The arithmetic of matrix products: with a setting of MKL, a row of one does not depend on the rows beside it."""

from __future__ import annotations

import os

import torch
from torch.nn import functional as F

VARIABLE = "MKL_CBWR"  # MKL reads it when it is called first
_ROW_COUNTS = (1, 2, 3, 4, 7, 8, 12, 17)  # without the setting, small products take kernels of their own


def fix_arithmetic() -> None:
    """Sets MKL_CBWR unless the environment does, and proves that rows are independent; ValueError if they are not.

    It must come before the first matrix product of the process.
    """
    widest = "AVX512" if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else "AVX2"
    os.environ.setdefault(VARIABLE, f"{widest},STRICT")
    if not rows_are_independent():
        raise _dependent_rows()


def rows_are_independent() -> bool:
    """Returns whether the first rows of a product have the same bits when they are multiplied alone."""
    numbers = torch.arange(640 * 640, dtype=torch.float32).mul_(0.7).sin_().view(640, 640)
    rows, weight = numbers[:32], numbers[:512]
    whole = F.linear(rows, weight)
    return all(torch.equal(F.linear(rows[:count], weight), whole[:count]) for count in _ROW_COUNTS)


def _dependent_rows() -> ValueError:
    return ValueError(
        f"--exact True needs matrix products whose rows do not depend on each other, and here they do, with "
        f"{VARIABLE}={os.environ.get(VARIABLE)}. It takes a torch that is built with MKL, on an x86 CPU with AVX2, and "
        f"{VARIABLE}=AVX2,STRICT or AVX512,STRICT before the first product of the process. Give that, or leave --exact "
        "out."
    )
