"""Options of exports."""

import pytest

from lightrl.config import GRPOConfig
from lightrl.config.export_sections import HubConfig


@pytest.mark.parametrize("name", ["me/my/model", "a model", "https://x/y"])
def test_a_repository_has_a_name(name: str) -> None:
    with pytest.raises(ValueError, match="give the name of a repository, such as me/my-model"):
        GRPOConfig(hub=HubConfig(push=name))
