"""The bytes that a pass needs besides weights and their gradients, found by running the model on fake tensors.

All blocks of a model are alike, so runs of one block and of two give the bytes of each further block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightrl.models import logprobs
from lightrl.plan.meter import StorageMeter
from lightrl.plan.models import Model, fake, faked
from lightrl.plan.split import split_over
from lightrl.plan.trees import paper_tree, saved_by, share_on_paper
from lightrl.records import PackedBatch
from lightrl.sharing.tree import with_tree
from lightrl.strategy.computation import compute_in_bfloat16, enable_gradient_checkpointing
from lightrl.strategy.fsdp import transformer_blocks

Computation = Literal["float32", "autocast", "bfloat16"]  # with bfloat16, weights come in it, as FSDP gathers them


@dataclass(frozen=True, slots=True, kw_only=True)
class PackShape:
    """A micro-batch of equal sequences."""

    num_sequences: int
    length: int  # tokens of a sequence with its prompt
    num_scored: int  # tokens of a sequence
    families: tuple[int, ...] = ()  # numbers of sequences per prompt that is computed once; empty: all are whole

    @property
    def num_tokens(self) -> int:
        """Tokens of the pack."""
        return self.num_sequences * self.length

    @property
    def num_computed(self) -> int:
        """Tokens that the model runs."""
        return self.num_tokens - sum(saved_by(size, self.length - self.num_scored) for size in self.families)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a rank that change the memory of a pass."""

    computation: Computation = "float32"
    checkpointing: bool = False
    trains: bool = True  # whether there is a backward
    tp_size: int = 1
    sp_size: int = 1
    on_accelerator: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The bytes of a forward, and of its backward if there is one."""

    top: float  # the peak until gradients reach the first block
    bottom: float  # the peak after that


@lru_cache(maxsize=64)
def needs_of(model: Model, pack: PackShape, settings: Settings) -> Pass:
    """Returns the memory of a pass over this rank's part of the model and of the pack."""
    one, two = (_measured(model, pack, num_layers, settings) for num_layers in (1, 2))
    return Pass(top=one.top + (model.num_layers - 1) * (two.top - one.top), bottom=max(one.bottom, two.bottom))


def needs_of_few(model: Model, pack: PackShape, *, trains: bool, on_accelerator: bool) -> tuple[Pass, Pass]:
    """Returns the memory of a pass of one block and of a pass of two, in float32."""
    settings = Settings(trains=trains, on_accelerator=on_accelerator)
    one, two = (_measured(model, pack, count, settings) for count in (1, 2))
    return one, two


def _measured(model: Model, pack: PackShape, num_layers: int, settings: Settings) -> Pass:
    """Runs the model with fewer layers. A mixture's experts run in bfloat16, the only type their fake kernel takes."""
    is_mixture = bool(getattr(model.hf_config.get_text_config(), "num_experts", 0))
    trains, computation = settings.trains, settings.computation
    module = model.smaller(num_layers, settings.tp_size)
    tree = paper_tree(pack.families, pack.length - pack.num_scored, pack.num_scored) if pack.families else None
    with (
        fake(),
        tiles_of(settings.on_accelerator),
        split_over(module, settings.sp_size),
        torch.set_grad_enabled(trains),
    ):
        module = faked(module).train(trains)
        if settings.checkpointing and trains:
            enable_gradient_checkpointing(getattr(module, "hf", module))
        if computation == "bfloat16" or is_mixture:
            to_half(module)
        elif computation == "autocast":
            compute_in_bfloat16(module, torch.device("cpu"))
        if tree is not None:
            share_on_paper(module, is_copied=settings.on_accelerator)
        batch = paper_batch(pack) if tree is None else with_tree(paper_batch(pack), tree)
        measured = _run(module, batch, trains)
    factor = 2 if is_mixture and computation == "float32" else 1
    return Pass(top=factor * measured.top, bottom=factor * measured.bottom)


def _run(module: nn.Module, batch: PackedBatch, trains: bool) -> Pass:
    meter = StorageMeter([*module.parameters(), *module.buffers()])
    tops: list[int] = []

    def drop(parameter: Tensor, is_first_block: bool) -> None:
        if is_first_block and not tops:
            tops.append(meter.peak)
            meter.peak = meter.live
        parameter.grad = None

    first = {id(parameter) for block in _text_blocks(module)[:1] for parameter in block.parameters()}
    for parameter in module.parameters() if trains else ():
        if parameter.requires_grad:
            is_first = id(parameter) in first
            parameter.register_post_accumulate_grad_hook(lambda item, is_first=is_first: drop(item, is_first))
    with meter:
        output = module(batch)
        if trains:
            _loss(output).backward()
    return Pass(top=tops[0] if tops else meter.peak, bottom=meter.peak if tops else 0)


def _text_blocks(module: nn.Module) -> list[nn.Module]:
    """Returns the blocks of the decoder, without those of a vision tower."""
    inner = next(child for child in module.modules() if isinstance(child, PreTrainedModel))
    return transformer_blocks(inner.get_decoder())


def _loss(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output.sum()
    parts = [getattr(output, name) for name in ("logprobs", "values") if hasattr(output, name)]
    return torch.stack([part.sum() for part in parts]).sum()


def paper_batch(pack: PackShape) -> PackedBatch:
    """Returns a micro-batch of meaningless tokens."""
    num_tokens, num_scored = pack.num_tokens, pack.num_sequences * pack.num_scored
    index = torch.zeros(num_scored, dtype=torch.int64)
    return PackedBatch(
        input_ids=torch.zeros(num_tokens, dtype=torch.int64),
        position_ids=torch.zeros(num_tokens, dtype=torch.int64),
        cu_seqlens=tuple(range(0, num_tokens + 1, pack.length)),
        score_index=index,
        targets=index,
        sequence_index=index,
        loss_mask=index.bool(),
        advantages=index.float(),
        sampler_logprobs=index.float(),
        temperature=1.0,
        keys=tuple((0, number) for number in range(pack.num_sequences)),
    )


def to_half(module: nn.Module) -> None:
    """Rounds the weights as FSDP gathers them, except for modules that compute in float32."""
    for child in module.modules():
        if not getattr(child, "computes_in_float32", False):
            for parameter in child.parameters(recurse=False):
                parameter.data = parameter.data.to(torch.bfloat16)


@contextmanager
def tiles_of(on_accelerator: bool) -> Iterator[None]:
    """Makes scoring use tiles of the size that suits the device, inside the context."""
    own = logprobs._CPU_TILE
    logprobs._CPU_TILE = logprobs._ACCELERATOR_TILE if on_accelerator else own
    try:
        yield
    finally:
        logprobs._CPU_TILE = own
