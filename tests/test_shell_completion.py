"""What a shell completes, by bash itself."""

import shutil
import subprocess

import pytest

from lightrl.config import option_names
from lightrl.doctor.report import DoctorConfig
from lightrl.plan.command import PlanConfig
from lightrl.programs import COMMANDS, Run
from lightrl.report import program as report_program
from lightrl.shell_completion import _OWN_OPTIONS, main
from lightrl.trainers import export_run, harness_run, recorded_run


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("lightrl tr", "train"),
        ("lightrl train ", "grpo ppo sft rm dpo"),
        ("lightrl train grpo --rollout.ov", "--rollout.over_issue"),
        ("lightrl train ppo --critic_mo", "--critic_model"),
        ("lightrl train sft --rollout.ov", ""),
        ("lightrl evaluate --eval.k", "--eval.k"),
        ("lightrl evaluate --config ru", ""),
        ("lightrl report ru", ""),
        ("lightrl report --w", "--watch"),
        ("lightrl export RUN --hub", "--hub.push"),
        ("lightrl replay RUN --deb", "--debug"),
        ("lightrl replay RUN --critic_mo", "--critic_model"),
        ("lightrl plan ", "grpo ppo sft rm dpo"),
        ("lightrl plan grpo --rollout.ov", "--rollout.over_issue"),
        ("lightrl plan sft --device_", "--device_memory"),
        ("lightrl plan sft --rollout.ov", ""),
        ("lightrl completion ", "bash zsh"),
    ],
)
def test_bash_completes_commands_and_options(words: str, completed: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["bash"])
    typed = words.split(" ")
    script = f"{capsys.readouterr().out}\nCOMP_WORDS=({' '.join(repr(word) for word in typed)})\n"
    script += f'COMP_CWORD={len(typed) - 1}\n_lightrl\necho "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == f"{completed}\n"


def test_no_command_lacks_its_options() -> None:
    read = {"doctor": option_names(DoctorConfig), "plan": option_names(PlanConfig), "hash": []}
    modules = {"export": export_run, "lm-eval": harness_run, "replay": recorded_run, "report": report_program}
    for name, module in modules.items():
        flags = [flag for action in module._parser()._actions for flag in action.option_strings]
        read[name] = [flag.removeprefix("--") for flag in flags if flag not in ("-h", "--help")]
    assert {name: words.split() for name, words in _OWN_OPTIONS.items()} == read
    starts_others = {"train", "completion"}
    assert {name for name, command in COMMANDS.items() if not isinstance(command, Run)} - starts_others == set(read)


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_paths_are_completed_where_no_word_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    main(["bash"])
    script = f"{capsys.readouterr().out}\ncomplete -p lightrl"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "complete -o default -F _lightrl lightrl\n"


def test_zsh_runs_the_completion_of_bash(capsys: pytest.CaptureFixture[str]) -> None:
    main(["bash"])
    bash = capsys.readouterr().out
    main(["zsh"])
    assert capsys.readouterr().out == f"autoload -U +X bashcompinit && bashcompinit\n{bash}"


@pytest.mark.parametrize("words", [[], ["fish"]])
def test_another_shell_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert "choose bash or zsh" in capsys.readouterr().err
