"""The commands of the pages that read a run's folder, or only a config, are run on runs of a tiny model."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub, running_hub
from test_doc_blocks import BLOCK, PAGES, ROOT, SHELL, blocks, shell_lines, words_of

from lightrl.builtin.model import tiny_model
from lightrl.testing import run_program, run_spmd

PROGRAM = re.compile(r"^(?:lightrl|python scripts/)\s*(?P<name>report|export|hash|replay|plan)(?:\.py)?\s")
KNOWN_MODELS = {"Qwen/Qwen2.5-7B": "benchmarks/models/qwen2.5-7b.json"}  # what a plan would read from the hub
SCRIPT = ROOT / "scripts" / "train_grpo.py"


def lines(page: Path) -> Iterator[str]:
    for text in blocks(page, *SHELL):
        yield from (line for line in shell_lines(text) if PROGRAM.match(line))


def commands(page: Path) -> Iterator[list[str]]:
    for line in lines(page):
        found = PROGRAM.match(line)
        assert found is not None
        yield [found["name"], *words_of(line[found.end() :])]


WITH_COMMANDS = [page for page in PAGES if list(commands(page))]


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("toy")
    model, tokenizer = tiny_model()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) for a in range(3) for b in range(3)]
    (folder / "train.jsonl").write_text("\n".join(rows) + "\n")
    made = ["--model", str(folder / "model"), "--train_data", str(folder / "train.jsonl"), "--num_prompts", "4"]
    return [*made, "--group_size", "2", "--max_steps", "3", "--checkpoint.every", "1", "--eval.every"]  # and a number


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with running_hub(monkeypatch) as server:
        yield server


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.stem)
def test_commands_that_read_a_run_do_what_they_say(page: Path, flags: list[str], tmp_path: Path, hub: FakeHub) -> None:
    run = tmp_path / "made"
    if page.stem == "async":
        run_spmd(
            *(SCRIPT, *flags, "0", "--rollout_ranks", "1", "--rollout.max_staleness", "1", "--output_dir", str(run)),
            world_size=2,
            timeout_s=200,
        )
    else:
        data = flags[flags.index("--train_data") + 1]
        own = {
            "exact": ["0", "--exact", "True"],
            "export": ["3", "--eval_data", data, "--eval.best", "eval/accuracy"],
        }.get(page.stem, ["0"])
        run_program([sys.executable, str(SCRIPT), *flags, *own, "--output_dir", str(run)], timeout_s=200)
    shutil.copytree(ROOT / "benchmarks" / "models", tmp_path / "benchmarks" / "models")
    shutil.copy(run / "config.yaml", tmp_path / "run.yaml")
    for words in commands(page):
        words = [_here(word) for word in words]
        for place, word in enumerate(words):
            if word.startswith("runs/") and words[place - 1] != "--output_dir":
                target = tmp_path / Path(*Path(word).parts[:2])
                if not target.exists():
                    shutil.copytree(run, target)
            elif words[place - 1] == "--step":
                words[place] = "2"
        done = subprocess.run(
            [sys.executable, "-m", "lightrl", *words],
            input="continue\n" * 3,  # for --debug
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"},
            capture_output=True,
            text=True,
            timeout=200,
        )
        allowed = (0, 1) if words[0] == "plan" else (0,)  # 1: it does not fit
        assert done.returncode in allowed, f"{words}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        assert bool(hub.commits) == ("--hub.push" in words)
        hub.commits.clear()


def _here(word: str) -> str:
    return "runs/it" if word == "RUN" else KNOWN_MODELS.get(word, word)


def test_targets_of_make_and_extras_exist() -> None:
    targets = set(re.findall(r"^([a-z_-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    extras = set(re.findall(r"^([a-z0-9-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        text = page.read_text()
        code = "\n".join(block for _, _, block in BLOCK.findall(text))
        asked = set(re.findall(r"^make ([a-z_-]+)", code, re.MULTILINE)) | set(re.findall(r"`make ([a-z_-]+)", text))
        assert asked <= targets, page
        for listed in re.findall(r"lightrl\[([a-z0-9,-]+)\]", text):
            assert set(listed.split(",")) <= extras, page
