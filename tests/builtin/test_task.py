import subprocess
import sys
from pathlib import Path

from lightrl.builtin.task import heldout_problems, train_problems, with_pairs, with_responses


def _prompts(problems: list[dict[str, str]]) -> set[str]:
    return {problem["prompt"] for problem in problems}


def test_split_is_disjoint_and_complete() -> None:
    train, heldout = train_problems(), heldout_problems()
    # 90 x 90 pairs of 10..99 = 8100; 512 are held out.
    assert (len(train), len(heldout)) == (7588, 512)
    assert not _prompts(train) & _prompts(heldout)
    assert _prompts(train) | _prompts(heldout) == {f"{a}+{b}=" for a in range(10, 100) for b in range(10, 100)}


def test_answers_are_the_sums() -> None:
    answers = {problem["prompt"]: problem["answer"] for problem in train_problems() + heldout_problems()}
    assert answers["37+48="] == "85"
    assert answers["99+99="] == "198"
    assert answers["10+10="] == "20"
    assert all(answers[f"{a}+{b}="] == str(a + b) for a in range(10, 100) for b in range(10, 100))


def test_swapped_terms_fall_on_the_same_side() -> None:
    heldout = _prompts(heldout_problems())
    assert {f"{prompt[3:5]}+{prompt[:2]}=" for prompt in heldout} == heldout


def test_split_never_changes() -> None:
    assert [problem["prompt"] for problem in heldout_problems()[:3]] == ["50+88=", "29+58=", "48+88="]
    assert [problem["prompt"] for problem in train_problems()[:3]] == ["95+18=", "84+60=", "86+20="]


def test_callers_cannot_edit_each_others_problems() -> None:
    train_problems()[0]["answer"] = "edited"
    assert train_problems()[0]["answer"] != "edited"


def test_task_needs_no_torch() -> None:
    program = "import sys, lightrl.builtin.task; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])


def test_responses_are_the_answers() -> None:
    assert with_responses(train_problems())[0] == {"prompt": "95+18=", "response": "113"}


def test_rejected_answers_are_off_by_1_to_20_either_way() -> None:
    pairs = with_pairs(train_problems())
    errors = [int(pair["rejected"]) - int(pair["chosen"]) for pair in pairs]
    assert sorted(set(errors)) == [*range(-20, 0), *range(1, 21)]
    assert abs(sum(errors)) / len(errors) < 0.5  # of a spread of 12: neither side is preferred
    assert pairs == with_pairs(train_problems())
