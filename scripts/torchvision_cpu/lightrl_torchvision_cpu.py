"""Declares two operators that torchvision expects, where its own library cannot be loaded.

The package index serves torchvision as a CUDA build only. Beside a CPU build of torch its library does not load, and
then `import torchvision` fails at the first operator that it describes:
https://github.com/pytorch/vision/blob/v0.28.0/torchvision/_meta_registrations.py#L163
transformers imports torchvision wherever it is installed, so no model would load either. The transforms that image
processors use are plain torch. This package can go when setup can install a CPU build of torchvision.

torch calls `declare_operators` in every process, through an entry point, so processes that libraries start have it too.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_declared: list[torch.library.Library] = []  # an operator lives as long as its library object


def declare_operators() -> None:
    """Declares torchvision::nms and torchvision::qnms unless torchvision's own library provides them."""
    spec = importlib.util.find_spec("torchvision")
    if _declared or spec is None or not spec.submodule_search_locations:
        return
    if _loads(Path(spec.submodule_search_locations[0])):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(name + _SCHEMA)
    _declared.append(library)


def _loads(package: Path) -> bool:
    """Loads torchvision's library, as its own import would, and returns whether that succeeded."""
    try:
        for path in package.glob("_C*.*"):  # _C.so, and _C_stable.so since 0.29
            torch.ops.load_library(path)
            return True
    except OSError:
        return False
    return False
