"""The code blocks of the pages: shell that bash can read, options that exist, Python that imports what there is."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightrl.config import EvaluateConfig, option_names, parse_config
from lightrl.plan.command import PlanConfig
from lightrl.programs import COMMANDS, TRAINERS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
SHELL = ("", "bash", "sh", "shell", "console")  # what is no shell has another language, such as text
PROGRAM = re.compile(
    r"(?:lightrl\s+(?:train\s+)?|lightrl\.train\s+|scripts/(?:train_)?)(?P<name>grpo|ppo|sft|rm|dpo|evaluate)(?:\.py)?(?=\s|$)"
)
PLAN = re.compile(r"lightrl\s+plan\s+(?P<name>grpo|ppo|sft|rm|dpo)\s")
CONFIGS = {**{name: run.config for name, run in TRAINERS.items()}, "evaluate": EvaluateConfig}


def blocks(page: Path, *languages: str) -> Iterator[str]:
    for indent, language, text in BLOCK.findall(page.read_text()):
        if language in languages:
            yield "\n".join(line.removeprefix(indent) for line in text.splitlines())


def shell_lines(text: str) -> Iterator[str]:
    """The commands of a shell block, joined where they continue or a quotation goes on; no comments."""
    begun = ""
    for line in text.replace("\\\n", " ").splitlines():
        begun += line
        try:
            is_command = bool(shlex.split(begun, comments=True))
        except ValueError:  # a quotation is open
            begun += "\n"
            continue
        if is_command:
            yield begun.strip()
        begun = ""
    assert not begun, f"no end: {begun}"


def commands(page: Path) -> Iterator[str]:
    """Lines of shell blocks that start something of ours."""
    for text in blocks(page, *SHELL):
        yield from (line for line in shell_lines(text) if PROGRAM.search(line) or PLAN.search(line))


def unknown_options(line: str) -> list[str]:
    planned = PLAN.search(line)
    started = planned or PROGRAM.search(line)
    assert started is not None
    known = {name.rstrip("_") for name in option_names(CONFIGS[started["name"]])} | {"help", "help-all"}
    known |= set(option_names(PlanConfig)) if planned else set()
    words = shlex.split(line[started.end() :], comments=True)
    own = [word for word in words if re.match(r"--\w", word)]
    return [word for word in own if word[2:].partition("=")[0] not in known]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_options_in_commands_exist(page: Path) -> None:
    wrong = {line.strip(): found for line in commands(page) if (found := unknown_options(line))}
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_are_understood(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainers' own parser takes every value, and the checks of the options every combination."""
    monkeypatch.chdir(ROOT)  # for --config
    for line in commands(page):
        started = PROGRAM.search(line)
        if started is not None and not PLAN.search(line):
            parse_config(CONFIGS[started["name"]], words_of(line[started.end() :]))


@pytest.mark.parametrize("recipe", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda recipe: recipe.stem)
def test_commands_of_a_recipe_are_understood(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its comment says how to start it, and one with a model of its own how to make that."""
    monkeypatch.chdir(ROOT)
    comment = "\n".join(re.findall(r"^# {3,}(.*)", recipe.read_text(), re.MULTILINE))
    lines = list(shell_lines(comment))
    assert any(f"--config configs/{recipe.name}" in line for line in lines)
    for line in lines:
        if started := PROGRAM.search(line):
            assert unknown_options(line) == []
            parse_config(CONFIGS[started["name"]], words_of(line[started.end() :]))


def words_of(text: str) -> list[str]:
    """The words of a command up to what is the shell's; ... stands for further options."""
    words = shlex.split(text, comments=True)
    end = next((index for index, word in enumerate(words) if word in ("&", "&&", "|", ">", "2>&1")), len(words))
    return [word for word in words[:end] if word != "..."]


def test_a_wrong_value_is_found() -> None:
    with pytest.raises(SystemExit):
        parse_config(CONFIGS["grpo"], words_of("--num_prompts many ... > log"))


def test_a_wrong_option_is_found() -> None:
    assert unknown_options("lightrl train grpo --num_promts 3 --lr=1") == ["--num_promts"]
    assert unknown_options("torchrun --nproc_per_node 2 scripts/train_sft.py --group_size 2") == ["--group_size"]
    assert unknown_options("lightrl plan dpo --ranks 8 --rank 3  # --x") == ["--rank"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_shell_can_be_read(page: Path) -> None:
    for text in blocks(page, "bash", "sh", "shell"):
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=20)
        assert not done.returncode, f"{text}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_can_be_read_and_imports_what_there_is(page: Path) -> None:
    for text in blocks(page, "python", "py"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightrl"):
                module = importlib.import_module(str(node.module))
                missing = [name.name for name in node.names if not hasattr(module, name.name)]
                assert not missing, f"{node.module} has no {missing}"


def test_every_command_is_in_the_pages() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    assert [name for name in COMMANDS if f"lightrl {name}" not in text] == []
