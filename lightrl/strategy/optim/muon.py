"""Muon (Jordan et al. 2024) for some parameter groups and AdamW for the others, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer


class MuonWithAdamW(Optimizer):
    """Steps groups with is_muon by Muon and the others by AdamW; lr and weight_decay mean the same in both.

    See arXiv:2502.16982 for the scale of the update.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
        fused: bool = True,
    ) -> None:
        matrices = [group for group in groups if group["is_muon"]]
        others = [group for group in groups if not group["is_muon"]]
        if not matrices:
            raise ValueError("--optim.name muon: the model has no trainable matrices in blocks (an nn.ModuleList).")
        self._muon: Any = torch.optim.Muon(matrices, momentum=momentum, adjust_lr_fn="match_rms_adamw")
        self._adamw = torch.optim.AdamW(others, betas=betas, eps=eps, fused=fused) if others else None
        # These are the children's own dicts, so a schedule that writes "lr" reaches both.
        super().__init__(self._muon.param_groups + (self._adamw.param_groups if self._adamw else []), {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Steps both optimizers; a closure is refused, since both would call it."""
        assert closure is None
        for child, is_muon in ((self._muon, True), (self._adamw, False)):
            if child is not None:
                child.param_groups = [group for group in self.param_groups if group["is_muon"] is is_muon]
                child.state = self.state
                child.step()
