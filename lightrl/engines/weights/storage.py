"""What an engine does with the memory of its weights: fills it, gives it back, and takes it again."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_NUM_ROWS = 128  # of a matrix that is turned at a time: they fit into a core's second cache
_GAP = 16  # elements between rows, so that the values of a column do not compete for one place in the cache
_WORTH_TURNING = 1 << 16  # elements from which on copy_() is slower


def drop_weights(model: nn.Module) -> list[tuple[torch.UntypedStorage, int]]:
    """Frees the memory of all parameters; resizing each storage to its bytes again gives room for new values."""
    storages = {item.untyped_storage().data_ptr(): item.untyped_storage() for item in model.parameters()}
    dropped = [(storage, storage.nbytes()) for storage in storages.values()]
    for storage, _ in dropped:
        storage.resize_(0)
    return dropped


def copy_weight(target: Tensor, source: Tensor) -> None:
    """Copies a tensor; on a CPU into a matrix that lies transposed, several times as fast as copy_() does."""
    is_turned = target.dim() == 2 and target.stride(0) == 1 and target.stride(1) > 1
    if not is_turned or target.numel() < _WORTH_TURNING or target.device.type != "cpu":
        target.copy_(source)
        return
    rows = torch.empty(_NUM_ROWS, target.shape[1] + _GAP, dtype=target.dtype)[:, : target.shape[1]]
    for some, given in zip(target.split(_NUM_ROWS), source.split(_NUM_ROWS), strict=True):
        some.copy_(rows[: len(given)].copy_(given))
