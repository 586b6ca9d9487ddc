from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from reward_samples import answered

from lightrl.config import GRPOConfig, JudgeConfig, parse_config
from lightrl.records import Sample
from lightrl.rewards import has_reward
from lightrl.rewards.applicability import fail_unjudged
from lightrl.rewards.reward_set import FailurePolicy, RewardSet, WeightedReward, labels_of
from lightrl.rewards.scoring import FailureBudget, failed


def set_of(*reward: str, args: tuple[str, ...] = (), **options: Any) -> RewardSet:
    return RewardSet.from_config(GRPOConfig(reward=reward, reward_args=args, **options))


def scored(rewards: RewardSet, samples: list[Sample]) -> tuple[list[float], dict[str, list[float]]]:
    budget = FailureBudget()
    outcomes = {item.label: rewards.run(item.label, samples, budget) for item in rewards.rewards}
    scores = rewards.combine(outcomes)
    return scores.rewards, dict(scores.components)


def test_a_single_name_works_alone() -> None:
    for given in ("exact_match", ("exact_match",)):
        rewards = RewardSet.from_config(GRPOConfig(reward=given))  # type: ignore[arg-type]
        assert scored(rewards, [answered("1", 1), answered("2", 1)])[0] == [1.0, 0.0]


def test_several_are_added_up_by_weight() -> None:
    rewards = set_of("exact_match", "length=-0.5", "format=0.25", args=("length.target=4", "format.pattern=[0-9]=?"))
    samples = [answered("1", 1, num_tokens=4), answered("22", 1, num_tokens=2), answered("3=", 1)]
    totals, components = scored(rewards, samples)
    # 1 - 0.5 x 1 + 0.25 x 1; 0 - 0.5 x 0.5 + 0; 0 - 0 + 0.25
    assert totals == [0.75, -0.25, 0.25]
    assert components == {"exact_match": [1.0, 0.0, 0.0], "length": [1.0, 0.5, 0.0], "format": [1.0, 0.0, 1.0]}


@pytest.mark.parametrize("weights", [(0.7, 0.2, 0.1), (0.6, 0.3, 0.1)])
def test_weights_that_add_up_to_one_make_a_right_sample(weights: tuple[float, ...]) -> None:
    """One after the other they add up to 0.9999999999999999, and a sample is right from 1 on."""
    given = [
        f"{name}={weight}" for name, weight in zip(("exact_match", "contains", "last_number"), weights, strict=True)
    ]
    assert scored(set_of(*given), [answered("1", 1)])[0] == [1.0]


def test_a_file_of_ones_own_has_its_functions_name(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("def scaled(sample, *, by: float = 1.0):\n    return by * len(sample.text)\n")
    rewards = set_of(f"{path}:scaled=2", args=("scaled.by=0.5",))
    assert scored(rewards, [answered("abc")]) == ([3.0], {"scaled": [1.5]})


def test_a_listener_hears_what_each_reward_gives() -> None:
    heard: list[tuple[str, list[Any]]] = []
    rewards = RewardSet.of(lambda sample: 2.0)
    (label,) = (item.label for item in rewards.rewards)
    rewards.hear(lambda label, samples, outcomes: heard.append((label, [len(samples), *outcomes])))
    assert rewards.run(label, [answered("1"), answered("2")], FailureBudget()) == [2.0, 2.0]
    assert heard == [(label, [2, 2.0, 2.0])]
    assert asyncio.run(rewards.arun(label, [answered("1")], FailureBudget())) == [2.0]
    assert heard[1:] == [(label, [1, 2.0])]  # as a workflow asks
    assert not rewards.compares_siblings
    rewards.close()


def test_a_failure_leaves_no_reward_or_counts_as_a_value() -> None:
    def zero(sample: Sample) -> float:
        return 0.0

    both = [WeightedReward(label=name, weight=2.0, reward=zero) for name in ("a", "b")]
    error = failed("a", [answered("")], ValueError("x"))
    for value, expected in ((None, False), (-1.0, True)):
        scores = RewardSet(both, policy=FailurePolicy(value=value)).combine({"a": [error, 1.0], "b": [3.0, 4.0]})
        assert has_reward(scores.rewards[0]) is expected
        assert scores.rewards[1] == 10.0
        assert scores.components == {"a": [1.0], "b": [3.0, 4.0]}
    assert scores.rewards[0] == 4.0


def test_what_does_not_apply_is_left_out_of_sum_and_mean() -> None:
    both = [WeightedReward(label=name, weight=2.0, reward=half) for name in ("a", "b")]
    outcomes: dict[str, Any] = {"a": [None, 1.0, None], "b": [3.0, None, None]}
    errors = fail_unjudged([answered(text) for text in "xyz"], outcomes)
    assert ["No reward applies to prompt 10 '', sample 0, response 'z'" in str(error) for error in errors] == [True]
    for value, last in ((None, None), (-1.0, -4.0)):
        scores = RewardSet(both, policy=FailurePolicy(value=value)).combine(outcomes)
        assert scores.rewards[:2] == [6.0, 2.0]
        assert (scores.rewards[2] if has_reward(scores.rewards[2]) else None) == last
        assert scores.components == {"a": [1.0], "b": [3.0]}


@pytest.mark.parametrize(
    ("reward", "args", "message"),
    [
        (("exact_match=x",), (), "'exact_match=x': behind = there must be a weight, a number other than 0"),
        (("exact_match=0",), (), "a number other than 0"),
        ((), (), "--reward names no reward"),
        (("exact_match", "exact_match=2"), (), "two rewards named 'exact_match'"),
        (("json:mean",), (), "cannot be named 'mean': reward/mean is another metric"),
        (("exact_mach",), (), "Unknown reward 'exact_mach'. Did you mean exact_match"),
        (("exact_match",), ("length.target=3",), "--reward has no 'length'. Known: exact_match"),
        (("length",), ("length.targt=3",), "'length' has no parameter 'targt'. It has target, limit, cache"),
        (("length",), ("length.target=long",), "target is 'long', and it must be int"),
        (("length",), ("target=3",), "must be reward.parameter=value"),
        (("length",), ("length.target=3", "length.target=4"), "length.target is given twice"),
        (("length",), (), "needs either a target above 0"),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_built(
    reward: tuple[str, ...], args: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        set_of(*reward, args=args)


def test_the_command_line_and_yaml_take_one_or_several(tmp_path: Path) -> None:
    assert parse_config(GRPOConfig, []).reward == ("exact_match",)
    assert parse_config(GRPOConfig, ["--reward", "contains"]).reward == ("contains",)
    several = ["--reward", "math", "length=-0.5", "--reward_args", "length.target=3"]
    assert parse_config(GRPOConfig, several).reward == ("math", "length=-0.5")
    for text in ("reward: contains", "reward: [contains]"):
        (tmp_path / "run.yaml").write_text(text)
        assert parse_config(GRPOConfig, ["--config", str(tmp_path / "run.yaml")]).reward == ("contains",)


def test_an_object_of_ones_own_has_its_parameters_already() -> None:
    def own(sample: Sample) -> float:
        return 1.0

    assert scored(RewardSet.from_config(GRPOConfig(), own), [answered("")]) == ([1.0], {"own": [1.0]})
    with pytest.raises(ValueError, match="--reward_args are given, but the reward is an object of your own"):
        RewardSet.from_config(GRPOConfig(reward_args=("own.a=1",)), own)


def test_a_reward_judges_the_records_it_is_for() -> None:
    by_source = ("exact_match.data_source=a", "length.extra.kind=long", "length.extra.kind=7")
    rewards = set_of("exact_match", "length=2", "contains", args=("length.target=4",), reward_for=by_source)
    fields: list[dict[str, Any]] = [
        {"data_source": "a"}, {"data_source": "b", "extra": {"kind": "long"}}, {"extra": {"kind": 7}}, {}
    ]  # fmt: skip
    samples = [answered("1", 1, num_tokens=4, position=place, fields=one) for place, one in enumerate(fields)]
    # exact_match 1 and contains 1; 2 x length 1 and contains 1, twice; contains 1
    assert scored(rewards, samples) == (
        [2.0, 3.0, 3.0, 1.0], {"exact_match": [1.0], "length": [1.0, 1.0], "contains": [1.0] * 4}
    )  # fmt: skip
    assert asyncio.run(rewards.arun("length", samples, FailureBudget())) == [None, 1.0, 1.0, None]
    heard: list[Any] = []
    rewards.hear(lambda label, samples, outcomes: heard.append([label, *outcomes]))
    rewards.run("exact_match", samples, FailureBudget())
    assert heard == [["exact_match", 1.0, None, None, None]]
    with pytest.raises(ValueError, match="--reward_for is given, but the reward is an object of your own"):
        RewardSet.from_config(GRPOConfig(reward_for=("own.a=1",)), half)


def test_the_labels_of_rewards_are_known_without_loading_them() -> None:
    assert labels_of(("math", "some/file.py:mine=0.5", "package.module:other")) == ["math", "mine", "other"]


def test_options_of_rewards_that_are_not_used_are_refused() -> None:
    with pytest.raises(ValueError, match="--judge options are given, but judge is not among --reward"):
        set_of("exact_match", judge=JudgeConfig(url="http://127.0.0.1:1"))
    with pytest.raises(ValueError, match="--reward_model a is given, but reward_model is not among --reward"):
        set_of("exact_match", reward_model="a")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_reward_failures": -1}, "--max_reward_failures is -1: it must be 0 or above"),
        ({"reward_timeout_s": -1.0}, "--reward_timeout_s is -1.0: it must be 0 or above"),
        ({"reward_workers": 0}, "--reward_workers is 0: it must be at least 1"),
        ({"reward_concurrency": 0}, "--reward_concurrency is 0: it must be at least 1"),
        ({"reward_failure_value": "zero"}, "--reward_failure_value is 'zero': it must be a number, or exclude"),
        ({"reward_failure_value": "nan"}, "it must be a number, or exclude"),
        ({"judge": JudgeConfig(timeout_s=0)}, "--judge.timeout_s is 0: it must be above 0"),
        ({"judge": JudgeConfig(retries=-1)}, "--judge.retries is -1: it must be 0 or above"),
    ],
)
def test_ranges(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GRPOConfig(**options)


def half(sample: Sample) -> float:
    return 0.5


def length_of(sample: Sample) -> float:
    return float(len(sample.text))


def test_a_list_of_ones_own_is_added_up() -> None:
    rewards = RewardSet.from_config(GRPOConfig(), [half, length_of])
    assert scored(rewards, [answered("12", 1)]) == ([2.5], {"half": [0.5], "length_of": [2.0]})
    with pytest.raises(ValueError, match="The list of rewards is empty"):
        RewardSet.from_config(GRPOConfig(), [])
    with pytest.raises(ValueError, match="two rewards named 'half'"):
        RewardSet.from_config(GRPOConfig(), [half, half])
    for own in ("exact_match", [half, "exact_match"]):
        with pytest.raises(
            ValueError, match=r"'exact_match' is a name, which belongs in the config: reward=\('exact_m"
        ):
            RewardSet.from_config(GRPOConfig(), cast(Any, own))


def test_a_file_without_a_function_lists_its_functions(tmp_path: Path) -> None:
    (file := tmp_path / "mine.py").write_text("def right(sample): ...\ndef _inner(): ...\nclass Judge: ...\n")
    with pytest.raises(
        ValueError, match=r"names a file, but no function or class of it. Write \S+mine.py:right or \S+mine.py:Judge\."
    ):
        set_of(str(file))
    file.write_text("def right(")
    with pytest.raises(ValueError, match=r"Write \S+mine.py:my_reward\."):
        set_of(str(file))
