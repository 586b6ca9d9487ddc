"""Runs every command of the pages that trains or evaluates, with all its options, for a step or two on tiny models."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import test_tutorial
from fake_hub import FakeHub, running_hub
from fake_judge import FakeJudge, running_judge
from test_doc_blocks import PAGES, PROGRAM, ROOT, blocks, commands, shell_lines, words_of
from tiny_page_inputs import save_named_model, write_inputs

from lightrl.testing import run_program, run_spmd

NOT_RUN = {
    "--reward examples/http_reward.py": "it asks a service: tests/rewards/test_http_reward.py has one",
    "--engine sglang": "SGLang has an environment of its own: tests/engines/real_sglang runs there",
    "--rollout.workflow verifiers": "verifiers asks for other versions: test_verifiers_environment.py runs with it",
}
NAMED_MODEL = re.compile(r"MODEL|PATH|Qwen/.+")
NEWEST = re.compile(r"runs/([a-z]+)-(?:1|\.\.\.)(?=/)")  # how the pages name the folder of a run before

# Behind the words of the page, where the last value of an option counts: what makes any run short, ...
SHORT = {
    "policy": "--max_steps 1 --max_new_tokens 8",
    "offline": "--max_steps 2 --batch_size 4",
    "evaluate": "--max_new_tokens 8",
}
UNLESS_NAMED = {
    "policy": {"--num_prompts": "2", "--group_size": "2", "--eval.max_prompts": "4"},
    "offline": {"--eval.max_examples": "4"},
    "evaluate": {},
}
# ... and what some need, by a part of the command.
ALSO = {
    "--rollout_ranks 4": "--rollout_ranks 1",
    "--strategy megatron": "--strategy lightrl_megatron_cpu:CpuMegatronStrategy",  # megatron-core wants a GPU
    "--profile 3-5": "--max_steps 3",
    "--export.every 100": "--export.every 1 --max_steps 2",
    "--rollout.max_staleness": "--max_steps 3",
    "reasoning_gym:": "--model MODEL",  # ... is where the reader names one
}
PACKAGES = {"--engine vllm": "vllm", "--strategy megatron": "megatron.core", "reasoning_gym": "reasoning_gym"}
RANKS = {"--megatron.ep_size 4": 4}  # else one, or two where the page has torchrun
# What a run leaves in its folder, and numbers that it reports, if the option did something.
LEAVES = {
    "--profile timeline": "profile/timeline.json",
    "--profile 3-5": "profile/trace-rank-0.json.gz",
    "--export.every": "exports/step-1/config.json",
    "--lora.rank": "final/adapter/adapter_config.json",
    "lightrl evaluate": "evaluation.json",
    "--exact True": "final/weights.sha256",
}
REPORTS = {
    "--eval_data test": "eval/accuracy",
    "--eval.best eval/loss": "eval/loss",
    "--rollout.workflow ": "episode/turns",
    "examples.self_play:": "episode/opponent_right",
    "--teacher_model": "distillation/reverse_kl",
    "--reward math format": "reward/format",
    "--reward math code format": "reward/format",
    "--reward judge": "reward/judge",
    "--rollout.max_staleness": "rollout/staleness_max",
}


@dataclass(frozen=True)
class Case:
    """A command of a page."""

    line: str
    name: str  # of the trainer
    words: tuple[str, ...]  # behind it

    @property
    def kind(self) -> str:
        return {"grpo": "policy", "ppo": "policy", "evaluate": "evaluate"}.get(self.name, "offline")

    @property
    def num_ranks(self) -> int:
        """Returns 0 without torchrun."""
        known = [number for part, number in RANKS.items() if part in self.line]
        return known[0] if known else 2 * ("torchrun" in self.line)


def cases(page: Path) -> Iterator[Case]:
    """The commands of a page; those of the tutorial are run as they are by a test of its own."""
    steps = test_tutorial.steps() if page.stem == "tutorial" else ()
    elsewhere = {line for step in steps if not step.file for line in shell_lines(step.code)}
    for line in commands(page):
        found = PROGRAM.search(line)
        if found is not None and line not in elsewhere and not any(part in line for part in NOT_RUN):
            yield Case(line, found["name"], tuple(words_of(line[found.end() :])))


def is_there(package: str) -> bool:
    with suppress(ModuleNotFoundError):
        return find_spec(package) is not None
    return False


def parameters() -> Iterator[Any]:
    for page in PAGES:
        if lines := "\n".join(case.line for case in cases(page)):
            lacks = [package for part, package in PACKAGES.items() if part in lines and not is_there(package)]
            yield pytest.param(page, id=page.stem, marks=pytest.mark.skipif(bool(lacks), reason=f"without {lacks}"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def judge() -> Iterator[FakeJudge]:
    with running_judge() as server:
        yield server


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with running_hub(monkeypatch) as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a reader has: the repository, and files and modules of their own."""
    for name in ("scripts", "configs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "lightrl_megatron_cpu.py").symlink_to(ROOT / "tests" / "megatron_cpu" / "lightrl_megatron_cpu.py")
    for step in test_tutorial.steps():
        if step.file:
            (tmp_path / step.file).write_text(step.code)
    code = blocks(ROOT / "docs" / "rollouts.md", "python")
    own = [text for text in code if "class TryAgain" in text or "async def play" in text]
    (tmp_path / "my_module.py").write_text("\n\n".join(own))
    screens = [text for text in blocks(ROOT / "docs" / "multimodal.md", "python") if "class Screen" in text]
    (tmp_path / "my_screen.py").write_text("\n\n".join(screens))
    return tmp_path


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", parameters())
def test_commands_train(page: Path, folder: Path, models: Path, judge: FakeJudge, hub: FakeHub) -> None:
    write_inputs(folder, with_images=page.stem == "multimodal")
    for case in cases(page):
        words = words_here(case, models, folder, judge)
        env = {"JUDGE_KEY": "secret"}
        if "--hub.push" in case.line:  # started anew, since the imports read these
            env |= {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        before = runs_in(folder)
        said = run(case, words, folder, env)
        assert "Traceback" not in said, f"{case.line}\n{said}"
        if "--dry_run True" in case.line:
            assert runs_in(folder) == before
        else:
            (made,) = runs_in(folder) - before
            check_run(case, words, made)
        assert ("--hub.push" in case.line) == bool(hub.commits)
        hub.commits.clear()
    assert judge.keys <= {"Bearer secret"}


def runs_in(folder: Path) -> set[Path]:
    return {path for path in (folder / "runs").glob("*") if path.is_dir()}


def words_here(case: Case, models: Path, folder: Path, judge: FakeJudge) -> list[str]:
    """The page's words with the models and folders that are here, and then what makes the run short."""

    def newest(found: re.Match[str]) -> str:
        runs = [path for path in runs_in(folder) if path.name.startswith(f"{found[1]}-")]
        return str(max(runs, key=lambda path: path.stat().st_mtime_ns))

    words = [*case.words, *SHORT[case.kind].split()]
    for name, value in UNLESS_NAMED[case.kind].items():
        words += [] if name in case.words else [name, value]
    for part, more in ALSO.items():
        words += more.split() if part in case.line else []
    for place, word in enumerate(words):
        if NAMED_MODEL.fullmatch(word):
            target = models / word.replace("/", "--")
            words[place] = str(target if target.exists() else save_named_model(word, target))
        else:
            words[place] = NEWEST.sub(newest, word).replace("https://host/v1", judge.url)
    return words


def run(case: Case, words: list[str], folder: Path, env: dict[str, str]) -> str:
    script = str(ROOT / "scripts" / ("evaluate.py" if case.name == "evaluate" else f"train_{case.name}.py"))
    if case.num_ranks:
        start = ["lightrl.train", case.name] if "-m lightrl.train" in case.line else [script]
        return run_spmd(*start, *words, world_size=case.num_ranks, timeout_s=150, cwd=folder, env=env)
    start = [script]
    if case.line.startswith("lightrl "):
        start = ["-m", "lightrl.__main__", *(["train"] if case.name != "evaluate" else []), case.name]
    return run_program([sys.executable, *start, *words], timeout_s=150, cwd=folder, env=env)


def check_run(case: Case, words: list[str], made: Path) -> None:
    for part, file in LEAVES.items():
        assert part not in case.line or (made / file).is_file(), f"{case.line}\nno {file}"
    if case.name == "evaluate":
        return
    last = json.loads((made / "metrics.jsonl").read_text().splitlines()[-1])
    wanted = max(place for place, word in enumerate(words) if word == "--max_steps")
    assert last["step"] == int(words[wanted + 1])
    assert last.get("episode/failed", 0) == 0, case.line
    for part, metric in REPORTS.items():
        assert part not in case.line or metric in last, f"{case.line}\nno {metric} in {sorted(last)}"


@pytest.mark.parametrize("table", [NOT_RUN, ALSO, PACKAGES, RANKS, LEAVES, REPORTS])
def test_every_entry_of_a_table_is_of_a_command(table: dict[str, Any]) -> None:
    lines = [line for page in PAGES for line in commands(page)]
    assert [part for part in table if not any(part in line for line in lines)] == []
