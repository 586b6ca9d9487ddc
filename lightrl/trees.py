"""Functions over the leaves of nested dictionaries (mostly tensors and numbers), in the same order on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


def leaves_of(tree: Any) -> list[Any]:
    """Returns the leaves sorted by their keys, because ranks may have inserted them in different orders."""
    if isinstance(tree, Mapping):
        return [leaf for key in sorted(tree) for leaf in leaves_of(tree[key])]
    return [tree]


def rebuilt(tree: Any, leaves: Iterator[Any]) -> Any:
    """Returns a tree with the keys of this one, in their order, and the given leaves, in the order of leaves_of()."""
    if isinstance(tree, Mapping):
        values = {key: rebuilt(tree[key], leaves) for key in sorted(tree)}
        return {key: values[key] for key in tree}
    return next(leaves)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Returns the tree with the function's result in place of each leaf."""
    return rebuilt(tree, iter([function(leaf) for leaf in leaves_of(tree)]))


def map_by_kind(function: Callable[[list[Any]], list[Any]], kind_of: Callable[[Any], Any], tree: Any) -> Any:
    """Returns the tree with its leaves replaced by the function's results, called once for all leaves of a kind."""
    leaves = leaves_of(tree)
    kinds = [kind_of(leaf) for leaf in leaves]
    results = list(leaves)
    for kind in sorted(set(kinds)):
        same = [index for index, other in enumerate(kinds) if other == kind]
        for index, result in zip(same, function([leaves[index] for index in same]), strict=True):
            results[index] = result
    return rebuilt(tree, iter(results))
