"""The options of evaluations."""

from typing import Any

import pytest

from lightrl.builtin.task import HELD_OUT
from lightrl.config import EvalConfig, EvaluateConfig, ExampleEvalConfig, GRPOConfig, SFTConfig, WorkflowConfig


def test_options_that_contradict_are_told() -> None:
    with pytest.raises(ValueError, match="--eval.k 8 needs as many samples of a prompt, and --eval.n is 4"):
        GRPOConfig(eval=EvalConfig(n=4, k=(1, 8)))
    with pytest.raises(ValueError, match="--eval.temperature 0 gives 4 equal samples"):
        GRPOConfig(eval=EvalConfig(n=4, temperature=0.0))
    with pytest.raises(ValueError, match="--eval.k is"):
        GRPOConfig(eval=EvalConfig(n=4, k=(0,)))
    with pytest.raises(ValueError, match="--eval.majority_k 8 needs as many samples of a prompt, and --eval.n is 4"):
        GRPOConfig(eval=EvalConfig(n=4, majority=True, majority_k=(2, 8)))
    with pytest.raises(ValueError, match="--eval.majority_k does nothing without --eval.majority"):
        GRPOConfig(eval=EvalConfig(n=4, majority_k=(2,)))
    with pytest.raises(ValueError, match="--eval.majority_k is"):
        GRPOConfig(eval=EvalConfig(n=4, majority=True, majority_k=(0,)))
    with pytest.raises(ValueError, match="eval/maj@3 is not evaluated: give --eval.majority_k 3"):
        GRPOConfig(eval=EvalConfig(n=4, majority=True, majority_k=(2,), best="eval/maj@3"))
    for best in ("eval/maj@2", "eval/maj@4"):
        GRPOConfig(eval=EvalConfig(n=4, majority=True, majority_k=(2,), best=best))


@pytest.mark.parametrize(
    ("name", "metric", "is_lowest"),
    [
        ("eval/accuracy", "eval/accuracy", False),
        ("eval/loss", "eval/loss", True),
        ("eval/loss:max", "eval/loss", False),
        ("eval/truncated:min", "eval/truncated", True),
        ("eval/pass@8", "eval/pass@8", False),
    ],
)
def test_the_best_model_is_that_of_a_metric(name: str, metric: str, is_lowest: bool) -> None:
    config = EvalConfig(best=name, n=8, k=(8,))
    GRPOConfig(eval=config)
    assert (config.best_metric, config.best_is_lowest) == (metric, is_lowest)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"eval": EvalConfig(every=0, best="eval/reward")}, "--eval.every 0 makes none: raise it"),
        ({"eval": EvalConfig(best="reward/mean")}, "is no metric of an evaluation, which begins with eval/"),
        ({"eval": EvalConfig(best="eval/pass@4", n=8, k=(8,))}, "eval/pass@4 is not evaluated: give --eval.k 4"),
        ({"eval": EvalConfig(best="eval/avg@4", n=8)}, "eval/avg@4 is not evaluated: give --eval.n 4"),
        ({"eval": EvalConfig(best="eval/reward"), "train_data": "mine.jsonl"}, "give data for them by --eval_data"),
        (
            {"eval": EvalConfig(best="eval/reward"), "train_data": "mine.jsonl + builtin:addition-heldout*2"},
            r"--train_data mine.jsonl \+ builtin:addition-heldout\*2 has no held-out part for them",
        ),
        (
            {"eval": EvalConfig(best="eval/reward"), "rollout": WorkflowConfig(from_="record")},
            "--rollout.from makes none: leave it out",
        ),
    ],
)
def test_a_best_model_that_no_evaluation_chooses_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        GRPOConfig(**options)


def test_data_with_a_held_out_part_evaluate_the_best_model() -> None:
    best = EvalConfig(best="eval/reward")
    for data in HELD_OUT:
        GRPOConfig(eval=best, train_data=f"mine.jsonl*2+{data}*0.5")
        with pytest.raises(ValueError, match="has no held-out part for them"):
            GRPOConfig(eval=best, train_data=HELD_OUT[data])
    GRPOConfig(eval=best, train_data="builtin:addition-heldout", eval_data="mine.jsonl")


def test_offline_runs_and_evaluations_check_it_too() -> None:
    with pytest.raises(ValueError, match="give data for them by --eval_data"):
        SFTConfig(train_data="mine.jsonl", eval=ExampleEvalConfig(best="eval/loss"))
    SFTConfig(train_data="mine.jsonl", eval_data="mine.jsonl", eval=ExampleEvalConfig(best="eval/loss"))
    with pytest.raises(ValueError, match="--eval.best applies to training: an evaluation takes no steps"):
        EvaluateConfig(eval=EvalConfig(best="eval/reward"))
