"""Sums of rows of bytes by compiled code, about as fast as a CPU reads memory (--native.cpu_kernels)."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from lightrl.c_library import compiled

_SOURCE = Path(__file__).with_suffix(".c")
ROW = 1 << 12  # bytes that are multiplied together

_library: ctypes.CDLL | None = None


def compile_row_sums() -> None:
    """Lets row_sums() use compiled code in this process, where the processor has the instructions (AVX-512 VNNI)."""
    global _library
    if _library is None:
        library = compiled(_SOURCE, {"ROW": ROW})
        if library.can_sum():
            pointer = ctypes.c_void_p
            library.sum_rows.argtypes = (ctypes.c_long, pointer, pointer, pointer, ctypes.c_int)
            library.sum_rows.restype = None
            _library = library


def row_sums(rows: Tensor, columns: Tensor) -> Tensor | None:
    """Returns the exact products [2, n] int32 of bytes [n, 4096] and columns [2, 4096]; None without compiled code."""
    if _library is None or not rows.is_contiguous() or rows.shape[1] != ROW:
        return None
    out = torch.empty(2, len(rows), dtype=torch.int32)
    pointers = (rows.data_ptr(), columns.data_ptr(), out.data_ptr())
    _library.sum_rows(len(rows), *pointers, torch.get_num_threads())
    return out
