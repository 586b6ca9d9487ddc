"""The layouts alone, without a strategy: what is read and written whole, in shards and from disk."""

from pathlib import Path

import layout_program
import pytest
import torch
from torch import nn

from lightrl.comm import Comm
from lightrl.strategy.layout.plain import PlainLayout, Weights
from lightrl.testing import run_spmd


def test_a_plain_layout_by_hand() -> None:
    layout_program.check(PlainLayout(Comm()), nn.Parameter(torch.empty(3, 2)))


def test_a_whole_parameter_is_its_own_shard() -> None:
    layout, parameter = PlainLayout(Comm()), nn.Parameter(torch.zeros(2))
    layout.shard(parameter)[0] = 3.0
    assert parameter.tolist() == [3.0, 0.0]
    assert layout.is_whole(parameter)
    assert layout.rows(parameter) is None
    assert layout.whole_shape(parameter) == (2,)


def test_weights_are_cast_and_keep_their_order() -> None:
    layout = PlainLayout(Comm())
    named = [("b", nn.Parameter(torch.ones(2))), ("a", nn.Parameter(torch.zeros(1)))]
    found = list(layout.gather_named(Weights(named, layout).tensors(), torch.bfloat16))
    assert [(name, tensor.dtype) for name, tensor in found] == [("b", torch.bfloat16), ("a", torch.bfloat16)]


def test_a_state_that_is_no_tensor_is_refused() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.state[model.weight]["step"] = 3
    with pytest.raises(ValueError, match="The optimizer's state 'step' of weight is no tensor"):
        list(PlainLayout(Comm()).optimizer_states(model, optimizer))


@pytest.mark.slow
def test_sharded_parameters_on_two_ranks() -> None:
    program = Path(layout_program.__file__)
    assert run_spmd(program, world_size=2, timeout_s=120).count("all checked") == 2
