"""Settings of torch that determine what the rest of a run computes, and that a user's code must leave as they are."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class ChangedByImportError(ImportError):
    """A user's module has changed settings of torch when it was imported."""


@contextmanager
def settings_kept(what: str) -> Iterator[None]:
    """Raises RuntimeError with the name of `what`, which the body runs, if that has changed settings of torch."""
    before = _settings()
    yield
    if (after := _settings()) != before:
        raise RuntimeError(_changed(what, before, after))


@contextmanager
def kept_by_import(module: str) -> Iterator[None]:
    """Raises ChangedByImportError that names a user's module if its import, in the body, changes settings of torch.

    The precision of float32 is not one of them here: a module may choose it for the whole run.
    """
    if "torch" not in sys.modules:
        yield
        return
    before = _settings()
    yield
    after = {name: before[name] if name.endswith("fp32_precision") else now for name, now in _settings().items()}
    if after != before:
        raise ChangedByImportError(_changed(f"The import of {module}", before, after))


def _settings() -> dict[str, object]:
    import torch  # noqa: PLC0415  (processes of isolated rewards start without it)

    return {
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.is_inference_mode_enabled()": torch.is_inference_mode_enabled(),
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.get_default_device()": torch.get_default_device(),
        "torch.is_autocast_enabled('cpu')": torch.is_autocast_enabled("cpu"),
        "torch.is_autocast_enabled('cuda')": torch.is_autocast_enabled("cuda"),
        "torch.backends.cuda.matmul.fp32_precision": torch.backends.cuda.matmul.fp32_precision,
        "torch.backends.mkldnn.matmul.fp32_precision": torch.backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined]
    }


def _changed(what: str, before: Mapping[str, object], after: Mapping[str, object]) -> str:
    told = [f"{name} from {old} to {after[name]}" for name, old in before.items() if after[name] != old]
    return (
        f"{what} has changed settings of torch for the rest of the run: {', '.join(told)}. It must set them back. "
        "A context such as `with torch.no_grad():` does so by itself, unless an `await` is inside it."
    )
