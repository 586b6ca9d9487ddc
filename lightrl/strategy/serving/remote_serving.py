"""Serving by other ranks (--rollout_ranks): weights go over a link, and nothing is generated here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightrl.config import StrategyOptions
from lightrl.engines.base import check_engine_name
from lightrl.engines.colocated import ColocatedEngine
from lightrl.engines.link import Link, LinkEngine
from lightrl.engines.weights.fingerprint import KnownWeights
from lightrl.models.policy import stated_context
from lightrl.strategy.serving.colocated_serving import ColocatedServing, ServedStrategy


class RemoteServing(ColocatedServing):
    """Keeps the trainer's weights in the engines of the rollout ranks."""

    def __init__(self, strategy: ServedStrategy, options: StrategyOptions, connect: Callable[[], Link | None]) -> None:
        """Takes `connect`, which makes this rank's end of the link once models exist; None except on the first rank."""
        super().__init__(strategy, options)
        self.link: Link | None = None
        self._connect = connect

    def start(
        self, engine_type: str, *, model: nn.Module | None, tokenizer: Any, options: StrategyOptions
    ) -> LinkEngine:
        """Connects to the rollout ranks, whose engines get the model's weights."""
        check_engine_name(engine_type)
        if model is None:
            raise ValueError("A link to rollout ranks needs the model whose weights it sends.")
        self.close()
        self.link = self._connect()
        source: Any = self._strategy.unwrap_model(model)
        text_config = source.config.get_text_config()
        engine = LinkEngine(
            self.link,
            max_model_len=stated_context(text_config),
            vocab_size=text_config.vocab_size,
            bucket_bytes=options.sync_bucket_mb << 20,
        )
        self.engine, self._model, self.num_syncs = ColocatedEngine(engine, tokenizer), None, 0
        self.sync_weights(model)
        return engine

    def fingerprints(self, model: nn.Module, dtype: torch.dtype) -> KnownWeights | None:
        """Returns the fingerprints, and has them sent too, so that rollout ranks can prove what they receive."""
        engine = self.require_engine().engine
        assert isinstance(engine, LinkEngine), "start() makes no other"
        engine.expected = super().fingerprints(model, dtype)
        return engine.expected
