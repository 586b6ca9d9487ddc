"""Evaluation with several samples: the program, on one process and two ranks, and inside a training."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lightrl.config import EvalConfig, EvaluateConfig, GRPOConfig, RolloutLogConfig
from lightrl.testing import run_program, run_spmd
from lightrl.trainers.evaluation import Evaluator
from lightrl.trainers.grpo import GRPOTrainer

SCRIPT = Path(__file__).parents[2] / "scripts" / "evaluate.py"


@pytest.fixture
def data(toy: Path, tmp_path: Path) -> Path:
    rows = [json.loads(line) for line in (toy / "train.jsonl").read_text().splitlines()]
    path = tmp_path / "eval.jsonl"
    path.write_text("".join(json.dumps({**row, "source": "ab"[i % 2]}) + "\n" for i, row in enumerate(rows)))
    return path


@pytest.mark.slow
def test_the_program_gives_the_same_on_two_ranks(toy: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(
        "def is_odd(sample):\n    return float(sample.text.strip()[-1:] in list('13579'))\n"
        "is_odd.answer_of = lambda sample: sample.text.strip()[-1:] or None\n"
    )
    flags = [
        *("--model", str(toy / "model"), "--eval_data", str(data), "--reward", f"{tmp_path / 'odd.py'}:is_odd"),
        *("--eval.n", "4", "--eval.k", "1", "4", "--eval.source_field", "source", "--eval.majority", "True"),
        *("--eval.majority_k", "1", "2"),
    ]
    folders = [tmp_path / "one", tmp_path / "two"]
    printed = run_program([sys.executable, str(SCRIPT), *flags, "--output_dir", str(folders[0])], timeout_s=240)
    run_spmd(SCRIPT, *flags, "--output_dir", str(folders[1]), world_size=2, timeout_s=240)
    one, two = (json.loads((folder / "evaluation.json").read_text()) for folder in folders)
    assert one["metrics"] == pytest.approx(two["metrics"], abs=1e-12)
    assert "those that none sees" not in printed
    assert json.loads(printed[printed.index("{") :]) == one
    assert (one["num_prompts"], one["samples_per_prompt"]) == (5, 4)
    responses = [(folder / "responses.jsonl").read_text() for folder in folders]
    assert responses[0] == responses[1]
    rows = [json.loads(line) for line in responses[0].splitlines()]
    assert [(row["position"], row["sample"]) for row in rows] == [(p, i) for p in range(5) for i in range(4)]
    assert sum(row["reward"] for row in rows) / 20 == pytest.approx(one["metrics"]["eval/reward"])
    assert all(row["reward"] == (row["response"].strip()[-1:] in list("13579")) for row in rows)
    metrics = one["metrics"]
    assert metrics["eval/pass@1"] == pytest.approx(metrics["eval/avg@4"]) == pytest.approx(metrics["eval/accuracy"])
    assert 0 < metrics["eval/pass@1"] < metrics["eval/pass@4"] <= 1
    accuracy = 0.0
    for start in range(0, 20, 4):
        votes = Counter(row["response"].strip()[-1:] for row in rows[start : start + 4] if row["response"].strip())
        most = [answer for answer, count in votes.items() if count == max(votes.values())]
        accuracy += sum(answer in "13579" for answer in most) / max(1, len(most)) / 5
    assert metrics["eval/maj@4"] == pytest.approx(accuracy)
    assert metrics["eval/maj@1"] == pytest.approx(metrics["eval/accuracy"])
    assert 0 < metrics["eval/maj@2"] < 1
    by_source = 3 / 5 * metrics["eval/a/pass@4"] + 2 / 5 * metrics["eval/b/pass@4"]
    assert metrics["eval/pass@4"] == pytest.approx(by_source)


def test_an_evaluation_leaves_the_training_as_it_is(toy_options: dict[str, Any], data: Path, tmp_path: Path) -> None:
    def losses(name: str, *, evaluates: bool) -> list[float]:
        trainer = GRPOTrainer(
            GRPOConfig(
                **toy_options,
                eval_data=str(data),
                num_prompts=2,
                lr=1e-2,
                eval=EvalConfig(n=3, k=(2,)),
                output_dir=str(tmp_path / name),
            )
        )
        found = []
        for _ in range(2):
            if evaluates:
                assert 0 <= trainer.evaluate()["eval/pass@2"] <= 1
            found.append(trainer.step().metrics["loss"])
            trainer.step_index += 1
        trainer.close()
        return found

    assert losses("with", evaluates=True) == losses("without", evaluates=False)


def test_a_training_reports_the_majority(toy_options: dict[str, Any], data: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def own(sample):\n    return 1.0\n\nown.answer_of = lambda sample: sample.text\n")
    options = toy_options | {"reward": (f"{tmp_path / 'own.py'}:own",), "output_dir": str(tmp_path / "run")}
    trainer = GRPOTrainer(
        GRPOConfig(
            **options,
            eval_data=str(data),
            num_prompts=2,
            max_steps=1,
            eval=EvalConfig(n=3, majority=True, best="eval/maj@3"),
            log=RolloutLogConfig(tensorboard=False),
        )
    )
    assert trainer.fit()["eval/maj@3"] == 1.0
    trainer.close()
    record = json.loads((tmp_path / "run" / "best" / "best.json").read_text())
    assert (record["metric"], record["step"]) == ("eval/maj@3", 0)


def test_prompts_of_trainings_are_not_taken_for_held_out_ones(
    toy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def told(data: str) -> str:
        config = EvaluateConfig(
            model=str(toy / "model"), eval_data=data, eval=EvalConfig(max_prompts=1), output_dir=str(tmp_path / data)
        )
        evaluator = Evaluator(config)
        evaluator.fit()
        evaluator.close()
        return capfd.readouterr().err

    note = "builtin:addition has the prompts of trainings; builtin:addition-heldout has those that none sees."
    assert note in told("builtin:addition")
    assert "none sees" not in told("builtin:addition-heldout")


def test_held_out_prompts_of_a_training_are_named_as_such(
    toy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    evaluator = Evaluator(
        EvaluateConfig(model=str(toy / "model"), eval=EvalConfig(max_prompts=1), output_dir=str(tmp_path / "run"))
    )
    evaluator.fit()
    evaluator.close()
    assert evaluator.config.train_data == "builtin:addition"  # what --config reads from the file of a training
    written = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert written["eval_data"] == "builtin:addition-heldout"
    assert "none sees" not in capfd.readouterr().err


def test_the_result_says_how_the_responses_were_sampled(data: Path, toy: Path, tmp_path: Path) -> None:
    settings = EvalConfig(max_prompts=1, temperature=0.5, top_p=0.75, top_k=5)
    config = EvaluateConfig(
        model=str(toy / "model"), eval_data=str(data), max_new_tokens=9, eval=settings, output_dir=str(tmp_path / "run")
    )
    evaluator = Evaluator(config)
    evaluator.fit()
    evaluator.close()
    result = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    names = ("temperature", "top_p", "top_k", "max_new_tokens")
    assert [result[name] for name in names] == [0.5, 0.75, 5, 9]


def test_an_evaluation_without_prompts_is_refused(data: Path) -> None:
    """As with the file of a training that had no --eval_data."""
    with pytest.raises(ValueError, match=r"no prompts to evaluate on: .*eval.jsonl is training data. Give --eval_data"):
        Evaluator(EvaluateConfig(train_data=str(data)))
