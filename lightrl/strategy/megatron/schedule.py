"""Runs micro-batches through the stages of a model with megatron-core's schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightrl.records import PackedBatch
from lightrl.strategy.foreign_forward import Step, finish, scored_rows
from lightrl.strategy.megatron.placing import Placed
from lightrl.strategy.megatron.stage import Stage
from lightrl.strategy.results import LossFn


def run_schedule(
    placed: Placed,
    batches: Sequence[PackedBatch],
    consume: Callable[[int, Any], Any],
    *,
    trains: bool,
) -> list[Any]:
    """Runs megatron-core's schedule over the micro-batches; only the last stage calls consume(index, outputs).

    Returns what consume returns in forward passes. In training, consume returns the scaled loss, and its backward runs.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def step(indices: Any, stage: Stage) -> tuple[Tensor, Callable[..., Any]]:
        index = next(indices)
        batch = batches[index]
        pack = stage.pack(batch)

        def finish(hidden: Tensor, non_loss_data: bool = False) -> Any:
            result = consume(index, placed.outputs(stage, hidden, batch, pack))
            return result if non_loss_data else (result, torch.ones((), dtype=torch.int), {})

        return stage(batch, pack), finish

    for stage in placed.stages:
        stage.train(trains)
    run: Any = get_forward_backward_func()
    iterators = [iter(range(len(batches))) for _ in placed.stages]
    found: list[Any] = run(
        forward_step_func=step,
        data_iterator=iterators if len(iterators) > 1 else iterators[0],
        model=[*placed.stages],
        num_microbatches=len(batches),
        seq_length=placed.ranks.sizes.tp * placed.ranks.sizes.cp,  # has no effect: every message begins with its shape
        micro_batch_size=1,
        forward_only=not trains,
        collect_non_loss_data=not trains,
    )
    return found


def forward_step(placed: Placed, temperature: float, loss_fn: LossFn | None) -> Step:
    """Returns a step for megatron-core's schedules: step(micro-batches, stage) returns states and a function.

    The last stage calls the function, which returns (loss, numbers), or the outputs if there is no loss.
    """

    def step(micro_batches: Iterator[Any], stage: Any) -> tuple[Tensor, Callable[..., Any]]:
        batch = next(micro_batches)
        rows = scored_rows(batch, temperature) if isinstance(batch, Mapping) else None
        packed: Any = batch if rows is None else rows.pack
        layout = stage.pack(packed)

        def last(hidden: Tensor, non_loss_data: bool = False) -> Any:
            run = partial(placed.outputs, stage, hidden, packed, layout)
            return finish(batch, loss_fn, run() if rows is None else rows.inside(placed.model, run), non_loss_data)

        return stage(packed, layout), last

    return step
