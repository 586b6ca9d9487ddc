"""A reward for the number of tokens that the policy wrote: towards a target length, or against overlong responses."""

from __future__ import annotations

from lightrl.records import Sample


class ResponseLength:
    """A reward that rises towards a target length, or a penalty near a limit; exactly one of the two is given.

    With `target` it is 1 at that many tokens and falls linearly to 0 at none and at twice as many. With `limit` it is 0
    up to limit - cache tokens, falls linearly from there to -1 at the limit, and is -1 beyond it (DAPO's soft overlong
    punishment, arXiv:2503.14476, equation 13).
    """

    def __init__(self, *, target: int = 0, limit: int = 0, cache: int = 0) -> None:
        if (target > 0) == (limit > 0) or not 0 <= cache <= limit:
            raise ValueError(
                f"The reward length needs either a target above 0, or a limit above 0 with a cache between 0 and the "
                f"limit: it has target {target}, limit {limit}, cache {cache}. Give --reward_args length.target=N, or "
                "length.limit=N length.cache=M."
            )
        self._target, self._limit, self._cache = target, limit, cache

    def __call__(self, sample: Sample, /) -> float:
        length = sample.num_own
        if self._target:
            return max(0.0, 1 - abs(length - self._target) / self._target)
        if length > self._limit:
            return -1.0
        free = self._limit - self._cache
        return (free - length) / self._cache if length > free else 0.0
