"""What sets runs apart, against curves made by hand."""

from pathlib import Path
from typing import Any

from lightrl.config import DPOConfig, GRPOConfig, PPOConfig, RMConfig, SFTConfig, as_dict
from lightrl.config.command_line import flatten
from lightrl.report.comparison import compare
from lightrl.report.run_files import RunFiles


def a_run(name: str, rewards: list[float], accuracies: dict[int, float], **config: Any) -> RunFiles:
    rows: list[dict[str, Any]] = [{"step": step, "reward/mean": value} for step, value in enumerate(rewards, start=1)]
    for step, value in accuracies.items():
        rows[step - 1]["eval/accuracy"] = value
    return RunFiles(name=name, root=Path(), config=config, metrics=rows, samples=[])


def test_runs_are_ranked_at_the_last_step_that_all_have() -> None:
    long = a_run("long", [0.1] * 10 + [0.9] * 10, {5: 0.1, 10: 0.2, 20: 0.95}, lr=1e-3, seed=0)
    short = a_run("short", [0.4] * 10, {10: 0.5}, lr=3e-2, seed=0)
    accuracy, reward, options = compare([long, short])
    assert accuracy == "eval/accuracy up to step 10, the last that all have: short 0.5, long 0.2."
    assert reward == "reward/mean up to step 10, the last that all have: short 0.4, long 0.1."
    assert options == "Options that differ, in the order long, short: lr 0.001, 0.03."


def test_options_differ_in_any_of_their_digits() -> None:
    runs = [a_run(str(seed), [0.5], {}, seed=seed, lr="1e-6") for seed in (20260101, 20260102)]
    assert compare(runs)[-1] == "Options that differ, in the order 20260101, 20260102: seed 20260101, 20260102."


def test_a_loss_is_better_when_it_is_lower_and_a_missing_metric_ranks_nobody() -> None:
    losses = [RunFiles(name=name, root=Path(), config={}, metrics=[{"step": 1, "loss": value}], samples=[])
              for name, value in (("a", 2.0), ("b", 1.0))]  # fmt: skip
    assert compare(losses) == ["loss up to step 1, the last that all have: b 1, a 2.", "All options are the same."]
    assert compare([*losses, a_run("c", [0.5], {})]) == ["All options are the same."]
    assert compare(losses[:1]) == []


def test_a_difference_within_the_noise_is_called_so() -> None:
    # the last 4 of 40: means 0.5 and 0.52, each with a standard error of 0.1 / sqrt(4)
    one, two = ([0.0] * 36 + [value - 0.1, value + 0.1] * 2 for value in (0.5, 0.52))
    assert "differ by no more than single steps vary" in compare([a_run("one", one, {}), a_run("two", two, {})])[0]
    apart = [0.0] * 36 + [0.6, 0.8] * 2  # 0.2 away, and two standard errors of the difference are 0.14
    assert "no more than" not in compare([a_run("one", one, {}), a_run("apart", apart, {})])[0]


def test_only_runs_that_train_the_same_are_ranked() -> None:
    runs = {
        kind: RunFiles(name=kind.__name__, root=Path(), config=dict(flatten(as_dict(kind()))), metrics=rows, samples=[])
        for kind in (GRPOConfig, PPOConfig, SFTConfig, RMConfig, DPOConfig)
        for rows in [[{"step": 1, "loss": 0.5, "accuracy": 0.5, "reward/mean": 0.5}]]
    }
    told = compare([runs[SFTConfig], runs[DPOConfig]])
    assert told[0] == (
        "No metric ranks runs that train different things "
        "(SFTConfig: a model by responses, DPOConfig: a policy by pairs)."
    )
    assert told[1].startswith("Options that differ, in the order SFTConfig, DPOConfig: ")
    assert compare([runs[RMConfig], runs[DPOConfig]])[0].startswith("No metric ranks")
    assert compare([runs[GRPOConfig], runs[PPOConfig]])[0].startswith("reward/mean up to step 1")
    assert compare([runs[SFTConfig], runs[SFTConfig]])[0].startswith("reward/mean up to step 1")
