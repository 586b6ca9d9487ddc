"""Groups tensors for joint collectives, so that a rank holds only a few whole tensors at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor


def buckets(
    named: Iterable[tuple[str, Tensor]],
    num_bytes: Callable[[Tensor], int],
    limit_bytes: int,
    fits_together: Callable[[Tensor, Tensor], bool] = lambda first, other: True,
) -> Iterator[list[tuple[str, Tensor]]]:
    """Groups consecutive tensors of at most limit_bytes together; a larger one is a group of its own.

    Args:
        num_bytes: returns the bytes of a whole tensor.
        limit_bytes: the most bytes of a group's whole tensors.
        fits_together: whether a tensor may be in the group that begins with another.
    """
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in named:
        added = num_bytes(tensor)
        if bucket and (size + added > limit_bytes or not fits_together(bucket[0][1], tensor)):
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += added
    if bucket:
        yield bucket
