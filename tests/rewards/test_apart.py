"""Which rewards may be computed by each rank by itself; real runs are in tests/trainers/test_separate_program.py."""

import torch
from torch import nn

from lightrl.alone import Alone
from lightrl.comm import Comm
from lightrl.rewards.apart import LoneHost, leave_to_others, load_apart, needs_all_ranks, share_models
from lightrl.rewards.reward_set import RewardSet, WeightedReward


class Together:
    is_collective = True

    def prepare(self, strategy):
        self.host, self.loaded_with = strategy, strategy.comm

    def __call__(self, samples):
        return [1.0] * len(samples)


class Apart(Together):
    works_apart = True


def one(sample):
    return 1.0


def rewards(*given):
    return RewardSet([WeightedReward(label=type(item).__name__, weight=1.0, reward=item) for item in given])


def test_a_reward_of_all_ranks_is_named_unless_it_says_that_it_works_apart():
    assert needs_all_ranks(rewards(one, Apart())) is None
    assert needs_all_ranks(rewards(Apart(), Together())) == "Together"


def test_reward_for_some_records_is_asked_like_the_reward_itself():
    made = rewards(Together()).judge_only(["Together.kind=a"])
    assert needs_all_ranks(made) == "Together"
    assert needs_all_ranks(rewards(Apart()).judge_only(["Apart.kind=a"])) is None


class Strategy:
    device, tokenizer, comm = torch.device("cpu"), "tokenizer", Comm()

    def prepare(self, model, *, is_rlhf=False):
        return model.eval().requires_grad_(not is_rlhf)


def test_a_rank_that_trains_loads_nothing_and_one_that_generates_a_model_of_its_own():
    mine = Apart()
    load_apart(rewards(one, mine), Strategy())
    assert mine.loaded_with is Strategy.comm  # so that an error of one rank ends all
    assert isinstance(mine.host.comm, Alone)
    assert (mine.host.comm.world, mine.host.tokenizer, mine.host.materializes_weights) == (1, "tokenizer", True)
    others = Apart()
    left = rewards(one, others)
    leave_to_others(left)
    left.prepare(Strategy())
    assert not hasattr(others, "host")
    assert left.rewards[0].reward is one
    assert needs_all_ranks(left) is None


def test_a_second_set_of_rewards_borrows_the_models():
    lender, borrower = rewards(one, Apart()), rewards(one, Apart())
    load_apart(lender, Strategy())
    share_models(lender, borrower)
    assert borrower.rewards[1].reward is lender.rewards[1].reward


def test_a_host_of_one_rank_computes_without_gradients():
    host = LoneHost(Strategy())
    model = host.prepare(nn.Linear(1, 1, bias=False), is_rlhf=True)
    nn.init.constant_(model.weight, 3.0)
    scored = host.forward([torch.ones(1), torch.full((1,), 2.0, requires_grad=True)], model=model)
    assert [item.tolist() for item in scored] == [[3.0], [6.0]]
    assert not any(item.requires_grad for item in scored)
