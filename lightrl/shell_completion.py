"""Scripts that complete the commands and options of `lightrl` in a shell."""

from __future__ import annotations

from collections.abc import Sequence

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
    if [ "$COMP_CWORD" -eq 2 ]; then
        case "${{COMP_WORDS[1]}}" in
            train | plan) words="{trainers}" ;;
            completion) words="bash zsh" ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _lightrl lightrl"""
# Options of programs whose modules load torch, for which a shell would wait whenever it starts.
_OWN_OPTIONS = {
    "doctor": "output_dir timeout_s json",
    "export": "step best output hub.push",
    "hash": "",
    "lm-eval": "tasks include_path num_fewshot limit batch_size device chat output",
    "plan": "ranks device_memory prompt_tokens response_tokens fit json",
    "replay": "step debug",
    "report": "output watch seconds",
}


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
    of_trainers = {name: option_names(trainer.config) for name, trainer in TRAINERS.items()}
    options = {f"train {name}": [*names, "help-all"] for name, names in of_trainers.items()}
    for name, command in COMMANDS.items():
        if isinstance(command, Run):
            options[f"{name} "] = [*option_names(command.config), "help-all"]
        elif name in _OWN_OPTIONS:
            options[f"{name} "] = _OWN_OPTIONS[name].split()
    own, repeated = options.pop("plan "), dict.fromkeys([*of_trainers["grpo"], *of_trainers["ppo"]])
    options |= {f"plan {name}": [*names, *own, "help-all"] for name, names in of_trainers.items()}
    options["replay "] += repeated
    cases = [f'        "{words}"*) words="{_flags(names)}" ;;' for words, names in options.items()]
    return _BASH.format(cases="\n".join(cases), commands=" ".join(COMMANDS), trainers=" ".join(TRAINERS))


def _flags(names: Sequence[str]) -> str:
    return " ".join(f"--{name.rstrip('_')}" for name in [*names, "help"])
