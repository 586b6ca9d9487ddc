"""Functions of the leaves of nested dictionaries."""

from __future__ import annotations

from lightrl.trees import leaves_of, map_by_kind, map_leaves

TREE = {"b": {"y": 2, "x": 1.5}, "a": 3}


def test_leaves_come_in_the_order_of_sorted_keys() -> None:
    assert leaves_of(TREE) == [3, 1.5, 2]
    assert leaves_of({"a": 3, "b": {"x": 1.5, "y": 2}}) == [3, 1.5, 2]
    assert leaves_of(7) == [7]


def test_a_mapped_tree_keeps_its_keys_in_their_order() -> None:
    doubled = map_leaves(lambda leaf: 2 * leaf, TREE)
    assert doubled == {"b": {"y": 4, "x": 3.0}, "a": 6}
    assert list(doubled) == ["b", "a"]
    assert list(doubled["b"]) == ["y", "x"]


def test_leaves_of_a_kind_go_through_one_call() -> None:
    calls = []

    def negated(leaves: list[float]) -> list[float]:
        calls.append(leaves)
        return [-leaf for leaf in leaves]

    assert map_by_kind(negated, lambda leaf: type(leaf).__name__, TREE) == {"b": {"y": -2, "x": -1.5}, "a": -3}
    assert calls == [[1.5], [3, 2]]  # float before int, each in the order of the keys
