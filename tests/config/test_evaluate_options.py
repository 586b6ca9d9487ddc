"""The options of an evaluation."""

import pytest

from lightrl.config import EvaluateConfig, parse_config


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
