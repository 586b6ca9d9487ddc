import torch
from torch.testing import assert_close

from lightrl.strategy.optim.optimizers import clip_gradients


def with_grad(*values: float) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros(len(values)))
    parameter.grad = torch.tensor(values)
    return parameter


def test_one_norm_over_all_parameters() -> None:
    first, second, frozen = with_grad(3.0), with_grad(0.0, 4.0), torch.nn.Parameter(torch.zeros(2))
    norm = clip_gradients([first, second, frozen], 1.0)
    assert_close(norm, torch.tensor(5.0))  # sqrt(9 + 16)
    assert_close(first.grad, torch.tensor([0.6]), atol=1e-6, rtol=0)
    assert_close(second.grad, torch.tensor([0.0, 0.8]), atol=1e-6, rtol=0)


def test_below_the_limit_and_without_a_limit_nothing_changes() -> None:
    for limit in (5.1, 0.0):
        parameter = with_grad(3.0, 4.0)
        assert_close(clip_gradients([parameter], limit), torch.tensor(5.0))
        assert_close(parameter.grad, torch.tensor([3.0, 4.0]))


def test_no_gradients() -> None:
    assert clip_gradients([torch.nn.Parameter(torch.zeros(2))], 1.0) == 0
