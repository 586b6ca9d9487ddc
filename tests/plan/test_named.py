"""A dry run refuses the names that its run would refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightrl.config import GRPOConfig, PPOConfig
from lightrl.plan.named import check_named
from lightrl.programs import main

BUILT: list[str] = []


class Service:
    """A reward that starts something."""

    def __init__(self) -> None:
        BUILT.append("service")

    def __call__(self, sample: object) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("kind", "words", "wanted"),
    [
        ("grpo", ["--algorithm.advantage", "grop"], "Unknown advantage 'grop'. Did you mean grpo"),
        ("grpo", ["--algorithm.advantage", "grpo", "--group_size", "1"], "--group_size is 1: grpo compares"),
        ("grpo", ["--algorithm.kl_estimator", "k9", "--algorithm.kl_coef", "0.1"], "Unknown kl_estimator 'k9'"),
        ("ppo", ["--algorithm.advantage", "gea"], "Unknown returns 'gea'. Did you mean gae"),
        ("ppo", ["--algorithm.loss", "ppo_clipp"], "Unknown loss 'ppo_clipp'"),
        ("grpo", ["--reward", "exact_mach=2"], "Unknown reward 'exact_mach'. Did you mean exact_match"),
        ("grpo", ["--reward", "no/file.py:mine"], "no/file.py"),
        ("grpo", ["--engine", "natve"], "natve"),
        ("grpo", ["--rollout.workflow", "enviroment"], "Unknown workflow 'enviroment'"),
    ],
)
def test_a_wrong_name_ends_a_dry_run(
    kind: str, words: list[str], wanted: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", kind, *words, "--output_dir", str(tmp_path / "run"), "--dry_run", "True"])
    assert end.value.code == 2
    assert wanted in " ".join(capsys.readouterr().err.split())


def test_a_module_that_changes_settings_of_torch_ends_a_dry_run_without_a_traceback(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "without_grad.py").write_text("import torch\ntorch.set_grad_enabled(False)\ndef mine(sample): ...\n")
    try:
        for name in ("without_grad", str(tmp_path / "without_grad.py")):
            test_a_wrong_name_ends_a_dry_run(
                "grpo", ["--reward", f"{name}:mine"], f"error: The import of {name} has changed", capsys, tmp_path
            )
            torch.set_grad_enabled(True)
    finally:
        torch.set_grad_enabled(True)


def test_right_names_are_taken_and_nothing_is_built() -> None:
    check_named(GRPOConfig(reward=(f"{__name__}:Service=2",)))
    check_named(PPOConfig())
    assert BUILT == []
