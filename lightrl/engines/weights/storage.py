"""How an engine frees the memory of its weights, and takes it again."""

from __future__ import annotations

import torch
from torch import nn


def drop_weights(model: nn.Module) -> list[tuple[torch.UntypedStorage, int]]:
    """Frees the memory of all parameters; resizing each storage back to its bytes makes room for new values."""
    storages = {item.untyped_storage().data_ptr(): item.untyped_storage() for item in model.parameters()}
    dropped = [(storage, storage.nbytes()) for storage in storages.values()]
    for storage, _ in dropped:
        storage.resize_(0)
    return dropped
