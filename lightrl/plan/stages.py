"""The bytes that a stage of --strategy megatron needs for its passes, with waiting micro-batches.

A stage begins with the micro-batches that fill the later stages, and then alternates between forward and backward. So
the first stage keeps as many micro-batches as there are stages, and the last keeps one and computes the logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from lightrl.config import RunConfig
from lightrl.plan.activations import PackShape, needs_of_few, tiles_of, to_half
from lightrl.plan.meter import StorageMeter
from lightrl.plan.models import Model, fake, faked
from lightrl.plan.paper_stage import PaperStage, RankShape
from lightrl.plan.rectangles import is_tied
from lightrl.strategy.megatron import deepseek
from lightrl.strategy.megatron.checks import num_experts
from lightrl.strategy.megatron.parts import padded_rows, sizes_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StageNeed:
    """The bytes of a stage's passes."""

    kept: float  # per micro-batch that waits for its backward
    waiting: int  # micro-batches that wait at the same time, including the current one
    work: float  # the most that a pass needs in addition

    @property
    def first_backward(self) -> float:
        """The bytes when the first backward begins."""
        return self.kept * self.waiting + self.work

    @property
    def next_backward(self) -> float:
        """The bytes when the next backward begins without a forward in between."""
        return self.kept * (self.waiting - 1) + self.work


def stage_need(
    model: Model,
    pack: PackShape,
    config: RunConfig,
    stage: int,
    *,
    micro_batches: int,
    trains: bool,
    on_accelerator: bool,
) -> StageNeed:
    """Returns what a stage needs; a pass without a backward keeps nothing for later."""
    chosen = config.megatron
    layers = model.num_layers // (chosen.pp_size * chosen.vpp_size)
    if model.hf_config.get_text_config().model_type == deepseek.KIND:
        found = _latent(model, pack, config, stage, trains=trains, on_accelerator=on_accelerator)
    else:
        found = _of_stage(model, pack, config, stage, trains=trains, on_accelerator=on_accelerator)
    if not trains:
        return StageNeed(kept=found.outside + found.layer, waiting=1, work=found.work)
    chunks = min(_chunks_in_flight(config, stage), micro_batches * chosen.vpp_size)
    waiting = -(-chunks // chosen.vpp_size)
    kept = found.outside + found.layer * layers * chunks / waiting
    return StageNeed(kept=kept, waiting=waiting, work=found.work)


def _of_stage(
    model: Model, pack: PackShape, config: RunConfig, stage: int, *, trains: bool, on_accelerator: bool
) -> _Found:
    return _measured(
        rank_shape(model, pack, config),
        is_first=stage == 0,
        is_last=stage == config.megatron.pp_size - 1,
        has_output=_has_output(model),
        in_half=config.dtype == "bfloat16",
        trains=trains,
        on_accelerator=on_accelerator,
    )


def _chunks_in_flight(config: RunConfig, stage: int) -> int:
    """Returns how many forwards of chunks a stage has run when its first backward begins."""
    stages, chunks = config.megatron.pp_size, config.megatron.vpp_size
    behind = stages - stage - 1
    return behind + 1 if chunks == 1 else 2 * behind + (chunks - 1) * stages + 1


def _has_output(model: Model) -> bool:
    return is_tied(model) or any(weight.name.endswith("lm_head.weight") for weight in model.weights)


def rank_shape(model: Model, pack: PackShape, config: RunConfig) -> RankShape:
    """Returns the shape of a rank's part of a layer and of a micro-batch."""
    text, sizes = model.hf_config.get_text_config(), sizes_of(config)
    split_by = sizes.tp if config.megatron.sequence_parallel else 1
    piece = 2 * sizes.cp if sizes.cp > 1 else 1
    lengths = [-(-pack.length // piece) * piece] * pack.num_sequences
    while sum(lengths) // sizes.cp % split_by:
        lengths[-1] += piece
    experts = num_experts(text)
    width = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
    names = [weight.name for weight in model.weights]
    return RankShape(
        hidden_size=text.hidden_size,
        num_heads=text.num_attention_heads // sizes.tp,
        num_groups=text.num_key_value_heads // sizes.tp,
        head_size=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        width=width // sizes.etp if experts else text.intermediate_size // sizes.tp,
        num_rows=padded_rows(text.vocab_size, sizes.tp) // sizes.tp,
        has_query_norm=any("q_norm" in name for name in names),
        has_bias=any("q_proj.bias" in name for name in names),
        num_experts=experts // sizes.ep,
        all_experts=experts,
        experts_per_token=getattr(text, "num_experts_per_tok", 0) or 0,
        expert_parts=sizes.etp,
        split_by=split_by,
        cp=sizes.cp,
        lengths=tuple(lengths),
        num_scored=-(-pack.num_sequences * pack.num_scored // sizes.cp),
        recompute=config.megatron.recompute == "full",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The bytes that a micro-batch keeps per layer and outside of layers, and what its pass needs in addition."""

    layer: float
    outside: float
    work: float


@lru_cache(maxsize=64)
def _measured(
    shape: RankShape,
    *,
    is_first: bool,
    is_last: bool,
    has_output: bool,
    in_half: bool,
    trains: bool,
    on_accelerator: bool,
) -> _Found:
    """Runs stages of one layer and of two on fake tensors: the difference is what a layer needs."""
    held, peaks = [], []
    for num_layers in (1, 2):
        stage = PaperStage(shape, num_layers, is_first=is_first, is_last=is_last, has_output=has_output)
        with fake(), tiles_of(on_accelerator), torch.set_grad_enabled(trains):
            faked(stage)
            if in_half:
                to_half(stage)
            own, peak = _run(stage, trains)
        held.append(own)
        peaks.append(peak)
    layer = held[1] - held[0]
    return _Found(layer=layer, outside=held[0] - layer, work=peaks[1] - held[1])


def _run(stage: PaperStage, trains: bool) -> tuple[int, int]:
    """Returns the bytes that wait for a backward, and the peak during that backward."""

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None  # gradients are counted separately

    for parameter in stage.parameters() if trains else ():
        parameter.register_post_accumulate_grad_hook(drop)
    meter = StorageMeter([*stage.parameters()])
    with meter:
        output = stage(stage.pack())
        held = meter.live
        if trains:
            output.backward(torch.empty_like(output))  # sent by the next stage
    return held, meter.peak


def _latent(
    model: Model, pack: PackShape, config: RunConfig, stage: int, *, trains: bool, on_accelerator: bool
) -> _Found:
    """Measures a DeepSeek-V3, for whose attention there is no paper layer, with the modules of transformers."""
    one, two = needs_of_few(model, pack, trains=trains, on_accelerator=on_accelerator)
    layer = two.top - one.top
    is_last = stage == config.megatron.pp_size - 1
    work = one.top - layer if is_last else max(0.0, two.bottom - layer)
    return _Found(layer=layer, outside=0, work=work)
