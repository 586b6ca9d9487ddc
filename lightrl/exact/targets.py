"""Advantages per token whose moments are computed over all samples in one order, and so depend on no rank."""

from __future__ import annotations

from collections.abc import Sequence

from lightrl.alone import Alone
from lightrl.comm import Comm
from lightrl.data.packing import TokenValues
from lightrl.metrics import Statistics
from lightrl.records import Experience
from lightrl.trainers.token_advantages import TokenAdvantages, TokenTargets


class ExactTokenAdvantages(TokenAdvantages):
    """Computes the targets of all samples on every rank."""

    def targets(
        self,
        experience: Sequence[Experience],
        values: TokenValues,
        kl: TokenValues | None,
        kl_coef: float,
        comm: Comm,
        statistics: Statistics,
    ) -> TokenTargets:
        """Returns the targets of the samples of all ranks, in the order of their keys."""
        mine = [(item, values[item.key], None if kl is None else kl[item.key]) for item in experience]
        everyones = [row for part in comm.all_gather_object(mine) for row in part]
        everyones.sort(key=lambda row: row[0].key)
        return super().targets(
            [item for item, _, _ in everyones],
            {item.key: own for item, own, _ in everyones},
            None if kl is None else {item.key: own or [] for item, _, own in everyones},
            kl_coef,
            Alone(),
            statistics,
        )
