"""Makes errors about a model's files name the option that specified the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_MODEL = "--model "


@contextmanager
def naming(option: str) -> Iterator[None]:
    """Names another option in errors raised by the body: loaders always assume that the model came from --model."""
    try:
        yield
    except (ValueError, OSError) as error:
        if not str(error).startswith(_MODEL):
            raise
        raise type(error)(f"{option} {str(error).removeprefix(_MODEL)}") from error
