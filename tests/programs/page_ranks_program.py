"""What a program of the page does with data on two ranks, each line with its result worked out by hand."""

import os

import numpy as np
import torch

from lightrl.config import StrategyOptions
from lightrl.strategy import strategy_class
from lightrl.testing.tiny_training import expect

if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    early = strategy_class("ddp")(0, None, 1, 2, StrategyOptions())
    for name in ("all_reduce", "all_gather"):
        expect(RuntimeError, "before setup_distributed()", lambda name=name: getattr(early, name)(torch.ones(1)))
    expect(RuntimeError, "before setup_distributed()", lambda: early.prepare(torch.nn.Linear(1, 1)))
    expect(RuntimeError, "before setup_distributed()", lambda: early.setup_dataloader([1, 2], 1))
    fsdp = strategy_class("fsdp")(0, 1.0, 1, 2)
    expect(RuntimeError, "before setup_distributed()", lambda: fsdp.prepare_model(torch.nn.Linear(1, 1)))
    early.setup_distributed()
    strategy = early

    assert strategy.all_reduce({"loss": np.float32(rank), "ids": [rank, 2.0]}, "sum") == {"loss": 1.0, "ids": [1, 4.0]}
    assert strategy.all_reduce(np.array([1.0, rank])).tolist() == [1.0, 0.5]
    before = strategy.comm._control._get_sequence_number_for_group()
    mixed = strategy.all_reduce({"loss": 0.5 if rank else 0, "count": 2 + rank}, "sum")  # rank 0 has added up none
    assert (mixed, type(mixed["count"])) == ({"loss": 0.5, "count": 5}, int)
    assert strategy.comm._control._get_sequence_number_for_group() - before == 1
    assert strategy.all_reduce([0.5 if rank else 0, rank == 1], "mean") == [0.25, 0.5]
    assert strategy.all_reduce(np.float32(0.5) if rank else np.int64(0), "max") == 0.5
    assert strategy.all_reduce((rank, 2.0 - rank, torch.tensor(rank)), "min") == (0, 1.0, torch.tensor(0))
    expect(TypeError, "not NoneType", lambda: strategy.all_reduce({"loss": None if rank else 1.0}))
    assert strategy.all_gather(np.full((rank + 1, 2), rank)).tolist() == [[0, 0], [1, 1], [1, 1]]
    both = (ValueError, "rank 0: torch.float32 [2, 3]; rank 1: torch.float32 [2, 4]")
    expect(*both, lambda: strategy.all_gather(torch.ones(2, 3 + rank)))
    expect(ValueError, "torch.int64", lambda: strategy.all_gather(torch.ones(2).long() if rank else torch.ones(2)))
    assert strategy.all_gather(torch.ones(1)).tolist() == [1.0, 1.0]  # the ranks are in step after it

    # Nine samples, batches of four: rank 0 has five samples and rank 1 four, which it trains in two batches as well.
    model = strategy.prepare(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy.register(model, optimizer)
    loader = strategy.setup_dataloader(torch.arange(9.0)[:, None], 4, shuffle=False, drop_last=False)
    sizes = []
    for batch in loader:
        strategy.backward(model(batch).sum(), model, optimizer)
        strategy.optimizer_step(optimizer, model, None)  # max_norm None clips nothing
        sizes.append(strategy.all_gather(len(batch)).tolist())
    assert sizes == [[4, 2], [1, 2]], sizes
    strategy.close()
