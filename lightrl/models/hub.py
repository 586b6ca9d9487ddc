"""Finds the files of models, and reports within seconds that the hub is out of reach.

Without this report, libraries would retry for minutes.
"""

from __future__ import annotations

import os
import socket
import threading
from urllib.parse import urlsplit

from huggingface_hub import constants, try_to_load_from_cache
from transformers.utils.hub import cached_file

_WAIT_S = 5.0  # to look up the name and to connect


def require_reachable(name: str, option: str) -> None:
    """Raises ValueError if a model is not in the cache and the hub cannot be reached."""
    if _has_proxy() or isinstance(_cached_config(name, option), str):
        return
    url = urlsplit(constants.ENDPOINT)
    port = url.port or (80 if url.scheme == "http" else 443)
    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _why_unreachable(url.hostname or "", port)
    if reason:
        raise ValueError(
            f"{option} {name} is no folder here and not in the cache of Hugging Face, and {url.hostname} cannot be "
            f"reached ({reason}). Give a folder, or a network."
        )


def file_of(path: str, name: str) -> str | None:
    """Returns the local path of a file in a folder or a repository on the hub; None if there is no such file."""
    # The keywords are private: with them a missing file gives None instead of an error. They can go once there is a
    # public option: https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/utils/hub.py
    local_path: str | None = cached_file(
        path,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return local_path


def _cached_config(name: str, option: str) -> object:
    try:
        return try_to_load_from_cache(name, "config.json")
    except ValueError as error:  # huggingface_hub's own checks of a repository's name
        raise ValueError(f"{option} {name!r} is neither a folder nor a Hugging Face name: {error}") from error


def _has_proxy() -> bool:
    return any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"))


def _why_unreachable(host: str, port: int) -> str:
    """Returns why no connection can be made, or nothing. A thread does it: looking up a name has no time limit."""
    reasons: list[str] = []

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=_WAIT_S).close()
            reasons.append("")
        except OSError as error:
            reasons.append(str(error))

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_WAIT_S)
    return reasons[0] if reasons else f"no answer within {_WAIT_S:g} s"
