"""Finds the files of models, and notices within seconds that the hub is out of reach.

Otherwise libraries would retry for minutes: 23 s for each file that the cache lacks, and for each library that asks.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import constants, try_to_load_from_cache
from transformers.utils.hub import cached_file

logger = logging.getLogger(__name__)

_WAIT_S = 5.0  # to look up the name and to connect


def require_reachable(name: str, option: str) -> None:
    """Raises ValueError if a model is not in the cache and the hub cannot be reached.

    If it is in the cache, HF_HUB_OFFLINE is set for this process and its children, such as engines.
    """
    is_cached = isinstance(_cached_config(name, option), str)
    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else why_unreachable()
    if reason and not is_cached:
        raise ValueError(
            f"{option} {name} is no folder here and not in the cache of Hugging Face, and {_host()} cannot be "
            f"reached ({reason}). Give a folder, or a network."
        )
    if reason and not constants.HF_HUB_OFFLINE:
        logger.warning("%s cannot be reached (%s): HF_HUB_OFFLINE=1 is set, to use the cache alone.", _host(), reason)
        os.environ["HF_HUB_OFFLINE"], constants.HF_HUB_OFFLINE = "1", True


def why_unreachable() -> str:
    """Returns why the hub cannot be reached, or nothing if it can, or if a proxy may reach it."""
    if _has_proxy():
        return ""
    url = urlsplit(constants.ENDPOINT)
    return _why_no_connection(_host(), url.port or (80 if url.scheme == "http" else 443))


def file_of(path: str, name: str) -> str | None:
    """Returns the local path of a file in a folder or a repository on the hub; None if there is no such file.

    If the network is lost, as it may be by the end of a run, only the cache counts. The hub is asked again next time.
    """
    reason = "" if os.path.isdir(path) or constants.HF_HUB_OFFLINE else why_unreachable()
    if reason:
        logger.warning(
            "%s cannot be reached (%s): %s of %s comes from the cache, if at all.", _host(), reason, name, path
        )
    # The keywords are private: with them a missing file gives None instead of an error. They can go once there is a
    # public option: https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/utils/hub.py
    local_path: str | None = cached_file(
        path,
        name,
        local_files_only=bool(reason),
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


def _host() -> str:
    return urlsplit(constants.ENDPOINT).hostname or ""


def _has_proxy() -> bool:
    return any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"))


def _why_no_connection(host: str, port: int) -> str:
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


def instead_of(folder: Path) -> str:
    """Returns a hint for a folder that holds no model, if lightrl or peft wrote it; empty for any other folder."""
    if (folder / "adapter_config.json").is_file():
        return " It holds an adapter: give the model that it belongs to, or the merged one, which a run has as final/."
    if (folder / "final" / "config.json").is_file():
        return f" Did you mean {folder / 'final'}?"
    step = folder.name.removeprefix("step-")
    if folder.parent.name == "checkpoints" and step.isdecimal():
        return f" It is a checkpoint: lightrl export {folder.parent.parent} --step {int(step)} writes its model."
    return ""
