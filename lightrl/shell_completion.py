"""Scripts that complete the commands and options of `lightrl` in a shell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightrl.config import exit_with_user_error, option_names, print_text
from lightrl.programs import COMMANDS, TRAINERS, Run

_HELP = """\
usage: lightrl completion bash|zsh

Print a script that completes the commands and options of lightrl. Add this line to ~/.bashrc, or with zsh to ~/.zshrc:
    source <(lightrl completion bash)"""
_BASH = """\
_lightrl() {{
    local words current=${{COMP_WORDS[COMP_CWORD]}}
    case "${{COMP_WORDS[1]}} ${{COMP_WORDS[2]}}" in
{cases}
        *) words="" ;;
    esac
    [ "$COMP_CWORD" -eq 1 ] && words="{commands}"
    [ "$COMP_CWORD" -eq 2 ] && [ "${{COMP_WORDS[1]}}" = train ] && words="{trainers}"
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _lightrl lightrl"""


def main(arguments: Sequence[str]) -> None:
    """Prints the script for the shell that the argument names."""
    shell = arguments[0] if arguments else ""
    if shell in ("-h", "--help"):
        print_text(_HELP)
        return
    if shell not in ("bash", "zsh"):
        message = f"lightrl completion {shell}: choose bash or zsh, as in: source <(lightrl completion bash)."
        exit_with_user_error(ValueError(message))
    # zsh runs bash's completions after this line.
    print_text("\n".join(["autoload -U +X bashcompinit && bashcompinit"] * (shell == "zsh") + [_script()]))


def _script() -> str:
    cases = [*_cases(TRAINERS, "train {}*"), *_cases(COMMANDS, "{} *")]
    return _BASH.format(cases="\n".join(cases), commands=" ".join(COMMANDS), trainers=" ".join(TRAINERS))


def _cases(programs: Mapping[str, object], pattern: str) -> list[str]:
    return [
        f'        "{pattern.format(name)[:-1]}"*) words="{_flags(program)}" ;;'
        for name, program in programs.items()
        if isinstance(program, Run)
    ]


def _flags(program: Run) -> str:
    names = [f"--{name.rstrip('_')}" for name in option_names(program.config)]
    return " ".join([*names, "--help", "--help-all"])
