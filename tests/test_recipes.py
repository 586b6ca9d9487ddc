"""Every recipe of configs/ for the built-in task learns it: a short part of each, in one process."""

import json
import sys
from pathlib import Path

import pytest

from lightrl.config import GRPOConfig, parse_config
from lightrl.testing import run_program

ROOT = Path(__file__).parents[1]
RECIPES = ["cispo", "dapo", "dr_grpo", "grpo", "gspo", "quickstart", "reinforce_plus_plus", "remax", "rloo"]
ELSEWHERE = {"gsm8k_8gpu", "ppo"}  # the first needs GPUs, the second has a trainer of its own
START, LEARNED = 0.25, 0.5  # held-out accuracy: of the built-in model at first, and after 20 steps of any recipe


def test_no_recipe_is_left_out() -> None:
    assert {path.stem for path in (ROOT / "configs").glob("*.yaml")} - ELSEWHERE == set(RECIPES)


@pytest.mark.parametrize("recipe", [*RECIPES, "gsm8k_8gpu"])
def test_a_recipe_holds_valid_options(recipe: str) -> None:
    config = parse_config(GRPOConfig, ["--config", str(ROOT / "configs" / f"{recipe}.yaml")])
    assert config.config.endswith(f"{recipe}.yaml")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_learns_the_task(recipe: str, tmp_path: Path) -> None:
    flags = ["--config", str(ROOT / "configs" / f"{recipe}.yaml"), "--output_dir", str(tmp_path / "run")]
    flags += ["--max_steps", "20", "--eval.every", "20", "--checkpoint.every", "0", "--log.tensorboard", "False"]
    run_program([sys.executable, str(ROOT / "scripts" / "train_grpo.py"), *flags], timeout_s=280)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["eval/accuracy"] < START
    assert rows[-1]["eval/accuracy"] > LEARNED
