"""The programs behind scripts/, `lightrl` and `python -m lightrl.train`."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from lightrl import programs
from lightrl.config import GRPOConfig
from lightrl.programs import COMMANDS, TRAINERS, Command, main, start, train

ROOT = Path(__file__).parents[1]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Names of the trainers that were started, each with its num_prompts or batch_size."""
    found: list[tuple[str, int]] = []

    def run_trainer(trainer: type, config: object) -> None:
        found.append((trainer.__name__, getattr(config, "num_prompts", 0) or getattr(config, "batch_size", 0)))

    monkeypatch.setattr("lightrl.trainers.fit.run_trainer", run_trainer)
    return found


def test_every_name_starts_its_trainer(started: list[tuple[str, int]]) -> None:
    main(["train", "grpo", "--num_prompts", "3"])
    train(["ppo", "--num_prompts", "4"])
    for name in ("sft", "rm", "dpo"):
        start(name, ["--batch_size", "5"])
    main(["evaluate"])
    trainers = ["GRPOTrainer", "PPOTrainer", "SFTTrainer", "RMTrainer", "DPOTrainer", "Evaluator"]
    assert [name for name, _ in started] == trainers
    assert [size for _, size in started][:5] == [3, 4, 5, 5, 5]


@pytest.mark.parametrize(
    ("words", "code", "wanted"),
    [
        ([], 0, "usage: lightrl NAME [ARGUMENTS]"),
        (["--help"], 0, "train Train: lightrl train grpo|ppo|sft|rm|dpo [OPTIONS]."),
        (["--version"], 0, "lightrl 0."),
        (["train"], 0, "usage: lightrl train NAME [ARGUMENTS]"),
        (["train", "grpo", "--help"], 0, "usage: lightrl train grpo [OPTIONS]"),
        (["tain"], 2, "error: lightrl tain: there is no such command. Did you mean train"),
        (["train", "gpro"], 2, "error: lightrl train gpro: there is no such command. Did you mean grpo"),
        (["hash", "/nowhere"], 2, "error: "),
        (["hash"], 2, "Usage: hash RUN"),
        (["train", "grpo", "--lr", "-1"], 2, "--lr is -1.0: it must be "),
    ],
)
def test_help_and_mistakes(words: list[str], code: int, wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        ended = main(words)
    except SystemExit as end:
        ended = int(end.code or 0)
    said = capsys.readouterr()
    assert ended == code
    assert wanted in " ".join(f"{said.out} {said.err}".split()).replace("\u2502 ", "")


@pytest.mark.parametrize("name", ["hash", "replay"])
def test_a_script_ends_with_the_code_of_its_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightrl.programs.start", lambda name: 1)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "scripts" / f"{name}.py"), run_name="__main__")
    assert end.value.code == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        ended = main([name, "--help"])
    except SystemExit as end:
        ended = int(end.code or 0)
    said = capsys.readouterr()
    assert (ended, said.err) == (0, "")
    assert said.out.startswith(f"usage: lightrl {name} ")
    assert len(said.out.split()) > 20


def test_every_program_says_what_it_does_and_can_be_loaded() -> None:
    for program in [*TRAINERS.values(), *COMMANDS.values()]:
        assert program.summary.endswith(".")
        module, _, name = (program.start if isinstance(program, Command) else program.trainer).partition(":")
        assert f"{name}" in (ROOT / f"{module.replace('.', '/')}.py").read_text()
    assert TRAINERS["grpo"].config is GRPOConfig


def test_the_modules_are_programs_and_load_no_torch_for_help() -> None:
    for words in (["lightrl", "train"], ["lightrl.train"]):
        program = "import runpy, sys\nsys.argv = ['x', *sys.argv[2:], 'grpo', '--help']\n"
        program += f"try:\n    runpy.run_module({words[0]!r}, run_name='__main__', alter_sys=False)\n"
        program += "except SystemExit:\n    print('torch' in sys.modules)\n"
        done = subprocess.run(
            [sys.executable, "-c", program, "", *words[1:]], capture_output=True, text=True, timeout=60, cwd=ROOT
        )
        assert done.stdout.startswith("usage: "), done.stderr
        assert done.stdout.endswith("\nFalse\n")


@pytest.mark.parametrize("words", [["train", "grpo"], ["hash", "/nowhere"]])
def test_ctrl_c_while_modules_are_imported_is_told_in_a_line(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> object:
        if name == "lightrl.programs:train":
            return train
        raise KeyboardInterrupt

    monkeypatch.setattr(programs, "resolve_name", interrupted)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 130
    assert capsys.readouterr().err == "[rank 1] interrupted\n"


def test_ctrl_c_while_the_options_are_imported_is_told_in_a_line() -> None:
    program = (
        "import sys\n"
        "class CtrlC:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'lightrl.config':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, CtrlC())\n"
        "import lightrl.programs\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
