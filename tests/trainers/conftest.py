import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plain_offline import EPS, write_data

from lightrl.builtin.model import tiny_model
from lightrl.config import OptimConfig

Rows = list[dict[str, Any]]

REWARD = '''
def odd_digits(sample):
    """Learnable by a random model: the share of odd digits."""
    return sum(character in "13579" for character in sample.text) / 8
'''


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random model, five prompts and a reward."""
    folder = tmp_path_factory.mktemp("toy")
    model, tokenizer = tiny_model()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    prompts = [("1+2=", "3"), ("12+34=", "46"), ("5+5=", "10"), ("99+9=", "108"), ("7+8=", "15")]
    lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in prompts]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "reward.py").write_text(REWARD)
    return folder


@pytest.fixture(scope="session")
def toy_flags(toy: Path) -> list[str]:
    """The flags of a short run on it."""
    return [
        *("--model", str(toy / "model")),
        *("--train_data", str(toy / "train.jsonl")),
        *("--reward", f"{toy / 'reward.py'}:odd_digits"),
        *("--num_prompts", "4", "--group_size", "4", "--max_steps", "3", "--lr", "1e-3", "--checkpoint.every", "0"),
    ]


@pytest.fixture(scope="session")
def toy_options(toy: Path) -> dict[str, Any]:
    """The options of a run on it in this process, in groups of three."""
    return {
        "model": str(toy / "model"),
        "train_data": str(toy / "train.jsonl"),
        "reward": (f"{toy / 'reward.py'}:odd_digits",),
        "group_size": 3,
        "strategy": "single",
    }


@pytest.fixture
def metrics_of() -> Callable[[Path], Rows]:
    def read(folder: Path) -> Rows:
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    return read


@pytest.fixture(scope="session")
def offline_flags(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """The options of a run of three steps over all of five lines, for sft, rm or dpo."""
    responses, pairs = write_data(tmp_path_factory.mktemp("offline"))

    def of(kind: str) -> dict[str, Any]:
        return {
            "model": str(toy / "model"),
            "train_data": responses if kind == "sft" else pairs,
            "batch_size": 5,
            "max_steps": 3,
            "lr": 1e-2,
            "seed": 3,
            "optim": OptimConfig(eps=EPS),
        }

    return of
