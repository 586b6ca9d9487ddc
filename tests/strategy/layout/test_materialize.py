"""Models on the meta device get memory, and the same broadcasts as the model of rank 0."""

import torch
from torch import Tensor, nn

from lightrl.comm import Comm
from lightrl.strategy.layout.materialize import broadcast_buffers, broadcast_from_main


class FromMain(Comm):
    """A rank that receives 7 in every broadcast, and counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_broadcasts = 0

    def broadcast_tensor(self, tensor: Tensor, source: int = 0) -> None:
        self.num_broadcasts += 1
        tensor.fill_(7.0)


def test_a_buffer_that_modules_share_is_broadcast_as_often_on_every_rank() -> None:
    counts = []
    for device in ("cpu", "meta"):
        model, shared = nn.ModuleList([nn.Module(), nn.Module()]), torch.zeros(2, device=device)
        for name in ("first", "second"):
            model[0].register_buffer(name, shared)
        model[1].register_buffer("third", shared)
        comm = FromMain()
        broadcast_buffers(model, torch.device("cpu"), comm)
        counts.append(comm.num_broadcasts)
        assert [buffer.tolist() for _, buffer in model.named_buffers(remove_duplicate=False)] == [[7.0, 7.0]] * 3
    assert counts == [3, 3]


def test_parameters_without_memory_stay_tied_and_frozen() -> None:
    with torch.device("meta"):
        model = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    comm = FromMain()
    broadcast_from_main(model, torch.device("cpu"), comm)
    assert comm.num_broadcasts == 2
    assert model[1].weight is model[0].weight
    assert [layer.weight.requires_grad for layer in model] == [True, True, False]
    assert model[2].weight.tolist() == [[7.0, 7.0]] * 2
