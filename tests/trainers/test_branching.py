"""A run that begins with another run's checkpoint: what is refused before any weights are loaded."""

import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrl.checkpoint import CheckpointDirectory
from lightrl.config import DPOConfig, GRPOConfig, PPOConfig, RMConfig, RunConfig, SFTConfig, parse_config, to_yaml
from lightrl.trainers.branching import kind_of, require_same_kind
from lightrl.trainers.earlier_run import find_checkpoint, require_same

KINDS = {"GRPO": GRPOConfig, "PPO": PPOConfig, "SFT": SFTConfig, "DPO": DPOConfig, "a reward model": RMConfig}


def saved_run(folder: Path, config: RunConfig) -> Path:
    """Returns the folder of a run that has a checkpoint."""
    directory = CheckpointDirectory(folder / "checkpoints", keep=1)
    (directory.begin(2) / "file").write_text("x")
    directory.commit(2)
    (folder / "config.yaml").write_text(to_yaml(config))
    return folder


@pytest.mark.parametrize("saved", KINDS)
@pytest.mark.parametrize("asked", KINDS)
def test_a_run_continues_one_of_its_own_kind(saved: str, asked: str, tmp_path: Path) -> None:
    run = saved_run(tmp_path / "run", KINDS[saved]())
    config, branch = KINDS[asked](resume=str(run)), tmp_path / "branch/checkpoints"
    if saved == asked or (saved, asked) == ("PPO", "GRPO"):
        assert find_checkpoint(config, branch) == run / "checkpoints/step-000002"
        return
    cannot = f"comes from a run of {saved}, which a run of {asked} cannot continue. Start anew from its model: give"
    with pytest.raises(ValueError, match=f"^--resume {run}/checkpoints/step-000002 {cannot} --model the final/ of its"):
        find_checkpoint(config, branch)


def test_the_folder_of_another_kind_of_run_is_not_continued(tmp_path: Path) -> None:
    run = saved_run(tmp_path, SFTConfig(train_data="a.jsonl"))
    require_same(run, SFTConfig(train_data="a.jsonl"))
    with pytest.raises(
        ValueError, match=f"^--output_dir {run} comes from a run of SFT, which a run of DPO cannot continue"
    ):
        require_same(run, DPOConfig(train_data="a.jsonl"))  # no option of SFT is another one of DPO


def test_a_config_with_few_options_is_of_no_kind() -> None:
    assert kind_of({"lr", "seed", "max_steps"}) == ""
    assert kind_of({item.name for item in fields(GRPOConfig)} - {"lr", "seed"}) == "GRPO"
    require_same_kind("a run", {"lr": 1e-6}, GRPOConfig())


@pytest.mark.parametrize(
    ("kind", "saved", "asked", "said"),
    [
        (PPOConfig, "", "--critic.shared_backbone True", "--critic.shared_backbone False, and this run has True: it"),
        (PPOConfig, "--critic.shared_backbone True", "", "--critic.shared_backbone True, and this run has False: it"),
        (GRPOConfig, "", "--lora.rank 4", "--lora.rank 0, and this run has 4: it holds weights of other shapes. Give"),
        (GRPOConfig, "--lora.rank 4", "", "--lora.rank 4, and this run has 0: it"),
        (SFTConfig, "--lora.rank 4", "--lora.rank 8", "--lora.rank 4, and this run has 8: it"),
        (GRPOConfig, "", "--seed 1", "--seed 0, and this run has 1: the order of its data depends on it. Give the"),
        (
            GRPOConfig,
            "",
            "--optim.schedule_unit rl_step",
            "--optim.schedule_unit optimizer_step, and this run has rl_s",
        ),
        (DPOConfig, "", "--strategy single --optim.name muon", "--optim.name adamw, and this run has muon: it holds"),
    ],
)
def test_what_a_checkpoint_decides_is_refused_at_once(
    kind: type[RunConfig], saved: str, asked: str, said: str, tmp_path: Path
) -> None:
    run = saved_run(tmp_path / "run", parse_config(kind, saved.split()))
    config = parse_config(kind, [*asked.split(), "--resume", str(run)])
    with pytest.raises(ValueError, match=f"^--resume {run}/checkpoints/step-000002 comes from a run with {said}"):
        find_checkpoint(config, tmp_path / "branch/checkpoints")


@pytest.mark.parametrize("state", [None, {"step": 2}, {"step": 2, "sampler": {"num_drawn": 8}}])
def test_another_seed_needs_a_checkpoint_without_the_seed_of_a_sampler(
    state: dict[str, Any] | None, tmp_path: Path
) -> None:
    run = saved_run(tmp_path / "run", SFTConfig(train_data="a.jsonl"))
    checkpoint, branch = run / "checkpoints/step-000002", tmp_path / "branch/checkpoints"
    config = SFTConfig(train_data="a.jsonl", seed=1, resume=str(run))
    torch.save({"client_state": state}, checkpoint / "state.pt")
    assert find_checkpoint(config, branch) == checkpoint
    torch.save({"client_state": {"sampler": {"num_drawn": 8, "seed": 0}}}, checkpoint / "state.pt")
    with pytest.raises(ValueError, match="--seed 0, and this run has 1: the order of its data depends on it"):
        find_checkpoint(config, branch)


def test_a_bounded_run_cannot_switch_rollout_ranks_on_or_off(tmp_path: Path) -> None:
    apart, bound = ["--rollout_ranks", "1"], ["--rollout.max_staleness", "1"]
    for saved, asked, remedy in ((apart, [], "1, or another number above 0"), ([], apart, "0")):
        run = saved_run(tmp_path / remedy[0], parse_config(GRPOConfig, [*saved, *bound]))
        unbound = saved_run(tmp_path / f"unbound {remedy[0]}", parse_config(GRPOConfig, saved))
        require_same(unbound, parse_config(GRPOConfig, asked))
        config = parse_config(GRPOConfig, [*asked, *bound, "--resume", str(unbound)])
        assert find_checkpoint(config, tmp_path / "branch/checkpoints")
        with pytest.raises(
            ValueError, match=f"^--output_dir {run} comes from a run with .* Give --rollout_ranks {remedy}.$"
        ):
            require_same(run, parse_config(GRPOConfig, [*asked, *bound]))
        config = parse_config(GRPOConfig, [*asked, *bound, "--resume", str(run)])
        with pytest.raises(
            ValueError, match=f"^--resume {run}/checkpoints/step-000002 comes from a run with --rollout_ranks"
        ):
            find_checkpoint(config, tmp_path / "branch/checkpoints")
        require_same(run, parse_config(GRPOConfig, ["--rollout_ranks", "2", *bound] if saved else bound))
        shutil.rmtree(run / "checkpoints")
        require_same(run, parse_config(GRPOConfig, [*asked, *bound]))  # begins anew


def test_grpo_cannot_continue_a_critic_on_the_backbone(tmp_path: Path) -> None:
    run = saved_run(tmp_path / "run", parse_config(PPOConfig, ["--critic.shared_backbone", "True"]))
    with pytest.raises(ValueError, match="with --critic.shared_backbone True, and this run has no such option"):
        find_checkpoint(GRPOConfig(resume=str(run)), tmp_path / "branch/checkpoints")


@pytest.mark.parametrize(
    ("one", "other"), [("--data.curriculum half_solved", "--seed 1"), ("--lora.path adapter", "--lora.rank 4")]
)
def test_a_curriculum_has_no_seed_and_an_adapter_has_its_own_rank(one: str, other: str, tmp_path: Path) -> None:
    for before, now in ((one, other), (other, one)):
        run = saved_run(tmp_path / before, parse_config(GRPOConfig, before.split()))
        config = parse_config(GRPOConfig, [*now.split(), "--resume", str(run)])
        assert find_checkpoint(config, tmp_path / "branch/checkpoints")


def test_other_options_may_change_in_a_branch(tmp_path: Path) -> None:
    run = saved_run(tmp_path / "run", GRPOConfig())
    branch = tmp_path / "branch/checkpoints"
    options = ["--lr", "1e-3", "--num_prompts", "8", "--optim.schedule", "cosine", "--algorithm.kl_coef", "0.1"]
    assert find_checkpoint(parse_config(GRPOConfig, [*options, "--resume", str(run)]), branch)
    asked = parse_config(GRPOConfig, ["--seed", "1", "--resume", str(run)])
    without_lora = to_yaml(GRPOConfig()).replace("lora:\n", "lost:\n")  # as of a version that had none
    (run / "config.yaml").write_text(without_lora)
    assert find_checkpoint(parse_config(GRPOConfig, ["--lora.rank", "4", "--resume", str(run)]), branch)
    for content in ("a text", "[", ""):  # whether the checkpoint fits shows when it is loaded
        (run / "config.yaml").write_text(content)
        assert find_checkpoint(asked, branch)
    (run / "config.yaml").unlink()
    assert find_checkpoint(asked, branch)
