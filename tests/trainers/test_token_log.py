"""What --log.tokens writes of a sample; a whole run with it is in test_profiling.py."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_samples import made_sample

from lightrl.comm import Comm
from lightrl.models.policy import response_batch
from lightrl.records import Experience, Prompt, Sample, StateValues, TokenScores
from lightrl.rewards.reward_set import RewardSet, WeightedReward
from lightrl.rewards.scoring import FailureBudget, RewardError
from lightrl.trainers.observer import Observer
from lightrl.trainers.token_log import TokenLog, token_log


def make_sample() -> Sample:
    prompt = Prompt(index=0, text="p", token_ids=(1,))
    return made_sample(
        prompt=prompt,
        position=1,
        response_ids=(5, 6),
        sampler_logprobs=(-1.0, -2.0),
        versions=(3, 4),
        text="ab",
        own=(True, False),
    )


def trainer_with(rewards: list[Any], samples_per_step: int = 2) -> Any:
    """Returns as much of a trainer as a log of tokens needs."""
    return SimpleNamespace(
        strategy=SimpleNamespace(comm=Comm()),
        run=SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids: f"<{ids[0]}>")),
        rewards=RewardSet([WeightedReward(label=f"r{i}", weight=1.0, reward=one) for i, one in enumerate(rewards)])
        if rewards
        else SimpleNamespace(rewards=[]),
        config=SimpleNamespace(log=SimpleNamespace(samples_per_step=samples_per_step)),
        loss=None,
    )


def test_what_ranks_know_of_a_sample_is_put_together() -> None:
    sample = make_sample()
    maker, trainer_of_it = TokenLog(2, trainer_with([])), TokenLog(2, trainer_with([]))
    ranks = [maker, trainer_of_it]
    for log in ranks:
        log._comm = SimpleNamespace(all_gather_object=lambda _: [(one._values, one._rewards) for one in ranks])
    maker.note_rewards("right", [sample], [1.0])
    maker.note_rewards("judged", [sample], [RewardError("no")])  # a failed reward has no number
    maker.note_rewards("other", [sample], [None])  # nor has one that does not apply
    trainer_of_it._values = {(1, 0): {"ratio": [1.0, 1.1]}}
    maker.after_step(1)
    row = maker.sample_columns(Experience(sample=sample, reward=1.0, advantage=0.5))
    assert row == {
        "tokens": {"text": ["<5>", "<6>"], "version": [3, 4], "mask": [1.0, 0.0], "ratio": [1.0, 1.1]},
        "rewards": {"right": 1.0},
    }


def test_a_trainer_without_a_loss_is_refused() -> None:
    trainer = SimpleNamespace()
    with pytest.raises(ValueError, match="--log.tokens needs a trainer that has loss"):
        token_log(trainer)


def test_a_run_that_logs_no_samples_notes_no_tokens() -> None:
    assert type(token_log(trainer_with([], samples_per_step=0))) is Observer
    assert isinstance(token_log(trainer_with([])), TokenLog)


def test_the_values_of_a_step_are_not_those_of_the_one_before() -> None:
    log = TokenLog(2, trainer_with([]))
    batch = response_batch([((1,), (5, 6))])
    for step, logprobs in enumerate(([-1.0, -2.0], [-3.0, -4.0]), start=1):
        scores = TokenScores(logprobs=torch.tensor(logprobs), entropy=torch.zeros(2))
        log.after_forward(scores, batch)
        log.after_step(step)
        (values,) = log._all_values.values()
        assert values["logprob"] == logprobs
        assert not log._values


def test_what_a_critic_says_is_no_value_of_a_token() -> None:
    log = TokenLog(2, trainer_with([]))
    log.after_forward(StateValues(values=torch.zeros(2), final_values=torch.zeros(1)), response_batch([((1,), (5, 6))]))
    assert not log._values


def test_each_of_several_rewards_is_noted() -> None:
    trainer = trainer_with([lambda sample: 1.0, lambda sample: 2.0])
    log = TokenLog(2, trainer)
    sample = make_sample()
    assert trainer.rewards.run("r1", [sample], FailureBudget()) == [2.0]
    assert log._rewards == {((1, 0), "ab"): {"r1": 2.0}}
    trainer.rewards.close()
