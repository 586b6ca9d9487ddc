"""The whole program: a run of PPO does not depend on how it is spread, goes on after a kill, and tells mistakes."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from script_runs import run_script
from transformers import AutoModel, AutoModelForCausalLM

from lightrl.models.critic import load_critic
from lightrl.testing import free_port
from lightrl.trainers import hash_run

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_ppo.py"
run = partial(run_script, SCRIPT)
Rows = list[dict[str, Any]]
ReadMetrics = Callable[[Path], Rows]

# A new head of zeros would leave the body's first gradient at exactly 0.
CRITIC = ["--critic.head_init_std", "0.1", "--critic_lr", "5e-4"]
VARIANTS = {
    "a critic of its own": [
        *CRITIC,
        *("--num_minibatches", "2", "--num_epochs", "2", "--algorithm.advantage_args", "gamma=0.9", "lam=0.8"),
        *("--algorithm.kl_coef", "0.1", "--algorithm.kl_target", "0.001", "--algorithm.kl_horizon", "100"),
        *("--algorithm.kl_in_reward", "k1", "--algorithm.reward_normalization", "running"),
        *("--algorithm.truncation", "bootstrap", "--algorithm.advantage_normalization", "running"),
        *("--algorithm.entropy_coef", "0.01", "--algorithm.entropy_target", "2.6"),
    ],
    "a shared backbone": [*CRITIC, "--critic.shared_backbone", "True", "--critic.value_coef", "0.3"],
    "policy frozen, head alone": [*CRITIC, "--critic.policy_frozen_steps", "2", "--critic_warmup_steps", "1"],
}
SPREADS: dict[str, tuple[int, list[str]]] = {
    "one process, 3 samples at a time": (0, ["--micro_batch_size", "3"]),
    "fsdp on 2 ranks": (2, ["--strategy", "fsdp", "--micro_batch_size", "1"]),
    "sequence parallelism on 2 ranks": (2, ["--strategy", "fsdp", "--sp_size", "2", "--micro_batch_size", "3"]),
    "ddp on 2 ranks": (2, ["--strategy", "ddp", "--max_tokens_per_microbatch", "40"]),
    "deepspeed on 2 ranks": (2, ["--strategy", "deepspeed", "--micro_batch_size", "3"]),
    "deepspeed, zero 3, on 2 ranks": (2, ["--strategy", "deepspeed", "--deepspeed.zero_stage", "3"]),
}
COMBINATIONS = [  # every spread with one variant or two
    ("a critic of its own", "one process, 3 samples at a time"),
    ("a critic of its own", "fsdp on 2 ranks"),
    ("a critic of its own", "deepspeed, zero 3, on 2 ranks"),
    ("a shared backbone", "fsdp on 2 ranks"),
    ("a shared backbone", "sequence parallelism on 2 ranks"),
    ("a shared backbone", "deepspeed on 2 ranks"),
    ("policy frozen, head alone", "ddp on 2 ranks"),
    ("policy frozen, head alone", "deepspeed, zero 3, on 2 ranks"),
]
COMPARED = (
    "loss", "grad_norm", "entropy", "kl", "clip_fraction", "lr", "kl_coef", "entropy_coef",
    "advantage_std", "critic/loss", "critic/grad_norm", "critic/lr", "critic/clip_fraction", "critic/return_mean",
    "critic/value_mean", "critic/explained_variance",
)  # fmt: skip
EQUAL = ("reward/mean", "tokens/prompt", "tokens/response", "tokens/truncated")


@pytest.fixture(scope="module")
def reference(toy_flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a variant's run in one process, made once."""
    folders: dict[str, Path] = {}

    def get(variant: str) -> Path:
        if variant not in folders:
            folders[variant] = tmp_path_factory.mktemp("ppo") / "run"
            run(0, [*toy_flags, *VARIANTS[variant]], folders[variant])
        return folders[variant]

    return get


def check_same_run(first: Path, other: Path, read: ReadMetrics) -> None:
    ours, theirs = read(first), read(other)
    assert [row["step"] for row in theirs] == [row["step"] for row in ours] == [1, 2, 3]
    for mine, yours in zip(ours, theirs, strict=True):
        assert {name: yours[name] for name in EQUAL} == {name: mine[name] for name in EQUAL}
        for name in COMPARED:
            assert (name in mine) == (name in yours), name
            # Relative; an explained variance is a difference to 1, other differences may be near 0, and the loss of a
            # first update is minus the mean of whitened advantages: 0 but for float32's rounding of numbers near 1.
            floor = {"critic/explained_variance": 1e-5, "loss": 1e-7}.get(name, 2e-8)
            if name in mine:
                # After two updates of Adam, which divides by small numbers, the order of ZeRO-3's sums shows: 1.3e-5.
                rel_tol = 5e-5 if name == "critic/grad_norm" else 1e-5
                is_same = math.isclose(yours[name], mine[name], rel_tol=rel_tol, abs_tol=floor)
                assert is_same, (name, yours[name], mine[name])


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "spread"), COMBINATIONS)
def test_the_run_does_not_depend_on_how_it_is_spread(
    variant: str,
    spread: str,
    toy_flags: list[str],
    reference: Callable[[str], Path],
    metrics_of: ReadMetrics,
    tmp_path: Path,
) -> None:
    world, flags = SPREADS[spread]
    run(world, [*toy_flags, *VARIANTS[variant], *flags], tmp_path / "run")
    check_same_run(reference(variant), tmp_path / "run", metrics_of)


@pytest.mark.slow
def test_adapters_of_both_models_train_the_same_on_two_ranks(
    toy_flags: list[str], metrics_of: ReadMetrics, tmp_path: Path
) -> None:
    flags = [*toy_flags, *CRITIC, "--lora.rank", "4", "--algorithm.kl_coef", "0.1"]
    run(0, flags, tmp_path / "one")
    run(2, [*flags, "--strategy", "fsdp", "--micro_batch_size", "2"], tmp_path / "two")
    check_same_run(tmp_path / "one", tmp_path / "two", metrics_of)
    assert (tmp_path / "two" / "final_critic" / "adapter").is_dir()


def test_the_variants_are_different_runs(reference: Callable[[str], Path], metrics_of: ReadMetrics) -> None:
    """Else the comparisons above would compare nothing."""
    own, shared, frozen = (metrics_of(reference(variant)) for variant in VARIANTS)
    assert own[0]["kl_coef"] == 0.1 < own[1]["kl_coef"] < own[2]["kl_coef"]
    assert own[0]["entropy_coef"] == 0.01 != own[1]["entropy_coef"]
    assert all(row["critic/loss"] > 0 and row["loss"] != 0 for row in own)
    assert all("critic/grad_norm" not in row and row["critic/loss"] > 0 for row in shared)
    # Frozen for two steps: the same policy samples from the same draws as one that has not been trained.
    assert ["loss" in row for row in frozen] == [False, False, True]
    assert frozen[0]["entropy"] != frozen[2]["entropy"]
    assert frozen[0]["critic/lr"] == 0  # the first group's, the body's: the head trains alone
    assert frozen[1]["critic/lr"] == 5e-4


def test_the_models_of_a_run_are_loaded_again(
    reference: Callable[[str], Path], toy_flags: list[str], metrics_of: ReadMetrics, tmp_path: Path
) -> None:
    final = reference("a critic of its own") / "final"
    assert hash_run.main([str(final.parent)]) == 0
    AutoModelForCausalLM.from_pretrained(final)
    critic_folder = final.with_name("final_critic")
    AutoModel.from_pretrained(critic_folder)
    saved = load_critic(str(critic_folder), materialize=True, init_std=0.0, seed=0)
    assert saved.value_head.weight.abs().sum() > 0
    flags = [*toy_flags, "--max_steps", "1", "--critic_model", str(critic_folder), "--critic.offload_waiting_optimizer"]
    run(0, [*flags, "True"], tmp_path / "again")
    assert metrics_of(tmp_path / "again")[0]["critic/value_std"] > 0  # not the zeros of a new head
    with_head = reference("a shared backbone") / "final"
    assert hash_run.main([str(with_head)]) == 0
    assert "\nweight float32" in (with_head / "weights.sha256").read_text()  # of the value head
    AutoModelForCausalLM.from_pretrained(with_head)
    assert load_critic(str(with_head), materialize=True, init_std=0.0, seed=0).value_head.weight.abs().sum() > 0


# ---- resume ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "strategy"),
    [
        pytest.param("a critic of its own", "fsdp", marks=pytest.mark.long),
        pytest.param("a shared backbone", "deepspeed", marks=pytest.mark.engine),
    ],
)
def test_a_killed_run_goes_on_with_the_same_numbers(
    variant: str, strategy: str, toy_flags: list[str], metrics_of: ReadMetrics, tmp_path: Path
) -> None:
    flags = [*toy_flags, *VARIANTS[variant], "--max_steps", "5", "--checkpoint.every", "2", "--strategy", strategy]
    run(2, flags, tmp_path / "whole")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["--master_addr", "127.0.0.1", "--master_port", str(free_port()), str(SCRIPT), *flags]
    command += ["--max_steps", "100000", "--output_dir", str(tmp_path / "killed")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True, env=environment
    )
    marker, deadline = tmp_path / "killed/checkpoints/step-000002/COMPLETE", time.monotonic() + 200
    while not marker.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    kill_tree(process)
    assert marker.exists()
    for path in (tmp_path / "killed" / "checkpoints").glob("step-*"):  # a fast machine may have got further
        if int(path.name.removeprefix("step-")) > 2:
            shutil.rmtree(path)
    assert "continuing after step 2" in run(2, flags, tmp_path / "killed")
    wanted, found = metrics_of(tmp_path / "whole"), metrics_of(tmp_path / "killed")
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5]
    for mine, yours in zip(wanted[2:], found[2:], strict=True):
        for name in (*COMPARED, *EQUAL):
            assert mine.get(name) == yours.get(name), name
    for name in sorted(path.name for path in tmp_path.glob("whole/final*")):
        for path in sorted((tmp_path / "whole" / name).glob("*.safetensors")):
            assert path.read_bytes() == (tmp_path / "killed" / name / path.name).read_bytes(), path


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """The agent and both ranks at once: torchrun gives its ranks sessions of their own."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in (process.pid, *map(int, children)):
        os.kill(pid, signal.SIGKILL)
    process.wait()


# ---- errors ------------------------------------------------------------------------------------------------------


def test_a_critic_that_is_not_there_is_told(toy_flags: list[str], tmp_path: Path) -> None:
    output = run(0, [*toy_flags, "--critic_model", "./nowhere"], tmp_path / "run", expect_failure=True)
    assert "--critic_model ./nowhere: there is no such folder" in " ".join(output.split())
    assert "Traceback" not in output


def test_a_critic_of_another_vocabulary_is_refused(toy: Path, toy_flags: list[str], tmp_path: Path) -> None:
    shutil.copytree(toy / "model", tmp_path / "other")
    tokenizer = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words["x"] = words.pop("9")
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(tokenizer))
    output = run(0, [*toy_flags, "--critic_model", str(tmp_path / "other")], tmp_path / "run", expect_failure=True)
    assert "has another tokenizer than --model" in " ".join(output.split())


# ---- learning ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--critic.shared_backbone", "True", "--critic.value_coef", "0.1"]])
def test_the_recipe_learns(flags: list[str], metrics_of: ReadMetrics, tmp_path: Path) -> None:
    """Held-out accuracy from 0.17 to about 0.87 in 20 steps."""
    recipe = str(SCRIPT.parents[1] / "configs" / "ppo.yaml")
    run(0, ["--config", recipe, "--max_steps", "20", "--eval.max_prompts", "256", *flags], tmp_path / "run")
    rows = metrics_of(tmp_path / "run")
    assert rows[0]["eval/accuracy"] < 0.3
    assert rows[-1]["eval/accuracy"] > 0.7


@pytest.mark.slow
def test_a_critic_of_a_frozen_policy_learns_its_returns(
    toy_flags: list[str], metrics_of: ReadMetrics, tmp_path: Path
) -> None:
    """The reward counts digits as they come, so a prefix tells a part of it."""
    flags = [*toy_flags, "--group_size", "16", "--num_epochs", "8", "--max_steps", "20", "--eval.every", "0"]
    flags += ["--critic.policy_frozen_steps", "20", "--critic_lr", "3e-3", "--critic.value_clip", "0"]
    run(0, flags, tmp_path / "run")
    explained = [row["critic/explained_variance"] for row in metrics_of(tmp_path / "run")]
    assert explained[0] == 0  # the head starts at 0
    assert min(explained[-3:]) > 0.1
