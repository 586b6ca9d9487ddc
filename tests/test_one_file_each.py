"""A strategy, an engine option, an estimator, a reward and a trainer are each added by one new file, and no other."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import yaml

from lightrl.testing import run_program

ROOT = Path(__file__).resolve().parents[1]

STRATEGY = '''
from lightrl.strategy.torch_native import SingleStrategy

class ToyStrategy(SingleStrategy):
    """Reports every model that it prepares."""

    def prepare_model(self, model):
        self.print("toy strategy prepares a model")
        return super().prepare_model(model)
'''

ENGINE_OPTION = '''
from dataclasses import dataclass

from lightrl.config import GRPOConfig
from lightrl.config.options import option
from lightrl.engines.base import create_engine

@dataclass(kw_only=True)
class ToyConfig(GRPOConfig):
    """GRPO's options and one more."""

    engine_volume: int = option(3, at_least=1, resume="free")
    """How often the engine reports itself."""

def loud_engine(*, options, **parts):
    """Makes the native engine."""
    print("toy engine " * options.engine_volume)
    return create_engine("native", options=options, **parts)
'''

ESTIMATOR = '''
from lightrl.algorithms.registry import advantage

@advantage(whiten=True, needs="greedy_baseline", min_group=2)
def toy_estimator(samples, *, scale: float = 1.0):
    """Compares each sample with the greedy response to its prompt."""
    return scale * (samples.rewards - samples.baselines)
'''

REWARD = '''
def toy_reward(sample):
    """Rewards an odd last digit."""
    return float(sample.text.strip()[-1:] in tuple("13579")) + 0.125
'''

TRAINER = '''
from toy_option import ToyConfig

from lightrl.config import parse_config
from lightrl.trainers.grpo import GRPOTrainer
from lightrl.trainers.fit import run_trainer

class Winners(GRPOTrainer):
    """Learns only from responses with a positive advantage."""

    kind = "winners"

    def compute_advantages(self, groups):
        return [item for item in super().compute_advantages(groups) if item.advantage > 0]

if __name__ == "__main__":
    run_trainer(Winners, parse_config(ToyConfig))
'''

FILES = {
    "toy_strategy.py": STRATEGY,
    "toy_option.py": ENGINE_OPTION,
    "toy_estimator.py": ESTIMATOR,
    "toy_reward.py": REWARD,
    "toy_trainer.py": TRAINER,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run(folder: Path, *options: str, expect_failure: bool = False) -> str:
    flags = [
        "--strategy", "toy_strategy:ToyStrategy", "--engine", "toy_option:loud_engine",
        "--reward", "toy_reward.py:toy_reward", "--algorithm.advantage", "toy_estimator:toy_estimator",
        "--algorithm.advantage_args", "scale=2.0", "--num_prompts", "4", "--group_size", "4", "--max_new_tokens", "4",
        "--eval.every", "0", "--log.tensorboard", "False", "--output_dir", "run",
    ]  # fmt: skip
    command = [sys.executable, str(folder / "toy_trainer.py"), *flags, *options]
    path = f"{folder}{os.pathsep}{ROOT}"
    return run_program(command, timeout_s=240, cwd=folder, env={"PYTHONPATH": path}, expect_failure=expect_failure)


@pytest.mark.slow
@pytest.mark.long
def test_five_new_files_make_a_run_of_ones_own(folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (ROOT / "lightrl").rglob("*.py")}
    output = run(folder, "--max_steps", "1", "--engine_volume", "2")
    assert "toy strategy prepares a model" in output
    assert "toy engine toy engine \n" in output
    assert yaml.safe_load((folder / "run" / "config.yaml").read_text())["engine_volume"] == 2
    samples = [json.loads(line) for line in (folder / "run" / "samples.jsonl").read_text().splitlines()]
    assert samples
    assert {sample["reward"] for sample in samples} <= {0.125, 1.125}
    assert all(sample["advantage"] > 0 for sample in samples)

    run(folder, "--max_steps", "2", "--engine_volume", "1")  # a resumed run may change an option that is free
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert before == {path: path.stat().st_mtime_ns for path in (ROOT / "lightrl").rglob("*.py")}


@pytest.mark.slow
def test_their_mistakes_are_reported_like_those_of_built_in_ones(folder: Path) -> None:
    assert "--engine_volume is 0: it must be" in run(folder, "--engine_volume", "0", expect_failure=True)
    few = run(folder, "--group_size", "1", expect_failure=True)
    assert "group_size" in few
    assert "toy_estimator" in few
