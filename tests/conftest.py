"""Order of the tests where several workers share them."""

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Moves files and classes with slow tests to the front for workers of xdist, which then end at about one time."""
    if hasattr(config, "workerinput"):
        slow = {item.parent for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.parent not in slow)  # keeps the order otherwise
