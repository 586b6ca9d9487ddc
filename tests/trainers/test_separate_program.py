"""Runs whose ranks are split into trainers and rollout ranks: the same numbers, resumed, and never stuck."""

import json
import math
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

from lightrl.data.sampler import PromptSampler
from lightrl.rollout.recorded_schedule import read_schedule
from lightrl.testing import run_program, run_spmd
from lightrl.testing.killed import Ending, run_and_signal

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_grpo.py"
REPLAY = SCRIPT.with_name("replay.py")
Rows = list[dict[str, Any]]


def rows(folder: Path) -> Rows:
    lines = [line for line in (folder / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
    # The engine's logprobs differ in the last bit by what else is in its batch.
    keep_out = ("time/", "memory/", "tokens/per_second", "sync/gb", "mismatch/")
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith(keep_out)} for line in lines
    ]


def after_step(folder: Path, step: int) -> Callable[[float], bool]:
    """Returns what says that the run has logged a step."""
    log = folder / "metrics.jsonl"
    return lambda _: log.exists() and any(row.get("step", 0) >= step for row in rows(folder))


@pytest.mark.slow
@pytest.mark.long
def test_a_split_run_that_lost_ranks_has_the_numbers_of_a_colocated_one(toy_flags: list[str], tmp_path: Path) -> None:
    flags = [*toy_flags, "--eval.every", "8", "--eval.max_prompts", "6", "--checkpoint.every", "1"]
    flags += ["--max_steps", "16", "--strategy", "single"]
    together, apart = tmp_path / "together", tmp_path / "apart"
    run_program([sys.executable, str(SCRIPT), *flags, "--output_dir", str(together)], timeout_s=280)
    split = [*flags, "--rollout_ranks", "2", "--output_dir", str(apart)]

    def run(step: int, victim: int, signum: int) -> Ending:
        return run_and_signal(
            SCRIPT, *split, world_size=3, victims=[victim], signum=signum, when=after_step(apart, step),
            timeout_s=150, end_timeout_s=30, launcher="nobody",
        )  # fmt: skip

    killed = run(2, 2, signal.SIGKILL)
    assert (killed.was_signalled, killed.codes) == (True, (1, 1, -9)), killed.said
    assert "[trainer rank 0] rollout rank 1 is gone: the process has ended and posted no error" in killed.said
    told = run(4, 1, signal.SIGUSR1)
    assert (told.was_signalled, told.codes) == (True, (75, 0, 0)), told.said
    assert "[trainer rank 0] SIGUSR1: the run ends after step" in told.said
    assert "continuing after step" in run_spmd(SCRIPT, *split, world_size=3, timeout_s=280)
    assert rows(apart) == rows(together)


DYING = """
import os, signal, time

from lightrl.process_group import store_of
from lightrl.strategy.torch_native import SingleStrategy


class Dying(SingleStrategy):
    def prepare_trained(self, *args, **options):
        while not store_of("link").check(["here/1"]):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_trainer_that_dies_before_they_meet_takes_the_rollout_rank_with_it(
    toy_flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has said why, and no connection tells: the signal that follows must do, without a time of grace."""
    (tmp_path / "dying.py").write_text(DYING)
    monkeypatch.chdir(tmp_path)  # where the ranks look for modules
    ended = run_and_signal(
        SCRIPT, *toy_flags, "--strategy", "dying:Dying", "--rollout_ranks", "1",
        "--output_dir", str(tmp_path / "run"),
        world_size=2, victims=[], signum=signal.SIGTERM, when=lambda _: False, timeout_s=60, launcher="forked",
    )  # fmt: skip
    assert ended.codes == (-signal.SIGKILL, -signal.SIGTERM), ended.said


@pytest.mark.slow
def test_ppo_with_separate_ranks_has_the_numbers_of_a_colocated_run(toy_flags: list[str], tmp_path: Path) -> None:
    script, together, apart = SCRIPT.with_name("train_ppo.py"), tmp_path / "together", tmp_path / "apart"
    flags = [*toy_flags, "--max_steps", "3", "--strategy", "single"]
    run_program([sys.executable, str(script), *flags, "--output_dir", str(together)], timeout_s=280)
    split = [*flags, "--rollout_ranks", "1", "--output_dir", str(apart)]
    run_spmd(script, *split, world_size=2, timeout_s=280)
    assert rows(apart) == rows(together)


@pytest.mark.slow
def test_dynamic_sampling_draws_the_same_rounds_on_separate_ranks(toy_flags: list[str], tmp_path: Path) -> None:
    together, apart = tmp_path / "together", tmp_path / "apart"
    flags = [*toy_flags, "--dynamic_sampling.enabled", "True", "--max_new_tokens", "1", "--max_steps", "6"]
    flags += ["--group_size", "2", "--dynamic_sampling.oversample", "1.5"]
    run_program([sys.executable, str(SCRIPT), *flags, "--output_dir", str(together)], timeout_s=280)
    split = [*flags, "--rollout_ranks", "2", "--output_dir", str(apart), "--checkpoint.every", "1"]
    run_spmd(SCRIPT, *split, "--max_steps", "3", world_size=4, timeout_s=280)
    assert "continuing after step" in run_spmd(SCRIPT, *split, world_size=3, timeout_s=280)
    found = [row for row in rows(apart) if "dynamic_sampling/rounds" in row]
    assert max(row["dynamic_sampling/rounds"] for row in found) > 1
    assert max(row["dynamic_sampling/carried"] for row in found) > 0
    assert prompts(apart) == prompts(together)
    for one, other in zip(rows(together), rows(apart), strict=True):
        same = one.keys() - {"tokens/computed_share"}  # which packs share a prompt depends on the ranks that train
        assert other.keys() - one.keys() <= {"balance/max_over_mean"}  # one rank has nothing to balance
        assert all(math.isclose(one[name], other[name], rel_tol=1e-4, abs_tol=1e-5) for name in same)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["odd_digits", "length"])
def test_a_named_reward_must_differ_on_separate_ranks_too(name: str, toy_flags: list[str], tmp_path: Path) -> None:
    """The rewards of one token: `length` is the same for all, and the sums differ only by the other one."""
    together, apart = tmp_path / "together", tmp_path / "apart"
    place = toy_flags.index("--reward") + 1
    flags = [*toy_flags[: place + 1], "length=0.5", *toy_flags[place + 1 :], "--reward_args", "length.target=8"]
    flags += ["--max_new_tokens", "1", "--group_size", "2", "--strategy", "single", "--checkpoint.every", "1"]
    flags += ["--dynamic_sampling.enabled", "True", "--dynamic_sampling.reward", name, "--max_steps", "4"]
    run_program([sys.executable, str(SCRIPT), *flags, "--output_dir", str(together)], timeout_s=280)
    split = [*flags, "--rollout_ranks", "1", "--output_dir", str(apart)]
    run_spmd(SCRIPT, *split, "--max_steps", "2", world_size=2, timeout_s=280)
    assert "continuing after step 2" in run_spmd(SCRIPT, *split, world_size=2, timeout_s=280)
    assert rows(apart) == rows(together)
    fills = {row["dynamic_sampling/fill"] for row in rows(apart) if "dynamic_sampling/fill" in row}
    assert fills == {0.0} if name == "length" else max(fills) > 0.0


@pytest.mark.slow
def test_greedy_baselines_come_from_the_ranks_that_generate(toy_flags: list[str], tmp_path: Path) -> None:
    together, apart = tmp_path / "together", tmp_path / "apart"
    place = toy_flags.index("--reward") + 1
    flags = [*toy_flags[: place + 1], "length=0.5", *toy_flags[place + 1 :], "--reward_args", "length.target=8"]
    flags += ["--algorithm.advantage", "remax", "--strategy", "single", "--checkpoint.every", "1"]
    run_program([sys.executable, str(SCRIPT), *flags, "--output_dir", str(together)], timeout_s=280)
    split = [*flags, "--rollout_ranks", "2", "--output_dir", str(apart)]
    run_spmd(SCRIPT, *split, "--max_steps", "2", world_size=3, timeout_s=280)
    assert "continuing after step 2" in run_spmd(SCRIPT, *split, world_size=3, timeout_s=280)
    assert rows(apart) == rows(together)
    assert [row["step"] for row in rows(apart) if "greedy/reward/odd_digits" in row] == [1, 2, 3]


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory, toy: Path) -> list[str]:
    """The flags for a random reward model."""
    folder = tmp_path_factory.mktemp("reward_model")
    tokenizer = AutoTokenizer.from_pretrained(toy / "model")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, hidden_size=16, intermediate_size=24,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_labels=1,
    )  # fmt: skip
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return ["--reward", "reward_model", "--reward_model", str(folder)]


@pytest.mark.slow
def test_each_rank_that_generates_scores_with_a_reward_model_of_its_own(
    toy_flags: list[str], reward_model: list[str], tmp_path: Path
) -> None:
    together, apart = tmp_path / "together", tmp_path / "apart"
    flags = [*toy_flags, *reward_model, "--strategy", "single", "--eval.every", "2", "--eval.max_prompts", "4"]
    run_program([sys.executable, str(SCRIPT), *flags, "--output_dir", str(together)], timeout_s=280)
    run_spmd(SCRIPT, *flags, "--rollout_ranks", "2", "--output_dir", str(apart), world_size=3, timeout_s=280)
    assert len({row["reward/mean"] for row in rows(apart) if "reward/mean" in row}) == 3
    for one, other in zip(rows(together), rows(apart), strict=True):
        assert one.keys() == other.keys()
        assert all(math.isclose(one[name], other[name], rel_tol=1e-4, abs_tol=1e-5) for name in one)


@pytest.mark.slow
def test_a_reward_model_scores_episodes_while_others_go_on(
    toy_flags: list[str], reward_model: list[str], tmp_path: Path
) -> None:
    flags = [*toy_flags, *GAME, *reward_model, "--max_new_tokens", "4", "--eval.every", "2", "--max_steps", "4"]
    split = ["--rollout_ranks", "1", "--rollout.max_staleness", "1", "--output_dir", str(tmp_path / "run")]
    run_spmd(SCRIPT, *flags, *split, world_size=2, timeout_s=280)
    run_program(
        [sys.executable, str(REPLAY), str(tmp_path / "run"), "--output_dir", str(tmp_path / "again")], timeout_s=280
    )
    for one, other in zip(rows(tmp_path / "run"), rows(tmp_path / "again"), strict=True):
        names = [name for name in one if name.startswith(("reward/", "eval/"))]
        assert names
        assert all(math.isclose(one[name], other[name], rel_tol=1e-4, abs_tol=1e-5) for name in names)


@pytest.mark.slow
def test_an_estimator_gets_each_reward_from_the_ranks_that_generate(toy_flags: list[str], tmp_path: Path) -> None:
    together, apart = tmp_path / "together", tmp_path / "apart"
    place = toy_flags.index("--reward") + 1
    flags = [*toy_flags[:place], toy_flags[place], "length", *toy_flags[place + 1 :]]
    flags += ["--reward_args", "length.target=8", "--algorithm.advantage", "gdpo", "--strategy", "single"]
    run_program([sys.executable, str(SCRIPT), *flags, "--output_dir", str(together)], timeout_s=280)
    run_spmd(SCRIPT, *flags, "--rollout_ranks", "1", "--output_dir", str(apart), world_size=2, timeout_s=280)
    assert rows(apart) == rows(together)
    ahead, again = tmp_path / "ahead", tmp_path / "again"
    split = ["--rollout_ranks", "1", "--rollout.max_staleness", "1", "--output_dir", str(ahead)]
    run_spmd(SCRIPT, *flags, *split, world_size=2, timeout_s=280)
    run_program([sys.executable, str(REPLAY), str(ahead), "--output_dir", str(again)], timeout_s=280)
    for one, other in zip(rows(ahead), rows(again), strict=True):
        assert math.isclose(one["grad_norm"], other["grad_norm"], rel_tol=1e-3)


@pytest.mark.slow
def test_adapters_arrive_unmerged_on_the_ranks_that_generate(toy_flags: list[str], tmp_path: Path) -> None:
    together, apart = tmp_path / "together", tmp_path / "apart"
    flags = [*toy_flags, "--lora.rank", "2", "--dtype", "bfloat16", "--strategy", "single", "--lr", "1e-2"]
    run_program([sys.executable, str(SCRIPT), *flags, "--output_dir", str(together)], timeout_s=280)
    run_spmd(SCRIPT, *flags, "--rollout_ranks", "1", "--output_dir", str(apart), world_size=2, timeout_s=280)
    assert rows(apart) == rows(together)
    sent = [json.loads(line).get("sync/gb") for line in (apart / "metrics.jsonl").read_text().splitlines()]
    whole = sum(tensor.nbytes for tensor in load_file(apart / "final" / "model.safetensors").values()) / 1e9
    assert all(size < 0.2 * whole for size in sent if size is not None)


@pytest.mark.slow
def test_a_curriculum_chooses_by_the_results_that_rollout_ranks_send(toy_flags: list[str], tmp_path: Path) -> None:
    together, apart = tmp_path / "together", tmp_path / "apart"
    flags = [*toy_flags, "--num_prompts", "2", "--max_steps", "6", "--data.curriculum", "half_solved"]
    run_program([sys.executable, str(SCRIPT), *flags, "--output_dir", str(together)], timeout_s=280)
    split = [*flags, "--rollout_ranks", "2", "--output_dir", str(apart), "--checkpoint.every", "1"]
    run_spmd(SCRIPT, *split, "--max_steps", "3", world_size=4, timeout_s=280)
    assert "continuing after step" in run_spmd(SCRIPT, *split, world_size=3, timeout_s=280)
    assert prompts(apart) == prompts(together)
    plain = ["--data.curriculum", "", "--output_dir", str(tmp_path / "plain")]
    run_program([sys.executable, str(SCRIPT), *flags, *plain], timeout_s=280)
    assert prompts(apart) != prompts(tmp_path / "plain")


def prompts(folder: Path) -> list[tuple[int, str]]:
    lines = (folder / "samples.jsonl").read_text().splitlines()
    return sorted((row["step"], row["prompt"]) for row in map(json.loads, lines))


GAME = ["--rollout.workflow", "environment", "--rollout.workflow_args", "environment=tests.programs.episodes:Echo"]


@pytest.mark.slow
def test_one_rank_of_an_engine_scores_while_the_other_waits_for_the_next_step(
    toy_flags: list[str], tmp_path: Path
) -> None:
    """Groups end one by one, so a reward that waited for all rollout ranks would wait for ever."""
    flags = [*toy_flags, *GAME, "--reward", "episode", "--max_new_tokens", "4", "--strategy", "single"]
    split = ["--rollout_ranks", "2", "--engine_tp_size", "2", "--rollout.max_staleness", "1"]
    run_spmd(SCRIPT, *flags, *split, "--output_dir", str(tmp_path / "run"), world_size=3, timeout_s=120)
    trained = [row for row in rows(tmp_path / "run") if "reward/mean" in row]
    assert len(trained) == 3


FILTER = ["--rollout.filter", "unequal_rewards", "--max_new_tokens", "2"]
LATE = ["--rollout.workflow", "tests.programs.episodes:Slow", "--rollout.late", "drop"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "own",
    [
        [],
        [*GAME, "--reward", "episode", "--max_new_tokens", "4", "--share_prompts", "True"],
        LATE,
        ["--data.curriculum", "half_solved"],
        FILTER,
    ],
    ids=["plain", "episodes, shared prompts", "late groups dropped", "curriculum", "filter"],
)
def test_a_run_that_generates_while_it_learns_can_be_repeated(
    own: list[str], toy_flags: list[str], tmp_path: Path
) -> None:
    recorded, again = tmp_path / "recorded", tmp_path / "again"
    flags = [*toy_flags, *own, "--max_steps", "8", "--rollout_ranks", "1", "--rollout.max_staleness", "1"]
    run_spmd(SCRIPT, *flags, "--output_dir", str(recorded), world_size=2, timeout_s=280)
    first = rows(recorded)
    assert max(row["rollout/staleness_max"] for row in first) == 1
    assert (sum(row.get("rollout/dropped", 0.0) for row in first) > 0) == (own is LATE)
    run_program([sys.executable, str(REPLAY), str(recorded), "--output_dir", str(again)], timeout_s=280)
    has_rejected = own is FILTER  # such groups are rewarded as well, and not repeated
    assert (sum(row.get("rollout/filtered", 0.0) for row in first) > 0) == has_rejected
    for one, other in zip(first, rows(again), strict=True):
        assert has_rejected or one["reward/mean"] == other["reward/mean"]
        assert one["rollout/staleness"] == other["rollout/staleness"]
        assert ("tokens/computed_share" in one) == ("tokens/computed_share" in other)
        assert math.isclose(one["loss"], other["loss"], rel_tol=1e-4, abs_tol=1e-5)
        assert math.isclose(one["grad_norm"], other["grad_norm"], rel_tol=1e-3)


@pytest.mark.slow
def test_old_tokens_are_left_out_of_the_loss(toy_flags: list[str], tmp_path: Path) -> None:
    recorded, again = tmp_path / "recorded", tmp_path / "again"
    flags = [
        *toy_flags,
        "--max_new_tokens",
        "40",
        "--max_steps",
        "8",
        "--rollout_ranks",
        "1",
        "--rollout.max_groups",
        "6",
    ]
    flags += ["--rollout.max_staleness", "3", "--rollout.max_token_staleness", "1"]
    run_spmd(SCRIPT, *flags, "--output_dir", str(recorded), world_size=2, timeout_s=280)
    first = rows(recorded)
    assert sum(row.get("rollout/tokens_too_old", 0) for row in first) > 0
    assert sum("grad_norm" in row for row in first) > 3
    run_program([sys.executable, str(REPLAY), str(recorded), "--output_dir", str(again)], timeout_s=280)
    for one, other in zip(first, rows(again), strict=True):
        assert one.get("rollout/tokens_too_old") == other.get("rollout/tokens_too_old")
        # A step whose tokens are all too old makes no update.
        assert math.isclose(one.get("grad_norm", -1), other.get("grad_norm", -1), rel_tol=1e-3)


@pytest.mark.long
@pytest.mark.slow
def test_a_curriculum_under_a_bound_goes_on_after_a_stop(toy_flags: list[str], tmp_path: Path) -> None:
    flags = [*toy_flags, "--num_prompts", "2", "--max_steps", "8", "--data.curriculum", "half_solved"]
    flags += ["--rollout.max_staleness", "2", "--checkpoint.every", "1", "--output_dir", str(tmp_path / "run")]
    ended = run_and_signal(
        SCRIPT, *flags, "--rollout_ranks", "1", world_size=3, victims=[1], signum=signal.SIGKILL,
        when=after_step(tmp_path / "run", 4), timeout_s=150, end_timeout_s=30, launcher="nobody",
    )  # fmt: skip
    assert ended.was_signalled, ended.said
    said = run_spmd(SCRIPT, *flags, "--rollout_ranks", "2", world_size=3, timeout_s=280)
    assert "continuing after step" in said
    found = [row for row in rows(tmp_path / "run") if "reward/mean" in row]
    assert [row["step"] for row in found] == [*range(1, 9)]
    groups = [group for batch in read_schedule(tmp_path / "run") for group in batch]
    assert len({group.ticket for group in groups}) == 2 * 8  # each once
    in_order = PromptSampler(5, 2, 0)
    assert [group.prompt for group in groups] != [in_order.index_at(group.ticket) for group in groups]


@pytest.mark.slow
def test_a_curriculum_names_the_prompts_that_replace_rejected_groups(toy_flags: list[str], tmp_path: Path) -> None:
    flags = [*toy_flags, "--num_prompts", "2", "--group_size", "2", "--max_new_tokens", "1", "--max_steps", "6"]
    flags += ["--data.curriculum", "half_solved", "--rollout.filter", "unequal_rewards", "--rollout.max_staleness", "1"]
    flags += ["--checkpoint.every", "1", "--output_dir", str(tmp_path / "run")]
    run_spmd(SCRIPT, *flags, "--rollout_ranks", "1", "--max_steps", "3", world_size=3, timeout_s=280)
    said = run_spmd(SCRIPT, *flags, "--rollout_ranks", "1", world_size=3, timeout_s=280)
    assert "continuing after step" in said
    found = [row for row in rows(tmp_path / "run") if "rollout/filtered" in row]
    assert [row["step"] for row in found] == [*range(1, 7)]
    assert sum(row["rollout/filtered"] for row in found[:3]) > 0
    assert sum(row["rollout/filtered"] for row in found[3:]) > 0
    groups = [group for batch in read_schedule(tmp_path / "run") for group in batch]
    assert len({group.ticket for group in groups}) == len(groups)
    assert max(group.ticket for group in groups) >= 12  # tickets of replacements among them
