"""Sampling options that users of other trainers look for, and the reason why training has none of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

_CHANGES = {
    "min_p": "",  # no engine setting of ours
    "min_tokens": "min_new_tokens",
    "min_new_tokens": "min_new_tokens",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
}


def reason_against(name: str, known: Collection[str]) -> str:
    """Returns why training has no option of this name and what to do, or an empty text for any other name."""
    last = name.lstrip("-").replace("-", "_").rpartition(".")[2]
    if last not in _CHANGES or "eval.top_p" not in known:
        return ""
    own = _CHANGES[last]
    advice = f"For evaluation there is --eval.{own}." if own else "Leave it out."
    return (
        f"Training has no {last}: a trainer computes log-probabilities at --temperature alone, and tokens that are "
        f"drawn in another way have others. {advice}"
    )


def reasons_against(args: Iterable[str], known: Collection[str]) -> list[str]:
    """Returns the reasons against the flags of a command line that are no options."""
    names = [arg.partition("=")[0].removeprefix("--") for arg in args if arg.startswith("--")]
    unknown = [name for name in names if name.replace("-", "_") not in known]
    return [reason for name in unknown if (reason := reason_against(name, known))]
