"""The options of an evaluation."""

import pytest

from lightrl.config import EvaluateConfig, parse_config
from lightrl.config.evaluate import OF_STEPS
from lightrl.trainers.fit import _MAKERS


def test_the_data_to_evaluate_on_are_the_only_ones_read() -> None:
    config = parse_config(EvaluateConfig, ["--eval_data", "mine.jsonl", "--eval.n", "8", "--eval.k", "1", "8"])
    assert (config.train_data, config.eval.k) == ("mine.jsonl", (1, 8))
    assert EvaluateConfig().train_data == "builtin:addition"


def test_a_k_beyond_the_samples_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_config(EvaluateConfig, ["--eval.k", "8"])
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert "--eval.k 8 needs as many samples" in captured.out + captured.err


def test_what_changes_the_steps_of_a_training_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert {*OF_STEPS} == {*_MAKERS}
    options = [
        ["--exact", "True"],
        ["--rollout_ranks", "1"],
        ["--rollout.record", "folder"],
        ["--rollout.from", "folder"],
        ["--data.curriculum", "half_solved"],
        ["--rollout.over_issue", "0.5", "--rollout.max_staleness", "1"],
        ["--rollout.max_staleness", "1"],
        ["--rollout.filter", "unequal_rewards"],
    ]
    for words in options:
        with pytest.raises(SystemExit):
            parse_config(EvaluateConfig, words)
        told = capsys.readouterr().err.replace("\u2502", "").split()
        assert f"{words[0]} applies to training: an evaluation takes no steps. Leave it out." in " ".join(told)
