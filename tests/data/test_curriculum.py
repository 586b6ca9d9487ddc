"""Curricula: draws follow the weights, depend on nothing else, and go on after a resume."""

from collections import Counter
from collections.abc import Sequence

import pytest

from lightrl.data.curriculum import Curriculum, Progress, half_solved, require_equal
from lightrl.records import Prompt

PROMPTS = [Prompt(index=index, text="", token_ids=(1,)) for index in range(6)]


def curriculum(weights: Sequence[float], batch_size: int = 1) -> Curriculum:
    return Curriculum(lambda progress: weights, PROMPTS, batch_size, seed=3)


def test_prompts_are_drawn_as_often_as_they_weigh() -> None:
    drawn = Counter(curriculum([0, 1, 3, 0, 4, 0]).draw(8000))
    assert sorted(drawn) == [1, 2, 4]
    # Of 8000 draws 1000, 3000 and 4000 are expected; four deviations of the last are 4 x sqrt(8000 / 4) = 179.
    assert [abs(drawn[index] - wanted) < 180 for index, wanted in ((1, 1000), (2, 3000), (4, 4000))] == [True] * 3


def test_a_batch_has_no_prompt_twice_while_there_are_others() -> None:
    ours = curriculum([1, 1, 1, 1, 9, 0], batch_size=5)
    for _ in range(50):
        assert sorted(ours.next_batch()) == [0, 1, 2, 3, 4]
    assert set(curriculum([0, 0, 1, 0, 0, 0], batch_size=3).next_batch()) == {2}


def test_results_change_the_next_draws_and_no_earlier_ones() -> None:
    seen: list[Progress] = []

    def newest(progress: Progress) -> list[float]:
        seen.append(progress)
        wanted = {index for index, item in progress.results.items() if item.step == progress.step - 1}
        return [float(prompt.index in (wanted or {0})) for prompt in progress.prompts]

    ours = Curriculum(newest, PROMPTS, 1, seed=0)
    assert [ours.index_at(ticket) for ticket in (2, 0, 1)] == [0, 0, 0]
    ours.observe(0, [(4, 0.5), (4, 1.0)])
    assert [ours.index_at(ticket) for ticket in (3, 1)] == [4, 0]
    assert len(seen) == 2  # once in each step
    result = seen[1].results[4]
    assert (result.num_groups, result.mean, result.last, result.step) == (2, 0.75, 1.0, 0)

    again = Curriculum(newest, PROMPTS, 1, seed=0)
    again.load_state_dict(ours.state_dict())
    ours.observe(1, [(5, 0.0)])
    again.observe(1, [(5, 0.0)])
    assert [again.index_at(ticket) for ticket in range(6)] == [ours.index_at(ticket) for ticket in range(6)]
    assert again.index_at(5) == 5
    with pytest.raises(ValueError, match="a run without --data.curriculum"):
        again.load_state_dict({"num_drawn": 0, "num_prompts_in_data": 6, "seed": 0})
    with pytest.raises(ValueError, match="has results of 6 prompts, and the data has 5"):
        Curriculum(newest, PROMPTS[:5], 1, seed=0).load_state_dict(ours.state_dict())
    older = {name: value for name, value in ours.state_dict().items() if name != "num_prompts_in_data"}
    again.load_state_dict(older)


def test_a_curriculum_without_a_return_is_told_its_line() -> None:
    text = r"returned None, at line \d+ of .*test_curriculum.py. It must return a weight for each of the 6 prompts"
    with pytest.raises(ValueError, match=text):
        curriculum(None).draw(1)  # type: ignore[arg-type]


def test_ranks_whose_weights_differ_are_named() -> None:
    same, other, unasked = curriculum([1, 2, 1, 1, 1, 1]), curriculum([1, 2, 1, 1, 1, 3]), curriculum([1] * 6)
    assert same.fingerprint is None
    for ours in (same, other):
        ours.draw(1)
    again = curriculum([1, 2, 1, 1, 1, 1])
    again.draw(1)
    found = [unasked.fingerprint, same.fingerprint, again.fingerprint]
    require_equal(found)
    with pytest.raises(ValueError, match="gave other weights on rank 3 than on rank 1, from equal results"):
        require_equal([*found, other.fingerprint])


def test_half_solved() -> None:
    ours = Curriculum(half_solved, PROMPTS, 1, seed=0)
    ours.observe(0, [(0, 0.5), (1, 1.0), (2, 0.25), (3, -1.0)])
    # 4 p (1 - p) of 1/2, 1, 1/4 and 0, at least 0.05; the last two are new
    assert half_solved(Progress(step=1, prompts=PROMPTS, results=ours._results)) == [1.0, 0.05, 0.75, 0.05, 1.0, 1.0]


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ([1.0], "returned 1 weights, of the sum 1, for 6 prompts"),
        ([0.0] * 6, "returned 6 weights, of the sum 0"),
        ([1.0] * 5 + [float("nan")], "among them nan"),
        ([-1.0] + [1.0] * 5, "among them -1.0"),
    ],
)
def test_wrong_weights_are_told(weights: list[float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        curriculum(weights).draw(1)
