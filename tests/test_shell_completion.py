"""What a shell completes, by bash itself."""

import shutil
import subprocess

import pytest

from lightrl.shell_completion import main


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
    ],
)
def test_bash_completes_commands_and_options(words: str, completed: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["bash"])
    typed = words.split(" ")
    script = f"{capsys.readouterr().out}\nCOMP_WORDS=({' '.join(repr(word) for word in typed)})\n"
    script += f'COMP_CWORD={len(typed) - 1}\n_lightrl\necho "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == f"{completed}\n"


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
