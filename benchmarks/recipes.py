"""Runs the recipes of configs/ and compares each with the result that its file expects; exits with 1 on a miss.

    make recipes
    python benchmarks/recipes.py [--recipes grpo dapo ...] [--seed 0]

The model of a recipe that has its own is made once beforehand, in runs/, with the commands in the comment of its file.
A recipe whose packages are not installed is left out, and the output says so. Prints the table of docs/recipes.md.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement

from lightrl.testing import run_program

ROOT = Path(__file__).resolve().parents[1]
EXPECTED = re.compile(r"^# Expected: (\S+) ([\d.]+) \+- ([\d.]+) at the last step$", re.MULTILINE)
OWN_MODEL = re.compile(r"^model: (runs/\S+)$", re.MULTILINE)


class Expected(NamedTuple):
    """What a recipe reaches at its last step, by its own account."""

    metric: str
    value: float
    tolerance: float

    def is_met(self, value: float) -> bool:
        """More than expected is welcome."""
        return value >= self.value - self.tolerance


def text_of(recipe: str) -> str:
    return (ROOT / "configs" / f"{recipe}.yaml").read_text()


def expected_of(recipe: str) -> Expected | None:
    """What the file expects; None for a recipe that nobody has run to its end."""
    found = EXPECTED.search(text_of(recipe))
    return Expected(found[1], float(found[2]), float(found[3])) if found else None


def recipe_names() -> list[str]:
    """Names of the recipes with an expected result."""
    return [name for path in sorted((ROOT / "configs").glob("*.yaml")) if expected_of(name := path.stem)]


def commands_before(recipe: str) -> list[list[str]]:
    """Returns the commands of the file's comment up to the one that trains by the recipe."""
    lines = re.findall(r"^#   (.*)$", text_of(recipe).replace("\\\n#", ""), re.MULTILINE)
    words = [shlex.split(line) for line in lines]
    return [command for command in words if f"configs/{recipe}.yaml" not in command]


def missing_packages(recipe: str) -> list[str]:
    """Returns what the comment asks to be installed and is not."""
    wanted = [word for command in commands_before(recipe) if command[0] == "pip" for word in command[2:]]
    return [word for word in wanted if not is_installed(Requirement(word))]


def is_installed(wanted: Requirement) -> bool:
    """Returns whether a package is installed, with the packages that its named extras ask for."""
    try:
        needed = [Requirement(text) for text in importlib.metadata.requires(wanted.name) or ()]
    except importlib.metadata.PackageNotFoundError:
        return False
    asked = [one for one in needed if one.marker and not one.marker.evaluate({"extra": ""})]
    extra = [one for one in asked if one.marker and any(one.marker.evaluate({"extra": name}) for name in wanted.extras)]
    return all(map(is_installed, extra))


def make_model(recipe: str) -> None:
    """Makes the model that the recipe starts from, unless it is there or the recipe has none of its own."""
    model = OWN_MODEL.search(text_of(recipe))
    if model is None or (ROOT / model[1]).exists():
        return
    for python, *words in commands_before(recipe):
        if python == "python":
            run_program([sys.executable, *words], timeout_s=1800, env=environment(), cwd=ROOT)


def environment() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def rows_of(recipe: str, seed: int) -> list[dict[str, Any]]:
    """Returns what the run logged at each step."""
    script = ROOT / "scripts" / f"train_{'ppo' if recipe.startswith('ppo') else 'grpo'}.py"
    with tempfile.TemporaryDirectory() as name:
        flags = ["--config", str(ROOT / "configs" / f"{recipe}.yaml"), "--output_dir", f"{name}/run"]
        flags += ["--seed", str(seed), "--checkpoint.every", "0", "--log.tensorboard", "False"]
        run_program([sys.executable, str(script), *flags], timeout_s=3600, env=environment(), cwd=ROOT)
        return [json.loads(line) for line in (Path(name) / "run" / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--recipes",
        nargs="+",
        default=recipe_names(),
        help="names of files in configs/ (default: all that expect a result)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the runs (default: %(default)s)")
    arguments = parser.parse_args()
    print("| recipe | steps | samples | metric | before | by half-way | after | expected |")
    print("|---|---|---|---|---|---|---|---|")
    missed = []
    for recipe in arguments.recipes:
        expected = expected_of(recipe)
        if expected is None:
            raise SystemExit(f"configs/{recipe}.yaml expects no result, so there is nothing to compare with.")
        if packages := missing_packages(recipe):
            print(f"{recipe} is left out: pip install {' '.join(packages)}", file=sys.stderr, flush=True)
            continue
        make_model(recipe)
        rows = rows_of(recipe, arguments.seed)
        values = {row["step"]: row[expected.metric] for row in rows if expected.metric in row}
        steps = [row for row in rows if row["step"]]
        half = max((step for step in values if step <= len(steps) / 2), default=min(values))
        samples = sum(row["tokens/response"] / row["tokens/response_mean"] for row in steps)
        last = values[len(steps)]
        cells = [recipe, str(len(steps)), f"{samples:,.0f}", expected.metric]
        cells += [f"{value:.3f}" for value in (values[min(values)], values[half], last)]
        verdict = "met" if expected.is_met(last) else "MISSED"
        print(f"| {' | '.join(cells)} | {expected.value:g} +- {expected.tolerance:g}: {verdict} |", flush=True)
        missed += [] if expected.is_met(last) else [recipe]
    if missed:
        raise SystemExit(f"below what they expect: {', '.join(missed)}")


if __name__ == "__main__":
    main()
