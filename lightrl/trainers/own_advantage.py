"""OwnAdvantage: an estimator of the user's whose results are checked, so that an error names it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from lightrl.algorithms.advantages import ScoredSamples
from lightrl.torch_settings import settings_kept


class OwnAdvantage(partial[Tensor]):
    """The estimator with its traits and parameters; a call raises TypeError unless each sample gets a number."""

    name: str

    @classmethod
    def of(cls, name: str, function: Callable[..., Any]) -> OwnAdvantage:
        """Wraps the estimator that --algorithm.advantage names."""
        own = cls(function)
        own.name = name
        return own

    def __call__(self, samples: ScoredSamples) -> Tensor:
        """Returns the advantages, [B]."""
        with settings_kept(f"--algorithm.advantage {self.name}"):
            returned: Any = super().__call__(samples)
        count = len(samples.rewards)
        if not isinstance(returned, Tensor) or returned.shape != (count,) or returned.is_complex():
            raise TypeError(
                f"--algorithm.advantage {self.name} returned {_describe(returned)} for {count} samples. It must return "
                f"a tensor of shape [{count}], with one number per sample."
            )
        return returned.detach()


def _describe(returned: object) -> str:
    if isinstance(returned, Tensor):
        return f"a tensor of shape {list(returned.shape)} and type {str(returned.dtype).removeprefix('torch.')}"
    return "None" if returned is None else f"a {type(returned).__name__}"
