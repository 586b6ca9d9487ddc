import pytest
import torch
from torch.testing import assert_close

from lightrl.algorithms.advantages import group_advantages


def test_two_groups_by_hand() -> None:
    # Row 1: mean 0.25; deviations .75, -.25, -.25, -.25; squares .5625 + 3 * .0625 = .75; / 3 = .25; std 0.5.
    #   0.75 / 0.5001 = 1.4997001, -0.25 / 0.5001 = -0.4999000
    # Row 2: mean 2; deviations -2, -1, 0, 3; squares 4 + 1 + 0 + 9 = 14; / 3 = 4.6666667; std 2.1602469.
    #   over 2.1603469: -0.9257772, -0.4628886, 0, 1.3886659
    advantages = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 2.0, 5.0]]))
    expected = torch.tensor([[1.4997001, -0.4999000, -0.4999000, -0.4999000], [-0.9257772, -0.4628886, 0.0, 1.3886659]])
    assert_close(advantages, expected, atol=1e-6, rtol=0)


def test_without_std_only_the_mean_is_taken_off() -> None:
    # mean 0.25
    advantages = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), normalize_std=False)
    assert_close(advantages, torch.tensor([[0.75, -0.25, -0.25, -0.25]]), atol=1e-6, rtol=0)


def test_eps_is_added_to_the_deviation() -> None:
    # mean 1, deviations -1 and 1, std sqrt(2 / 1) = 1.4142136; over 1.4142136 + 1 = 2.4142136: 0.4142136
    advantages = group_advantages(torch.tensor([[0.0, 2.0]]), eps=1.0)
    assert_close(advantages, torch.tensor([[-0.4142136, 0.4142136]]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -0.7, 1e6 + 0.1])
@pytest.mark.parametrize("group_size", [2, 3, 7, 8, 10])
@pytest.mark.parametrize("normalize_std", [True, False])
def test_equal_rewards_give_exactly_zero(reward: float, group_size: int, normalize_std: bool) -> None:
    advantages = group_advantages(torch.full((2, group_size), reward), normalize_std=normalize_std)
    assert (advantages == 0).all()


def test_an_equal_group_leaves_its_neighbour_alone() -> None:
    # Row 2: mean 0.5, std sqrt(0.5) = 0.7071068; 0.5 / 0.7072068 = 0.7070068
    advantages = group_advantages(torch.tensor([[0.1, 0.1], [0.0, 1.0]]))
    assert_close(advantages, torch.tensor([[0.0, 0.0], [-0.7070068, 0.7070068]]), atol=1e-6, rtol=0)


def test_integer_rewards_become_float() -> None:
    assert group_advantages(torch.tensor([[0, 1]])).dtype == torch.float32


def test_no_prompts_give_no_advantages() -> None:
    assert group_advantages(torch.zeros(0, 4)).shape == (0, 4)


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"A group has 1 sample\(s\): it takes at least 2"):
        group_advantages(torch.zeros(3, 1))


def test_flat_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \[6\]: it must be \[prompts"):
        group_advantages(torch.zeros(6))
