"""Uploads exported models to the Hugging Face hub, whose library reads the token: nothing here sees it."""

from __future__ import annotations

import logging
from pathlib import Path

from huggingface_hub import HfApi

from lightrl.config import LateMistakeError

_log = logging.getLogger(__name__)


class Repository:
    """A repository of models on the hub."""

    def __init__(self, name: str, *, is_private: bool) -> None:
        """Creates the repository unless it exists; raises LateMistakeError if the hub refuses or does not answer."""
        self._name, self._api = name, HfApi()
        try:
            self._name = self._api.create_repo(name, private=is_private, exist_ok=True).repo_id
        except Exception as error:  # if no hub answers, the error is of the HTTP library, which differs by version
            raise LateMistakeError(
                f"--hub.push {name}: the hub takes no upload ({_first_line(error)}). Log in by `hf auth login`, or set "
                "HF_TOKEN to a token that may write."
            ) from None

    def upload(self, folder: Path, message: str) -> str:
        """Uploads a folder as a commit, and returns the address of the repository; raises ValueError if it cannot."""
        try:
            self._api.upload_folder(repo_id=self._name, folder_path=folder, commit_message=message)
        except Exception as error:  # as above
            raise ValueError(f"{folder} was not uploaded to {self._name}: {_first_line(error)}") from error
        return f"{self._api.endpoint}/{self._name}"

    def upload_or_warn(self, folder: Path, message: str) -> None:
        """Uploads a folder; only warns of a failure, because the model is on the disk."""
        try:
            self.upload(folder, message)
        except ValueError as error:
            _log.warning("%s", error)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
