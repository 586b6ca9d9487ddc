"""Options of exports."""

import pytest

from lightrl.config import GRPOConfig
from lightrl.config.export_sections import ExportConfig, HubConfig


def test_only_a_run_that_asks_for_exports_enters_them() -> None:
    exporting = "lightrl.trainers.export:export"
    assert GRPOConfig().observers == ()
    assert GRPOConfig(export=ExportConfig(every=2), profile="3").observers[1] == exporting
    assert GRPOConfig(hub=HubConfig(push="me/model")).observers == (exporting,)


@pytest.mark.parametrize("name", ["me/my/model", "a model", "https://x/y"])
def test_a_repository_has_a_name(name: str) -> None:
    with pytest.raises(ValueError, match="give the name of a repository, such as me/my-model"):
        GRPOConfig(hub=HubConfig(push=name))
