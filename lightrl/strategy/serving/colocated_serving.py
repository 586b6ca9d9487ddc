"""ColocatedServing: the inference engine beside the trainer, from its set-up to weight syncs that are proven."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightrl.config import StrategyOptions
from lightrl.engines.base import (
    Completion,
    EngineGroup,
    EnginePrompt,
    InferenceEngine,
    SamplingParams,
    WeightSyncError,
    check_engine_name,
    create_engine,
)
from lightrl.engines.colocated import ColocatedEngine, SyncReport
from lightrl.engines.weights.account import Fingerprint
from lightrl.strategy.serving.canary import Canary, Scorer
from lightrl.strategy.serving.residency import Residency


class ServedTrainer(Scorer, Protocol):
    """What serving needs of the trainer whose model it serves; a strategy is one."""

    @property
    def global_step(self) -> int: ...

    def full_parameters(self, model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]: ...

    def weight_fingerprints(self, model: nn.Module, dtype: torch.dtype | None) -> Mapping[str, Fingerprint] | None: ...

    def unwrap_model(self, model: Any) -> nn.Module: ...


class ColocatedServing:
    """Generates on the engine that this rank's group shares, and keeps the trainer's weights in it."""

    def __init__(self, trainer: ServedTrainer, options: StrategyOptions) -> None:
        self.group = EngineGroup()  # the ranks that drive one engine; a strategy sets it when it has joined the world
        self.engine: ColocatedEngine | None = None
        self.last_sync: SyncReport | None = None
        self.num_syncs = 0
        self.canary = Canary()
        self._trainer = trainer
        self._options = options
        self._model: nn.Module | None = None  # whose weights the engine has

    def start(
        self, engine_type: str, *, model: nn.Module | None, tokenizer: Any, options: StrategyOptions
    ) -> InferenceEngine:
        """Builds the engine in place of an earlier one, and gives it the model's weights if there is a model."""
        check_engine_name(engine_type)
        source = self._trainer.unwrap_model(model) if model is not None else None
        self.close()
        device = self.group.comm.device
        engine = create_engine(
            engine_type, source=source, tokenizer=tokenizer, options=options, device=device, group=self.group
        )
        self.engine, self._model, self.num_syncs = ColocatedEngine(engine), None, 0
        if model is not None:
            self.sync_weights(model)
        return engine

    def require_engine(self) -> ColocatedEngine:
        """Returns the engine; NotImplementedError if none was started."""
        if self.engine is None:
            raise NotImplementedError("There is no inference engine. Call setup_inference_engine(...) first.")
        return self.engine

    def generate(
        self, prompts: Sequence[EnginePrompt], params: Sequence[SamplingParams], *, sleep_engine: bool = True
    ) -> list[Completion]:
        """Samples this rank's prompts, n completions per prompt in the prompts' order; a collective.

        A rank may have no prompt. An error on one rank is raised on all. The engine sleeps afterwards unless
        sleep_engine is False, which lets the next call begin without another wake-up.
        """
        engine, comm = self.require_engine(), self.group.comm
        try:
            if engine.needs_weights and self._model is not None:  # after sleep level 2; the same on every rank
                with comm.phase("generate"):
                    self.sync_weights(self._model)
            with comm.phase("generate", local=True):
                self.wake()
            parts = self.group.gather(([*prompts], [*params]))
            with comm.phase("generate", local=True):
                return self._generate_parts(engine, parts)
        finally:
            if sleep_engine:
                self.sleep()

    def _generate_parts(
        self, engine: ColocatedEngine, parts: Sequence[tuple[list[EnginePrompt], list[SamplingParams]]]
    ) -> list[Completion]:
        """Runs the group's prompts through the engine together; returns the completions of this rank's own."""
        prompts = [prompt for part, _ in parts for prompt in part]
        completions = engine.generate(prompts, [param for _, part in parts for param in part])
        self.canary.keep(prompts)
        counts = [sum(param.n for param in part) for _, part in parts]
        start = sum(counts[: self.group.rank])
        return completions[start : start + counts[self.group.rank]]

    def sync_weights(self, model: nn.Module) -> SyncReport:
        """Sends the model's weights to the engine, stamped with the global step, and proves that they arrived.

        A sleeping engine wakes up to hold weights only. Where the canary is due it generates, and is awake after that.
        """
        engine, comm = self.require_engine(), self.group.comm
        dtype = torch.bfloat16 if self._options.dtype == "bfloat16" else torch.float32
        expected = self._trainer.weight_fingerprints(model, dtype)
        weights = self._trainer.full_parameters(model, dtype)
        error: WeightSyncError | None = None
        try:
            report = engine.update_weights(weights, self._trainer.global_step, expected=expected)
        except WeightSyncError as raised:  # after all pairs were consumed, so the ranks are still in step
            error = raised
        with comm.phase("weight sync", local=True):
            if error is not None:
                raise error
        self._model = model
        every = self._options.canary_every
        if every and self.num_syncs % every == 0:
            with comm.phase("canary", local=True):
                engine.wake()
            difference = self.canary.check(engine, self._trainer, model, dtype=dtype, comm=comm)
            report = replace(report, canary=difference)
        self.num_syncs += 1
        self.last_sync = report
        return report

    def sleep(self) -> None:
        """Frees the engine's memory as far as --engine_sleep_level says; without an engine it does nothing."""
        if self.engine is not None:
            self.engine.sleep(self._options.engine_sleep_level)

    def wake(self) -> None:
        """Makes the engine ready to generate; without an engine it does nothing."""
        if self.engine is not None:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self.engine.wake()

    def close(self) -> None:
        """Ends the engine, if there is one."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None


class OffloadingServing(ColocatedServing):
    """Serving where the trainer waits in host memory while the engine is awake (--offload_while_generating)."""

    def __init__(self, trainer: ServedTrainer, options: StrategyOptions, residency: Residency) -> None:
        super().__init__(trainer, options)
        self._residency = residency

    def wake(self) -> None:
        """Moves the trainer to host memory, then wakes the engine."""
        if self.engine is not None:
            self._residency.leave_device()
        super().wake()

    def sleep(self) -> None:
        """Puts the engine to sleep, then brings the trainer back."""
        super().sleep()
        if self.engine is not None:
            self._residency.return_to_device()

    def sync_weights(self, model: nn.Module) -> SyncReport:
        """Brings the trainer back, whose weights are read now."""
        self.require_engine()
        self._residency.return_to_device()
        return super().sync_weights(model)
