"""Every line of a shell block is run by a test, or a table says why none can; commands in sentences exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import test_doc_programs
import test_doc_runs
import test_tutorial
from test_doc_blocks import BLOCK, CONFIGS, PLAN, PROGRAM, ROOT, SHELL, blocks, shell_lines, unknown_options, words_of
from torch.distributed.run import get_args_parser

from lightrl.config import option_names
from lightrl.doctor.report import DoctorConfig
from lightrl.plan.command import PlanConfig
from lightrl.programs import COMMANDS
from lightrl.testing import run_spmd
from lightrl.trainers import harness_run

PAGES = [ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))

# Lines, by their beginning, that other tests run with stand-ins for what they would install or start.
ELSEWHERE = {
    "bash scripts/quickstart.sh": "tests/test_two_commands.py",
    "bash scripts/test.sh": "tests/test_two_commands.py",
    "bash scripts/setup_env.sh": "tests/test_setup_env.py",
    "bash scripts/launch_node.sh": "tests/test_launch_node.py",
    "sbatch scripts/slurm_requeue.sbatch": "tests/test_clusters.py",
    "export JUDGE_KEY": "tests/test_doc_runs.py",
    "curl -X POST http://127.0.0.1:8100/v1/episodes": "tests/test_doc_episodes.py",
}
# Lines that no test can run.
NOT_RUN = {
    "pip install": "asks a package index; test_doc_programs.py looks for the extras",
    "python3.11 -m venv .venv-sglang": "SGLang's environment: scripts/test_sglang.sh makes the same for its tests",
    ".venv-sglang/bin/pip install": "the same",
    ".venv-sglang/bin/torchrun": "needs that environment: tests/engines/real_sglang runs there",
    "docker ": "fetches an image; test_clusters.py has the linter read the file",
    "kubectl apply": "needs a cluster; test_clusters.py checks the file by Kubernetes' own schemas",
    "sky launch": "needs an account; test_clusters.py runs the script that is in the file",
    "vllm serve": "another project's server; tests/engines loads the same folders in vLLM",
    "source .venv/bin/activate": "changes the reader's own shell",
    "py-spy dump": "another project's program, which not every machine lets look into a process",
}
INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
BENCHMARK = re.compile(r"python (benchmarks/\w+\.py)")


def lines(page: Path) -> Iterator[str]:
    for text in blocks(page, *SHELL):
        yield from shell_lines(text)


ALL_LINES = {line: page for page in PAGES for line in lines(page)}


# ---- Lines that are run here


def make_knows_it(line: str, folder: Path) -> None:
    done = subprocess.run(["make", "-n", *words_of(line)[1:]], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert not done.returncode, done.stderr


def has_these_tests(line: str, folder: Path) -> None:
    """They are part of the suite themselves."""
    words = words_of(line)
    chosen = words[words.index("-k") + 1] if "-k" in words else ""
    paths = [ROOT / word for word in words if word.startswith("tests/")]
    assert paths
    for path in paths:
        files = [path] if path.is_file() else [*path.rglob("test_*.py")]
        assert any(re.search(rf"def test_\w*{chosen}", file.read_text()) for file in files), path


def two_ranks_are_examined(line: str, folder: Path) -> None:
    given = [word.replace("/data/runs", str(folder)) for word in line.partition("lightrl.doctor")[2].split()]
    assert "all 2 ranks together" in run_spmd("lightrl.doctor", *words_of(" ".join(given)), world_size=2, cwd=ROOT)


def torchrun_takes_it(line: str, folder: Path) -> None:
    get_args_parser().parse_args([*words_of(line)[1:], "program.py"])


def torchrun_reads_it(line: str, folder: Path) -> None:
    given = dict(word.split("=", 1) for word in words_of(line)[1:])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in given.items():
            patch.setenv(name, value)
        options = vars(get_args_parser().parse_args(["program.py"]))
    read = {name: str(options[name.removeprefix("PET_").lower()]) for name in given}
    assert read == given


def torch_reads_it(line: str, folder: Path) -> None:
    """Each line of a rank begins with what the variable says."""
    name, _, value = words_of(line)[1].partition("=")
    variables = {name: value, "PET_TEE": "3", "PET_LOG_DIR": str(folder / "logs")}
    (folder / "program.py").write_text("print('here')")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "program.py"]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120, check=True
    )
    assert {"[rank 0] here", "[rank 1] here"} <= set(done.stdout.splitlines())
    assert [path.read_text() for path in (folder / "logs").rglob("stdout.log")] == ["here\n", "here\n"]


def the_harness_is_next(line: str, folder: Path) -> None:
    """Only the package is missing, which test_harness_run.py has where it is installed."""
    (folder / "my_tasks").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setitem(sys.modules, "lm_eval", None)
        with pytest.raises(SystemExit):
            harness_run.main(words_of(line)[2:])


RUN: dict[str, Callable[[str, Path], None]] = {
    "make ": make_knows_it,
    ".venv/bin/python -m pytest ": has_these_tests,
    "OMP_NUM_THREADS=1 .venv/bin/python -m pytest ": has_these_tests,
    "torchrun --signals_to_handle ": torchrun_takes_it,
    "torchrun --nproc_per_node 8 -m lightrl.doctor": two_ranks_are_examined,
    "lightrl lm-eval ": the_harness_is_next,
    "export PET_": torchrun_reads_it,
    "export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE=": torch_reads_it,
}


def begins(line: str, table: Iterable[str]) -> bool:
    return any(line.startswith(begin) for begin in table)


def parameters() -> Iterator[Any]:
    for line in ALL_LINES:
        if begins(line, RUN):
            marks = [pytest.mark.long, pytest.mark.slow] if "lightrl.doctor" in line else []
            yield pytest.param(line, marks=marks)


@pytest.mark.parametrize("line", parameters())
def test_a_line_does_what_it_says(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (check,) = (check for begin, check in RUN.items() if line.startswith(begin))
    check(line, tmp_path)
    if check is the_harness_is_next:
        assert "needs lm_eval" in capsys.readouterr().err


# ---- No line is left out


def run_by_others() -> set[str]:
    """The lines that the other tests of pages start."""
    found = {step.code.strip() for step in test_tutorial.steps() if not step.file}
    of_tutorial = {line for code in found for line in shell_lines(code)}
    trained = {case.line for page in test_doc_runs.PAGES for case in test_doc_runs.cases(page)}
    return of_tutorial | trained | {line for page in test_doc_programs.PAGES for line in test_doc_programs.lines(page)}


def unproven(all_lines: Iterable[str]) -> list[str]:
    others = run_by_others()
    return [
        line
        for line in all_lines
        if line not in others
        and not begins(line, [*RUN, *ELSEWHERE, *NOT_RUN])
        and not any(part in line for part in test_doc_runs.NOT_RUN)
    ]


def test_every_shell_line_is_run_or_has_a_reason() -> None:
    assert unproven(ALL_LINES) == []


def test_a_line_that_nothing_runs_is_found() -> None:
    assert unproven(["make check", "lightrl hash RUN --fast", "rm -r runs"]) == [
        "lightrl hash RUN --fast",
        "rm -r runs",
    ]


def test_every_entry_of_the_tables_is_of_a_line() -> None:
    assert [
        begin for begin in [*RUN, *ELSEWHERE, *NOT_RUN] if not any(begins(line, [begin]) for line in ALL_LINES)
    ] == []
    assert [part for part in test_doc_runs.NOT_RUN if not any(part in line for line in ALL_LINES)] == []


@pytest.mark.parametrize("begin", ELSEWHERE)
def test_the_other_test_knows_the_line(begin: str) -> None:
    assert begin.split("/")[-1].split()[-1] in (ROOT / ELSEWHERE[begin]).read_text()


# ---- Commands in sentences


def not_there(span: str) -> list[str]:
    """What a command within a sentence names and nothing has: commands of lightrl, options of it and of benchmarks."""
    span = re.sub(r"^train_", "scripts/train_", span)
    if PROGRAM.search(span) or PLAN.search(span):
        return unknown_options(span)
    words = span.split()
    if words[0] == "lightrl" and len(words) > 1:
        return [] if words[1] in {*COMMANDS, "--version", "--help"} else [words[1]]
    if found := BENCHMARK.match(span):
        source = (ROOT / found[1]).read_text()
        return [word for word in words if word.startswith("--") and f'"{word}"' not in source]
    return []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_in_sentences_name_what_there_is(page: Path) -> None:
    spans = (" ".join(span.split()) for span in INLINE.findall(BLOCK.sub("", page.read_text())))
    assert {span: missing for span in spans if span and (missing := not_there(span))} == {}


def test_a_wrong_command_in_a_sentence_is_found() -> None:
    assert not_there("lightrl watch RUN") == ["watch"]
    assert not_there("python benchmarks/decode.py --fast") == ["--fast"]
    assert not_there("train_grpo.py --modl final") == ["--modl"]
    assert not_there("lightrl train grpo --modl final") == ["--modl"]


OPTION = re.compile(r"(?:^|(?<= ))--([A-Za-z][\w.-]*)")
OF_OTHERS = {"collect-only", "logdir"}  # pytest, TensorBoard
NAMES_OTHERS = ("docs/adr/", "docs/coming_from.md", "docs/log.md")  # what was, and options of other trainers


@cache
def known_options() -> set[str]:
    """The options of all programs of the repository, and of torchrun; those of a section may be meant together."""
    configs = [*CONFIGS.values(), PlanConfig, DoctorConfig]
    known = {name for config in configs for name in option_names(config)} | {"help", "help-all"}
    for folder, suffix, written in (
        ("lightrl", "py", r'"--([a-z][\w-]*)"'),  # as argparse has them
        ("benchmarks", "py", r'"--([a-z][\w-]*)"'),
        ("scripts", "sh", r" --([a-z][\w-]*)"),
    ):
        for path in (ROOT / folder).rglob(f"*.{suffix}"):
            known |= set(re.findall(written, path.read_text()))
    known |= {word.lstrip("-") for action in get_args_parser()._actions for word in action.option_strings}
    sections = {name[: place + 1] for name in known for place, letter in enumerate(name) if letter == "."}
    return known | sections | {section[:-1] for section in sections} | OF_OTHERS


def unknown_in_sentences(text: str) -> set[str]:
    spans = (" ".join(span.split()) for span in INLINE.findall(BLOCK.sub("", text)))
    return {name for span in spans for name in OPTION.findall(span)} - known_options()


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if not page.relative_to(ROOT).as_posix().startswith(NAMES_OTHERS)],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_options_in_sentences_exist(page: Path) -> None:
    assert unknown_in_sentences(page.read_text()) == set()


def test_a_wrong_option_in_a_sentence_is_found() -> None:
    text = "`--eval.nn 8`, `--eval.n`, `--native.*`, `lightrl replay RUN --step 3`, `--stepp`\n```\n--code\n```\n"
    assert unknown_in_sentences(text) == {"eval.nn", "stepp"}
