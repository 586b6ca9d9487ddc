"""Scores of the real reasoning-gym: every task that it has."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from made_samples import made_sample

from lightrl.data.prompts import load_records
from lightrl.records import Prompt, Sample

pytest.importorskip("reasoning_gym")
from reasoning_gym.factory import DATASETS

from lightrl.rewards import RewardError, load_reward
from lightrl.rewards.reasoning_gym import ReasoningGym
from lightrl.rewards.reward_set import make_runner
from lightrl.rewards.scoring import FailureBudget, ScoringLimits

REWARD = ReasoningGym()
# Made of other tasks, or of a file that is fetched: they need settings of their own.
NOT_ALONE = {"composite"}


def sample(record: dict[str, Any], text: str) -> Sample:
    fields = {name: value for name, value in record.items() if name not in ("prompt", "answer")}
    prompt = Prompt(index=0, text=record["prompt"], token_ids=(1,), answer=record["answer"], fields=fields)
    return made_sample(prompt=prompt, text=text)


def test_every_task_makes_problems_and_scores_answers() -> None:
    unscored, lenient = [], []  # their own answer has no full score; any text has one
    for name in sorted(set(DATASETS) - NOT_ALONE):
        (record, where), _ = load_records(f"reasoning_gym:{name}?size=2&seed=1")
        assert where.startswith(f"reasoning_gym:{name}?size=2")
        assert isinstance(record["prompt"], str)
        if record["answer"] is None:
            unscored.append(name)
            continue
        right = REWARD(sample(record, str(record["answer"])))
        assert 0 <= right <= 1
        if right < 1:
            unscored.append(name)
        if REWARD(sample(record, "no answer at all")) == 1:
            lenient.append(name)
    assert len(DATASETS) - len(unscored) > 90, unscored
    assert len(lenient) < 5, lenient


def test_an_answer_may_stand_in_a_tag() -> None:
    (record, _), *_ = load_records("reasoning_gym:chain_sum?size=2&min_terms=2&max_terms=2&min_digits=1&max_digits=1")
    tagged = ReasoningGym(answer_tag="answer")
    assert tagged(sample(record, f"I think <answer> {record['answer']} </answer>.")) == 1
    assert tagged(sample(record, str(record["answer"]))) == 0


def test_a_prompt_of_another_data_set_is_an_error() -> None:
    with pytest.raises(ValueError, match="no problem of reasoning-gym"):
        REWARD(sample({"prompt": "1+1=", "answer": "2"}, "2"))


def test_a_task_that_cannot_read_its_own_answer_is_an_error() -> None:
    def broken(answer: str, entry: dict[str, Any]) -> float:
        raise RuntimeError("the task is on fire")

    with pytest.raises(RuntimeError, match="on fire"):
        ReasoningGym._score(broken, "1", {"answer": "2"})


def test_an_answer_that_the_task_cannot_read_has_no_score() -> None:
    assert ReasoningGym._score(lambda answer, entry: float(answer), "two", {"answer": "2"}) == 0.0


def test_a_package_that_is_missing_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r'needs reasoning_gym: pip install "lightrl\[reasoning-gym\]"'):
        ReasoningGym()


@pytest.mark.parametrize(
    "code",
    [
        "open({file!r}, 'w').write('')",
        "(open)({file!r}, 'w')",
        "[open][0]({file!r}, 'w')",
        "1 if [open({file!r}, 'w')] else 2",
        "Path({file!r}).touch()",
        "open # a comment\n ({file!r}, 'w')",
        "exec('open({file}, 0)')",
        "[(exp := open), exp({file!r}, 'w')]",
        "sin('op' + 'en%c{file!r}, %cw%c)' % (40, 39, 39))",  # sympy's functions read a text by eval()
        "\"open({file!r}, 'w')\"",  # a text, which sympy runs
    ],
)
@pytest.mark.parametrize("task", ["countdown", "n_queens", "simple_integration", "string_insertion"])
def test_an_answer_is_not_run_as_a_program(task: str, code: str, tmp_path: Path) -> None:
    (record, _), *_ = load_records(f"reasoning_gym:{task}?size=1")
    file = tmp_path / "written"
    assert REWARD(sample(record, code.format(file=str(file)))) == 0
    assert not file.exists()


@pytest.mark.parametrize(
    ("task", "answer", "score"),
    [
        ("countdown", "int('9' + '9')", 0),  # its 9 and 9 make 18
        ("countdown", "(9)+9", 1),
        ("simple_integration", "x**2 + sin(x) + C", 1),
        ("string_insertion", "['A', 'B']", 0.1),
    ],
)
def test_an_answer_may_be_an_expression(task: str, answer: str, score: float) -> None:
    metadata = {"numbers": [9, 9], "target": 99 if "int" in answer else 18}
    entry = {"answer": "AB", "metadata": {**metadata, "variable": "x", "integrand": "2*x + cos(x)"}}
    record = {"prompt": "", "answer": "AB", "task": task, "entry": entry}
    assert REWARD(sample(record, answer)) == score


def test_an_answer_that_never_ends_has_no_verdict() -> None:
    (record, _), *_ = load_records("reasoning_gym:countdown?size=1")
    runner = make_runner(load_reward("reasoning_gym"), limits=ScoringLimits(timeout_s=10.0), name="reasoning_gym")
    try:
        endless, right = runner.run(
            [sample(record, "9**9**9**9"), sample(record, record["answer"])], budget := FailureBudget()
        )
    finally:
        runner.close()
    assert isinstance(endless, RewardError)
    assert right == 1
    assert len(budget.no_verdicts) == 1


def test_its_processes_read_the_same_tag() -> None:
    assert pickle.loads(pickle.dumps(ReasoningGym(answer_tag="answer")))._answer("<answer>2</answer>") == "2"
