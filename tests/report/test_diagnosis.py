"""What the curves of a run are said to show."""

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightrl.report.diagnosis import diagnose, plateau, smoothed, summary
from lightrl.report.run_files import RunFiles


def a_run(reward: Callable[[int], float], config: dict[str, Any] | None = None, **metrics: Any) -> RunFiles:
    """A run of 60 steps; a metric is a number or a function of the step."""
    draws = random.Random(0)
    rows = []
    for step in range(1, 61):
        row: dict[str, Any] = {"step": step, "reward/mean": reward(step) + draws.uniform(-0.01, 0.01)}
        for name, value in metrics.items():
            row[name.replace("__", "/")] = value(step) if callable(value) else value
        rows.append(row)
    samples = [{"step": 1, "reward": value} for value in (0.0, 1.0)]
    return RunFiles(name="run", root=Path(), config=config or {}, metrics=rows, samples=samples)


def stops_at_20(step: int) -> float:
    return min(0.4, 0.02 * step)


def titles(run: RunFiles) -> list[str]:
    return [finding.title for finding in diagnose(run)]


def test_a_plateau_begins_where_nothing_higher_follows() -> None:
    # 0, 1, 2, 3 and then 3, 3, 3: the margin is 5 % of 3
    assert plateau([0.0, 1.0, 2.0, 3.0, 3.0, 3.0, 3.0], 0.0) == 3
    assert plateau([0.0, 2.9, 2.0, 3.0], 0.0) == 1  # 2.9 is within 0.15 of 3
    assert smoothed([0.0, 3.0, 3.0]) == [1.5, 2.0, 3.0]  # of two, three and two values


@pytest.mark.parametrize(("seconds", "told"), [(299.0, "598 s"), (900.0, "0.50 h")])
def test_the_key_figures_are_those_of_the_first_and_the_last_step(seconds: float, told: str) -> None:
    rows = [{"step": step, "reward/mean": value, "time/step": seconds} for step, value in ((3, 0.5), (4, 0.25))]
    found = summary(RunFiles(name="run", root=Path(), config={}, metrics=rows, samples=[]))
    assert found == {"steps": 4, "reward/mean": "0.5 to 0.25", "time in steps": told}


def test_equal_groups_are_no_problem_of_ppo() -> None:
    always = a_run(stops_at_20, reward__equal_groups=1.0)
    assert {"Few groups teach anything", "reward/equal_groups is bad in 60 steps (1-60)"} <= set(titles(always))
    by_critic = a_run(stops_at_20, {"critic.value_coef": 1.0}, reward__equal_groups=1.0)
    assert not any("groups" in title for title in titles(by_critic))


def test_a_run_that_branched_off_another_one_is_told_alike() -> None:
    run = a_run(stops_at_20, entropy=lambda step: 1.0 if step < 20 else 0.1)
    later = dataclasses.replace(run, metrics=[row | {"step": row["step"] + 1000} for row in run.metrics])
    found, since = diagnose(run), diagnose(later)
    assert [finding.title for finding in found] == [
        "The reward stopped rising at about step 20",
        "The policy explores little",
    ]
    assert since == [finding._replace(title=finding.title.replace("step 20", "step 1020")) for finding in found]


def test_rewards_that_all_fail_at_an_end_of_the_run_leave_the_rest_to_judge() -> None:
    run = a_run(stops_at_20, entropy=1.0)
    for steps in (range(1, 25), range(37, 61)):
        rows = [row | ({"reward/mean": None} if row["step"] in steps else {}) for row in run.metrics]
        assert diagnose(dataclasses.replace(run, metrics=rows))[0].metric == "reward/mean"


def test_a_rising_reward_is_no_warning() -> None:
    (finding,) = diagnose(a_run(lambda step: 0.01 * step))
    assert (finding.level, finding.title) == ("good", "The reward was still rising")


@pytest.mark.parametrize(
    ("metrics", "cause", "told"),
    [
        ({"entropy": lambda step: 0.5 / step}, "The policy explores little", "Raise --temperature"),
        ({"reward__equal_groups": 0.8}, "Few groups teach anything", "Most prompts are never solved"),
        ({"lr": lambda step: max(0.0, 1e-4 - 5e-6 * step)}, "The learning rate had decayed", "--optim.schedule"),
        ({"clip_fraction": 0.4}, "Updates are clipped", "Lower --lr"),
        ({"mismatch__mean_abs": 0.05}, "Engine and trainer drift apart", "another policy"),
        ({"tokens__truncated": 0.5}, "Responses are cut off", "--max_new_tokens"),
        ({"tokens__response_mean": lambda step: 2.0 * step}, "Responses changed their length", "favour length"),
        ({"kl": 0.15}, "The KL term holds the policy back", "--algorithm.kl_coef is 0.1"),
        ({"reward__failures": 3.0}, "Rewards fail", "3 rewards fail"),
        ({"eval__reward": lambda step: 0.5 - 0.005 * step}, "Training and evaluation part", "eval/reward fell"),
    ],
)
def test_the_cause_of_a_plateau_is_named(metrics: dict[str, Any], cause: str, told: str) -> None:
    found = diagnose(a_run(stops_at_20, config={"algorithm.kl_coef": 0.1}, **metrics))
    assert found[0].title.startswith(
        ("The reward stopped rising at about step 1", "The reward stopped rising at about step 2")
    )
    assert [finding.title for finding in found[1:]] == [cause]
    assert told in found[1].text


def test_a_reward_near_its_best_has_little_to_gain() -> None:
    """Groups that are solved and a low entropy belong to it, and call for nothing."""
    usual = {"reward__equal_groups": 0.9, "entropy": lambda step: 0.5 / step}
    solved = diagnose(a_run(lambda step: min(0.95, 0.05 * step), **usual))
    assert [finding.level for finding in solved] == ["note", "good"]
    assert solved[1].title == "There is little left to gain"
    worse = a_run(lambda step: min(0.95, 0.05 * step), **usual, eval__reward=lambda step: 0.5 - 0.005 * step)
    assert titles(worse)[2:] == ["Training and evaluation part"]


def a_sample(step: int, reward: float, response: str) -> dict[str, Any]:
    return {"step": step, "reward": reward, "response": response, "answer": "178"}


def test_a_reward_that_pays_wrong_answers_too() -> None:
    right = [a_sample(step, 0.45, "178") for step in range(1, 9)]
    wrong = [a_sample(step, 0.4, "17") for step in range(50, 58)]
    hacked = a_run(stops_at_20, eval__reward=lambda step: 0.001 * step)
    title = "Responses without the answer are paid as well"
    for best, others in ((0.45, []), (0.55, [a_sample(3, 0.55, "178")])):  # near the best, or not
        found = diagnose(dataclasses.replace(hacked, samples=[*right, *wrong, *others]))
        assert found[1].title == title, best
        assert "got 0.4 on average" in found[1].text
        assert "The evaluation still rises" not in [finding.title for finding in found]
    partly = [a_sample(step, 0.3, "179") for step in range(50, 58)]  # credit for a part is no hack
    for fair in (partly, wrong[:4], [item | {"step": 1} for item in wrong]):
        assert title not in titles(dataclasses.replace(hacked, samples=[*right, *fair]))
    assert title not in titles(dataclasses.replace(hacked, samples=wrong * 2))  # the answer is in none: another form


def test_a_reward_that_does_not_pay_right_answers() -> None:
    right = [
        a_sample(step, 0.0, f"It is {text}") for step, text in enumerate(["178", "178.", "**178**", " 178 \n", "178"])
    ]
    wrong = [a_sample(step, 0.0, text) for step, text in enumerate(["178 - 2", "1178", "-178", "0.178"] * 2)]
    flat = a_run(lambda step: 0.0, reward__equal_groups=1.0)
    flat.metrics[:] = [row | {"reward/mean": 0.0} for row in flat.metrics]
    _, cause, *others = diagnose(dataclasses.replace(flat, samples=[*right, *wrong]))
    assert cause.title == "Responses with the answer are not paid"
    assert cause.text.startswith(
        "5 of 13 logged samples end with the reference answer, and all of them got 0, the lowe"
    )
    assert "Few groups teach anything" not in [finding.title for finding in others]  # which follows from it
    solved = [a_sample(step, 1.0, "It is 178") for step in range(9)]
    assert cause.title not in titles(dataclasses.replace(flat, samples=solved))  # the only reward pays
    for fair in (right[:4], [*right, a_sample(9, 1.0, "178")], [item | {"answer": None} for item in right]):
        assert cause.title not in titles(dataclasses.replace(flat, samples=[*fair, *wrong]))


def test_an_evaluation_that_still_rises_is_told() -> None:
    run = a_run(stops_at_20, eval__reward=lambda step: 0.001 * step)
    assert titles(run)[1:] == ["The evaluation still rises"]
    assert titles(a_run(stops_at_20, eval__reward=lambda step: min(0.02, 0.001 * step)))[1:] == ["No cause stands out"]


def test_a_reward_that_is_slowly_lost_names_the_learning_rate() -> None:
    def lost(step: int) -> float:
        return 0.05 * step if step < 10 else 0.5 - 0.006 * (step - 10)

    _, cause = diagnose(a_run(lost, {"lr": 2e-3}))
    assert cause.title == "What was learnt is lost again"
    assert "--lr (here 0.002) is most often too high" in cause.text
    assert titles(a_run(lost, clip_fraction=0.4))[1:] == ["Updates are clipped"]


def test_a_reward_that_never_rose_since_nothing_moved() -> None:
    draws = random.Random(1)
    moves: dict[str, Any] = {"grad_norm": 2.0, "entropy": lambda step: 0.5 + draws.uniform(-0.05, 0.05)}
    found = diagnose(a_run(lambda step: 0.2, {"lr": 1e-9}, reward__equal_groups=0.8, **moves))
    assert [finding.title for finding in found] == ["The reward never rose", "The policy hardly changes"]
    assert "Raise --lr (here 1e-09) tenfold" in found[1].text
    moved = a_run(lambda step: 0.2, **moves, tokens__response_mean=lambda step: 9 + 0.1 * step)
    assert "The policy hardly changes" not in titles(moved)
    assert "The policy hardly changes" not in titles(a_run(stops_at_20, **moves))
    rarely = a_run(lambda step: 0.2, grad_norm=2.0, entropy=lambda step: 0.5 if step in (1, 60) else None)
    assert "The policy hardly changes" not in titles(rarely)


def test_responses_that_are_all_cut_off_explain_the_rest() -> None:
    always = {"reward__equal_groups": 1.0, "tokens__truncated": 1.0, "eval__reward": 0.0}
    found = diagnose(
        dataclasses.replace(
            a_run(lambda step: 0.0),
            metrics=[
                {"step": step, "reward/mean": 0.0, **{name.replace("__", "/"): value for name, value in always.items()}}
                for step in range(1, 61)
            ],
        )
    )
    assert [finding.title for finding in found[:2]] == ["The reward never rose", "Responses are cut off"]
    assert found[0].text == "It is 0 in every step."
    assert not {"Few groups teach anything", "Training and evaluation part"} & {finding.title for finding in found}


def test_without_a_cause_the_reader_is_sent_to_the_samples() -> None:
    assert titles(a_run(stops_at_20, entropy=0.5))[1:] == ["No cause stands out"]


def test_a_flat_and_a_falling_reward_are_told_apart() -> None:
    assert titles(a_run(lambda step: 0.2))[0] == "The reward never rose"
    assert titles(a_run(lambda step: 0.01 * min(step, 70 - step)))[0].startswith("The reward fell after step 3")


def test_a_reward_that_one_update_ruined() -> None:
    stuck = {
        "reward__equal_groups": lambda step: float(step >= 20),
        "mismatch__mean_abs": lambda step: float(step == 3),
    }
    run = a_run(lambda step: 0.4 if step < 20 else 0.02, {"lr": 0.5}, **stuck)
    assert "mismatch/mean_abs is bad in 1 step (3)" in titles(run)  # it came before, so it has a cause of its own
    fell, cause = diagnose(run)[:2]
    assert fell.title.startswith("The reward fell after step ")
    assert cause.title == "One update ruined the policy"
    assert "in step 19" in cause.text
    assert "Lower --lr (here 0.5)" in cause.text
    assert "Few groups teach anything" not in titles(run)
    (follows,) = [finding for finding in diagnose(run) if finding.title == "What followed"]
    assert "reward/equal_groups (20-60)" in follows.text
    slowly = a_run(lambda step: max(0.02, 0.4 - 0.01 * step), {"lr": 0.5}, reward__equal_groups=1.0)
    assert titles(slowly)[1] == "Few groups teach anything"
    at_once = diagnose(a_run(lambda step: 0.4 * (step == 1)))
    assert at_once[0].text.startswith("It was highest at the start, ")


def test_bad_steps_are_counted_with_the_limits_of_the_run() -> None:
    run = a_run(lambda step: 0.01 * step, entropy=lambda step: 0.01 if 4 <= step <= 6 or step == 9 else 0.5)
    assert titles(run) == ["The reward was still rising"]
    found = diagnose(dataclasses.replace(run, config={"health.min_entropy": 0.02}))
    assert found[1].title == "entropy is bad in 4 steps (4-6, 9)"
    assert "--health.min_entropy 0.02" in found[1].text
