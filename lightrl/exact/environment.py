"""The arithmetic of matrix products in an exact run: a row does not depend on the other rows.

On Intel CPUs, a setting of MKL ensures that. On AMD CPUs, MKL ignores the setting and computes products of few rows in
special ways, so a product in an exact run has at least LEAST_ROWS rows.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor
from torch.nn import functional as F

VARIABLE = "MKL_CBWR"  # MKL reads it at its first call
LEAST_ROWS = 16  # on AMD, products are computed alike from 12 rows on with two threads, from 4 rows on with one
_ROW_COUNTS = (1, 2, 3, 4, 7, 8, 12, 17, 33, 64, 100)  # small products use special kernels

_linear = F.linear


def fix_arithmetic() -> None:
    """Makes the rows of products independent in this process; raises ValueError if a check finds that they are not.

    It sets MKL_CBWR, unless the environment does, so it must be called before the first matrix product. It also makes
    modules use linear() below in place of torch's.
    """
    widest = "AVX512" if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else "AVX2"
    os.environ.setdefault(VARIABLE, f"{widest},STRICT")
    setattr(F, "linear", linear)  # noqa: B010 (mypy takes no assignment to a function)
    if not rows_are_independent():
        raise _dependent_rows()


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes F.linear, adding rows of zeros to inputs of fewer than LEAST_ROWS rows."""
    missing = LEAST_ROWS - rows.shape[:-1].numel()
    if missing <= 0:
        return _linear(rows, weight, bias)
    product = _linear(F.pad(rows.reshape(-1, rows.shape[-1]), (0, 0, 0, missing)), weight, bias)
    return product[:-missing].view(*rows.shape[:-1], len(weight))  # even if there is no row


def rows_are_independent() -> bool:
    """Returns whether the first rows of a product have the same bits when multiplied on their own."""
    numbers = torch.arange(640 * 640, dtype=torch.float32).mul_(0.7).sin_().view(640, 640)
    rows, weight = numbers[:128], numbers[:512]
    whole = F.linear(rows, weight)
    return all(torch.equal(F.linear(rows[:count], weight), whole[:count]) for count in _ROW_COUNTS)


def _dependent_rows() -> ValueError:
    return ValueError(
        f"--exact True needs matrix products whose rows do not depend on each other, and here they do, with "
        f"{VARIABLE}={os.environ.get(VARIABLE)} and {torch.get_num_threads()} threads. It takes a torch that is built "
        f"with MKL, an x86 CPU with AVX2, {VARIABLE}=AVX2,STRICT or AVX512,STRICT before the first product of the "
        "process, and on some CPUs few threads (OMP_NUM_THREADS=1). Give that, or leave --exact out."
    )
