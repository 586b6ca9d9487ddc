"""What --log.tokens writes of a sample; a whole run with it is in test_profiling.py."""

from types import SimpleNamespace

import pytest

from lightrl.records import Experience, Prompt, Sample
from lightrl.rewards.scoring import RewardError
from lightrl.trainers.token_log import TokenLog, log_tokens


def test_what_ranks_know_of_a_sample_is_put_together() -> None:
    prompt = Prompt(index=0, text="p", token_ids=(1,))
    sample = Sample(
        prompt=prompt,
        position=1,
        sample_index=0,
        response_ids=(5, 6),
        sampler_logprobs=(-1.0, -2.0),
        versions=(3, 4),
        finish_reason="stop",
        text="ab",
        own=(True, False),
    )
    maker, trainer_of_it = TokenLog(2), TokenLog(2)
    maker.note_rewards("right", [sample], [1.0])
    maker.note_rewards("judged", [sample], [RewardError("no")])  # a failed reward has no number
    trainer_of_it._values = {(1, 0): {"ratio": [1.0, 1.1]}}
    maker.merge([maker.take(), trainer_of_it.take()])
    row = maker.row(Experience(sample=sample, reward=1.0, advantage=0.5), lambda ids: f"<{ids[0]}>")
    assert row == {
        "tokens": {"text": ["<5>", "<6>"], "version": [3, 4], "mask": [1.0, 0.0], "ratio": [1.0, 1.1]},
        "rewards": {"right": 1.0},
    }


def test_a_trainer_without_a_loss_is_refused() -> None:
    trainer = SimpleNamespace()
    with pytest.raises(ValueError, match="--log.tokens needs a trainer that has loss"):
        log_tokens(trainer)
