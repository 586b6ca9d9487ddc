import torch
from torch import nn

from lightrl.engines.weights.storage import drop_weights


def test_memory_goes_and_comes_back_under_the_same_parameters() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model.tied = model[0].weight
    parameters = list(model.parameters())
    dropped = drop_weights(model)
    assert sum(size for _, size in dropped) == 4 * (15 + 5 + 10 + 2)
    assert all(parameter.untyped_storage().nbytes() == 0 for parameter in parameters)
    for storage, size in dropped:
        storage.resize_(size)
    with torch.no_grad():
        for parameter in parameters:
            parameter.fill_(2.0)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    with torch.no_grad():
        assert float(model(torch.ones(1, 3))[0, 0]) == 5 * 2 * 8 + 2  # 3 * 2 + 2 = 8 in each of five
