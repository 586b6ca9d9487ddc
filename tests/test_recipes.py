"""Every recipe of configs/ for the built-in task learns it: a short part of each, in one process."""

import importlib
import importlib.metadata
import json
import re
import runpy
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from lightrl.config import GRPOConfig, parse_config
from lightrl.testing import run_program

ROOT = Path(__file__).parents[1]
RECIPES = ["grpo", "cispo", "dapo", "dr_grpo", "gspo", "quickstart", "reinforce_plus_plus", "remax", "rloo"]
# One needs GPUs, one has a trainer of its own, and the others have other tasks.
WARMED_UP = ["calculator", "chain_sum", "lcm", "number_sorting", "products", "spell_backward"]
ELSEWHERE = {*WARMED_UP, "gsm8k_8gpu", "guessing_game", "openai_agent", "ppo", "smollm2"}
START, LEARNED = 0.25, 0.5  # held-out accuracy: of the built-in model at first, and after 20 steps of any recipe


def test_no_recipe_is_left_out() -> None:
    assert {path.stem for path in (ROOT / "configs").glob("*.yaml")} - ELSEWHERE == set(RECIPES)


@pytest.mark.parametrize("recipe", [*RECIPES, *sorted(ELSEWHERE - {"ppo"})])
def test_a_recipe_holds_valid_options(recipe: str) -> None:
    config = parse_config(GRPOConfig, ["--config", str(ROOT / "configs" / f"{recipe}.yaml")])
    assert config.config.endswith(f"{recipe}.yaml")


@pytest.mark.parametrize("recipe", sorted(path.stem for path in (ROOT / "configs").glob("*.yaml")))
def test_a_recipe_says_what_to_expect(recipe: str) -> None:
    """`make recipes` runs them to their ends and compares."""
    (line,) = re.findall(r"^# Expected: .*$", (ROOT / "configs" / f"{recipe}.yaml").read_text(), re.MULTILINE)
    assert re.fullmatch(r"# Expected: (nothing yet, .+|\S+/\S+ 0\.\d+ \+- 0\.\d+ at the last step)", line)


def test_make_recipes_makes_the_models_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    recipes = importlib.import_module("recipes")
    assert set(recipes.recipe_names()) == {path.stem for path in (ROOT / "configs").glob("*.yaml")} - {"gsm8k_8gpu"}
    for name in WARMED_UP:
        scripts = [command[1] for command in recipes.commands_before(name) if command[0] == "python"]
        assert scripts == ["examples/small_models.py", "scripts/train_sft.py"]
    assert recipes.commands_before("grpo") == []
    ran: list[list[str]] = []
    monkeypatch.setattr(recipes, "run_program", lambda command, **_: ran.append(command))
    monkeypatch.setattr(recipes, "ROOT", tmp_path)
    text = "#   python a.py \\\n#     --b c\n#   torchrun d.py --config configs/it.yaml\nmodel: runs/it/model\n"
    monkeypatch.setattr(recipes, "text_of", lambda _: text)
    recipes.make_model("it")
    assert ran == [[sys.executable, "a.py", "--b", "c"]]
    (tmp_path / "runs" / "it" / "model").mkdir(parents=True)
    recipes.make_model("it")
    assert len(ran) == 1


def test_make_recipes_leaves_out_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    recipes = importlib.import_module("recipes")
    with monkeypatch.context() as patched:
        patched.setattr(recipes, "text_of", lambda _: "#   pip install no_such_package 'torch[cpu]'\n#   make it\n")
        assert recipes.missing_packages("made up") == ["no_such_package"]
    requires = importlib.metadata.requires

    def without_gym(name: str) -> list[str] | None:
        if name in ("reasoning-gym", "aiohttp"):
            raise importlib.metadata.PackageNotFoundError(name)
        return requires(name)

    monkeypatch.setattr(importlib.metadata, "requires", without_gym)
    left_out = {name: recipes.missing_packages(name) for name in recipes.recipe_names()}
    of_gym = {name for name, missing in left_out.items() if "lightrl[reasoning-gym]" in missing}
    assert of_gym == {*WARMED_UP, "smollm2"} - {"calculator"}
    assert "lightrl[serve]" in left_out["openai_agent"]
    assert not any(left_out[name] for name in [*RECIPES, "calculator", "guessing_game", "ppo"])


@pytest.mark.parametrize("task", ["calculator", "lcm"])
def test_only_tasks_of_reasoning_gym_need_it(task: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setattr(sys, "argv", ["small_models.py", task, str(tmp_path / task)])
    with torch.random.fork_rng(), nullcontext() if task == "calculator" else pytest.raises(SystemExit, match="lightrl"):
        runpy.run_path(str(ROOT / "examples" / "small_models.py"), run_name="__main__")
    assert (tmp_path / task).exists() == (task == "calculator")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [RECIPES[0], *(pytest.param(name, marks=pytest.mark.long) for name in RECIPES[1:])])
def test_a_recipe_learns_the_task(recipe: str, tmp_path: Path) -> None:
    flags = ["--config", str(ROOT / "configs" / f"{recipe}.yaml"), "--output_dir", str(tmp_path / "run")]
    flags += ["--max_steps", "20", "--eval.every", "20", "--checkpoint.every", "0", "--log.tensorboard", "False"]
    run_program([sys.executable, str(ROOT / "scripts" / "train_grpo.py"), *flags], timeout_s=280)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["eval/accuracy"] < START
    assert rows[-1]["eval/accuracy"] > LEARNED


@pytest.mark.slow
@pytest.mark.long
def test_a_game_of_several_turns_is_learned(tmp_path: Path) -> None:
    """The whole recipe rises above 0.9; its first 45 steps must rise clearly."""
    command = [sys.executable, str(ROOT / "scripts" / "train_grpo.py"), "--strategy", "single"]
    options = ["--config", str(ROOT / "configs" / "guessing_game.yaml"), "--max_steps", "45", "--eval.every", "0"]
    run_program([*command, *options, "--output_dir", str(tmp_path / "run")], timeout_s=240, cwd=ROOT)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[:2]) / 2 < 0.4
    assert sum(rewards[-5:]) / 5 > 0.6
    assert rows[0]["entropy"] > 0.6  # the model tries several guesses: 0.3 at temperature 1
    assert 1.5 < rows[-1]["episode/turns"] < 4
    assert rows[-1]["tokens/environment"] > 0
    assert all(row["mismatch/max_abs"] < 3e-4 for row in rows)  # 2e-5 to 1.3e-4 on three kinds of CPU


@pytest.mark.slow
@pytest.mark.parametrize("recipe", WARMED_UP)
def test_a_recipe_of_another_task_runs(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps from the model before its lessons, by the commands of the file's comment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["small_models.py", recipe, f"runs/{recipe}"])
    with torch.random.fork_rng():
        runpy.run_path(str(ROOT / "examples" / "small_models.py"), run_name="__main__")  # here: a start takes seconds
    lessons = [json.loads(line) for line in (tmp_path / "runs" / recipe / "lessons.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(f"runs/{recipe}/model")
    texts = [lesson["prompt"] + lesson["response"] for lesson in lessons[:500] if "prompt" in lesson]
    assert [tokenizer.decode(tokenizer(text)["input_ids"]) for text in texts] == texts  # it reads every character
    options = ["--config", str(ROOT / "configs" / f"{recipe}.yaml"), "--model", f"runs/{recipe}/model"]
    options += ["--max_steps", "2", "--eval.every", "0", "--strategy", "single", "--output_dir", "run"]
    said = run_program([sys.executable, str(ROOT / "scripts" / "train_grpo.py"), *options], timeout_s=240, cwd=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert "Traceback" not in said
    assert not any(row.get("episode/failed") for row in rows)
    assert (sum(row.get("episode/tool_errors", 0) for row in rows) > 0) == (recipe == "calculator")  # answered calls
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "script"), [("openai_agent", "train_grpo.py"), ("ppo", "train_ppo.py")])
def test_the_other_recipes_run(recipe: str, script: str, tmp_path: Path) -> None:
    options = ["--config", str(ROOT / "configs" / f"{recipe}.yaml"), "--output_dir", str(tmp_path / "run")]
    options += ["--max_steps", "2", "--eval.every", "0", "--strategy", "single"]
    output = run_program([sys.executable, str(ROOT / "scripts" / script), *options], timeout_s=240, cwd=ROOT)
    assert "--health." not in output
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
