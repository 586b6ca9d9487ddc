"""How a run hands its models on: exported folders and the Hugging Face hub."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lightrl.config.options import option, section
from lightrl.config.sections import ProfileConfig

_NAME = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?")


@dataclass(kw_only=True, slots=True)
class ExportConfig:
    """When the model is exported during a run, besides final/ at its end."""

    every: int = option(0, at_least=0)
    """Steps between exports. An export is a Hugging Face folder with a model card, exports/step-N in the run's folder.
    0: none."""


@dataclass(kw_only=True, slots=True)
class HubConfig:
    """The repository that models are uploaded to."""

    push: str = ""
    """Repository on the Hugging Face Hub, such as me/my-model, to which each export and the final model are uploaded.
    The token comes from `hf auth login` or HF_TOKEN. Empty: upload nothing."""
    private: bool = True
    """Make the repository private if it does not exist yet."""

    def check(self) -> None:
        """Raises ValueError if hub.push is not the name of a repository."""
        if self.push and not _NAME.fullmatch(self.push):
            raise ValueError(f"--hub.push {self.push}: give the name of a repository, such as me/my-model.")


@dataclass(kw_only=True)
class ExportOptions(ProfileConfig):
    """Options for the models that a run exports, and for the profile that it records."""

    __slots__ = ()

    export: ExportConfig = section(ExportConfig, resume="free")
    hub: HubConfig = section(HubConfig, resume="free")
