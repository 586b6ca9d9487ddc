"""How an option is declared, checked, described and compared, on configs of a few fields."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from lightrl.config import (
    as_dict,
    changed_options,
    check_options,
    named_values,
    nearest_name,
    option,
    section,
    to_yaml,
)
from lightrl.config.options import constant, option_names, without

ROOT = Path(__file__).parents[2]


@dataclass(kw_only=True, slots=True)
class Inner:
    """A section."""

    share: float = option(0.5, at_least=0, at_most=1)
    """A share."""
    name: Literal["a", "b"] = "a"
    """A name."""

    def check(self) -> None:
        if self.name == "b" and self.share == 1:
            raise ValueError("b does not go with 1")


@dataclass(kw_only=True)
class Shape:
    """A mix-in."""

    __slots__ = ()

    width: int = option(1, at_least=1)
    """Width of the shape, in a text that is so long that it needs two lines of source, the second of which is
    indented."""
    depth: int = option(2, above=0, below=9, resume="free")
    """Depth."""


@dataclass(kw_only=True, slots=True)
class Outer(Shape):
    """A config."""

    rate: float = option(0.1, at_least=0)
    """Rate."""
    bound: float | None = option(None, above=1)
    """Bound."""
    pair: tuple[float, float] = (0.5, 0.9)
    """Two numbers."""
    size: int = 0
    """A number without a range."""
    text: str = ""
    """A text."""
    texts: tuple[str, ...] = ()
    """Texts."""
    inner: Inner = section(Inner)
    """Section."""
    free: Inner = section(Inner, resume="free")
    """Section that may change."""

    def __post_init__(self) -> None:
        check_options(self)

    def check(self) -> None:
        if self.width > self.depth:
            raise ValueError("too wide")


@dataclass(kw_only=True, slots=True)
@without(Shape)
class Plain(Outer):
    """A config that needs no shape."""

    weight: float = 1.0
    """Weight."""
    answer: int = constant(lambda: 42)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"width": 0}, "--width is 0: it must be at least 1."),
        ({"width": 1.0}, "width must be int, not 1.0."),
        ({"width": True}, "width must be int, not True."),
        ({"depth": 9}, "--depth is 9: it must be above 0 and below 9."),
        ({"rate": -1}, "--rate is -1: it must be 0 or above."),
        ({"rate": float("inf")}, "--rate is inf: it must be a finite number."),
        ({"bound": float("inf")}, "--bound is inf: it must be a finite number."),
        ({"depth": 10**30}, f"--depth is {10**30}: it must be above 0 and below 9."),
        ({"size": 10**30}, f"--size is {10**30}: it must fit in 64 bits."),
        ({"pair": (0.5, float("nan"))}, "--pair is (0.5, nan): it must be a finite number."),
        ({"pair": "ab"}, "pair must be tuple, not 'ab'."),
        ({"texts": (3,)}, "texts must be str, not 3."),
        ({"texts": ("a\udc80",)}, "--texts is 'a\\udc80': it has a NUL or a byte that is not UTF-8. Remove it."),
        ({"text": "a\0"}, "--text is 'a\\x00': it has a NUL or a byte that is not UTF-8. Remove it."),
        ({"rate": float("nan")}, "--rate is nan: it must be a finite number."),
        ({"bound": 1.0}, "--bound is 1.0: it must be above 1."),
        ({"bound": "2"}, "bound must be float | None, not '2'."),
        ({"inner": Inner(share=float("nan"))}, "--inner.share is nan: it must be between 0 and 1."),
        ({"inner": Inner(name="c")}, "inner.name is 'c': choose one of a, b."),  # type: ignore[arg-type]
        ({"inner": {"share": 1}}, "inner must be a Inner, not {'share': 1}."),
        ({"inner": Inner(name="b", share=1.0)}, "b does not go with 1"),
        ({"width": 5}, "too wide"),
    ],
)
def test_a_value_is_checked_by_what_stands_beside_its_field(options: dict[str, object], text: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        Outer(**options)  # type: ignore[arg-type]
    assert str(error.value) == text


def test_the_checks_of_a_base_class_run_for_a_subclass_that_has_its_own() -> None:
    @dataclass(kw_only=True, slots=True)
    class Narrow(Outer):
        def check(self) -> None:
            if self.width != 1:
                raise ValueError("not narrow")

    with pytest.raises(ValueError, match="too wide"):
        Narrow(width=5)
    with pytest.raises(ValueError, match="not narrow"):
        Narrow(width=2)


def test_a_kind_without_a_section_reads_its_defaults_and_takes_none_of_its_options() -> None:
    plain = Plain(weight=2.0)
    assert (plain.width, plain.depth, plain.answer) == (1, 2, 42)
    own = ["rate", "bound", "pair", "size", "text", "texts"]
    assert option_names(Plain) == [*own, "inner.share", "inner.name", "free.share", "free.name", "weight"]
    assert not {"width", "depth", "answer"} & set(as_dict(plain))
    for name in ("width", "answer"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            Plain(**{name: 1})  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        plain.widht = 3  # type: ignore[attr-defined]


def test_only_what_is_fixed_counts_as_a_change() -> None:
    saved = as_dict(Outer())
    assert changed_options(Outer(depth=3, free=Inner(share=1.0)), saved) == []
    changed = changed_options(Outer(width=2, inner=Inner(share=0.25)), saved)
    assert changed == [("inner.share", 0.5, 0.25), ("width", 1, 2)]


def test_an_option_that_is_newer_or_older_than_the_saved_run() -> None:
    saved = as_dict(Outer())
    del saved["rate"], saved["inner"]["name"]
    saved["free"]["gone"] = 1
    assert changed_options(Outer(), saved) == []
    assert changed_options(Outer(rate=0.2), saved) == [("rate", 0.1, 0.2)]
    assert changed_options(Outer(), saved | {"gone": 1}) == [("gone", 1, None)]


def test_a_config_as_plain_values() -> None:
    assert as_dict(Outer(bound=2.0))["bound"] == 2.0
    assert "bound: null\n" in to_yaml(Outer())


def test_named_values_are_read_as_yaml() -> None:
    assert named_values(("a=4", "b=3e-4", "c=[x, 1]", "d=true", "e="), "x") == {
        "a": 4,
        "b": 3e-4,
        "c": ["x", 1],
        "d": True,
        "e": None,
    }
    assert named_values(("a='4'", 'b="3e-4"', "c=' 5'", "d='[x]'"), "x") == {
        "a": "4",
        "b": "3e-4",
        "c": " 5",
        "d": "[x]",
    }
    assert nearest_name("fspd", {"fsdp", "single"}) == "Did you mean fsdp?"
