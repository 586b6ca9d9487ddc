"""OwnFunction: a loss or another function of the user's whose results are checked in the run as in its trial."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

from torch import Tensor

from lightrl.torch_settings import settings_kept


class OwnFunction(partial[Any]):
    """The function with its traits and parameters; a call raises TypeError for a result of another kind or shape."""

    option: str  # with its value
    kind: type  # of the result of the trial

    @classmethod
    def of(cls, option: str, function: Callable[..., Any], kind: type) -> OwnFunction:
        """Wraps a function that an option names, and that returned this kind in its trial."""
        own = cls(function)
        own.option, own.kind = option, kind
        return own

    def __call__(self, *arguments: Any) -> Any:
        """Returns what the function returns."""
        with settings_kept(self.option):
            returned = super().__call__(*arguments)
        self.check(returned, arguments[0])
        return returned

    def check(self, returned: object, given: object) -> None:
        """Raises TypeError unless a result has the kind of the trial's, and one value per token of what was given."""
        wanted, found = _shape(given), _shape(returned)
        if not isinstance(returned, self.kind) or found not in (None, wanted):
            shape = "" if found is None else f" with values of shape {found}"
            told = "None" if returned is None else f"a {type(returned).__name__}{shape}"
            raise TypeError(
                f"{self.option} returned {told}. It must return a {self.kind.__name__} with values of shape {wanted}, "
                "one per token."
            )


def _shape(item: Any) -> list[int] | None:
    """Returns the shape of a tensor, or of the first field of a record; None for anything else."""
    values = getattr(item, fields(item)[0].name) if is_dataclass(item) else item
    return list(values.shape) if isinstance(values, Tensor) else None
