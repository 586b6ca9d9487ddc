"""Makes the trainer class for an option: one or several mixins in front of an ordinary trainer's class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightrl.trainers.fit import Trainer


def variant(trainer_class: Callable[[Any], Trainer], *mixins: type[Any], name: str, option: str) -> type[Any]:
    """Returns a subclass of the mixins and the trainer's class.

    Raises TypeError for a function that makes a trainer, which a program may start in place of a class.

    Args:
        name: Prefix of the class's name, which errors show.
        option: Subject of the error.
    """
    if not isinstance(trainer_class, type):
        raise TypeError(f"{option} needs a subclass of lightrl.Trainer, not a function that makes a trainer.")
    return type(f"{name}{trainer_class.__name__}", (*mixins, trainer_class), {})
