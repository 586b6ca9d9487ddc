"""Model cards."""

import json
from pathlib import Path

from lightrl.config import GRPOConfig
from lightrl.trainers.model_card import changed_options, write_card


def test_recipe_metrics_and_hash(tmp_path: Path) -> None:
    rows = [{"step": 1, "reward/mean": 0.25, "time/step": 3}, {"step": 2, "reward/mean": 0.5}, {"step": 3, "loss": 7}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "weights.sha256").write_text("abc123  whole\n")
    write_card(tmp_path, tmp_path, GRPOConfig(model="Org/Model", lr=0.5, output_dir="/secret/run"), step=2)
    card = (tmp_path / "README.md").read_text()
    assert card.startswith(
        "---\nlibrary_name: transformers\ntags:\n- lightrl\n- reinforcement-learning\nbase_model: Org"
    )
    assert "# GRPO training of `Org/Model`" in card
    assert "for 2 steps" in card
    assert "| `reward/mean` | 0.5 |" in card
    assert "lr: 0.5" in card
    assert "prints `abc123`" in card
    assert "/secret" not in card
    assert "loss" not in card.partition("## Recipe")[0]  # of a later step


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.25}\n{"step": 2, "reward/me')
    write_card(tmp_path, tmp_path, GRPOConfig(), step=2)
    assert "| `reward/mean` | 0.25 |" in (tmp_path / "README.md").read_text()


def test_only_what_differs_is_a_recipe() -> None:
    assert changed_options(GRPOConfig(num_prompts=3)) == {"num_prompts": 3}
