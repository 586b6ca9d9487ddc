"""How an engine frees the memory of its weights, and takes it again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from lightrl.engines.weights.host_memory import move_apart


def drop_weights(model: nn.Module, follow: Callable[[], None] | None = None) -> list[tuple[torch.UntypedStorage, int]]:
    """Frees the memory of all parameters; resizing each storage back to its bytes makes room for new values.

    follow: is called if parameters left memory that other ranks still read, to let go of it.
    """
    if move_apart(model.parameters()) and follow is not None:
        follow()
    storages = {item.untyped_storage().data_ptr(): item.untyped_storage() for item in model.parameters()}
    dropped = [(storage, storage.nbytes()) for storage in storages.values()]
    for storage, _ in dropped:
        storage.resize_(0)
    return dropped
