"""A wrong environment is named before any process group is made."""

import pytest

from lightrl.environment import check_environment

RIGHT = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"RANK": None, "MASTER_PORT": None}, "missing for a distributed run: RANK, MASTER_PORT"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two': it must be a whole number"),
        ({"RANK": "2"}, "RANK is 2: with WORLD_SIZE 2 it must be 0 to 1"),
    ],
)
@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
def test_what_is_wrong_is_named(
    changed: dict[str, str | None], text: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name, value in {**RIGHT, **changed}.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(kind, match=text):
        check_environment()
