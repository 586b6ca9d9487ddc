"""The tests of this folder need the real SGLang; they run by scripts/test_sglang.sh."""

import pytest

from lightrl.imports import is_installed


def pytest_collection_modifyitems(items):
    missing = not is_installed("sglang")
    for item in items:
        if "engines/real_sglang/" in str(item.path):
            item.add_marker(pytest.mark.sglang)
            item.add_marker(pytest.mark.timeout(240))
            if missing:
                item.add_marker(pytest.mark.skip(reason="sglang is not installed: bash scripts/test_sglang.sh"))


@pytest.fixture(scope="session", autouse=True)
def _fast_start():
    import sglang_fast_start

    sglang_fast_start.enable()
