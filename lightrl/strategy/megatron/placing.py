"""Places a lightrl model in a Megatron layout: builds this rank's stages and ties them to the model's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightrl.models.critic import ActorCritic, Critic, ValueHead
from lightrl.models.policy import Policy
from lightrl.models.reward_model import HEAD_NAME, RewardModel, last_positions
from lightrl.models.routing_replay import detach_replay
from lightrl.records import PackedBatch, ScoresAndValues, StateValues, TokenScores
from lightrl.strategy.layout.materialize import to_meta
from lightrl.strategy.megatron import parts
from lightrl.strategy.megatron.checks import check_model, num_experts
from lightrl.strategy.megatron.layout import HELD, Held
from lightrl.strategy.megatron.packing import Pack
from lightrl.strategy.megatron.ranks import Ranks
from lightrl.strategy.megatron.stage import Shape, Stage, core_config

PLACED = "megatron_placed"  # a key of the model's __dict__


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The chunks of a model that a rank holds."""

    stages: Sequence[Stage]
    ranks: Ranks
    model: nn.Module

    def outputs(self, stage: Stage, hidden: Tensor, batch: PackedBatch, pack: Pack) -> Any:
        """Returns the outputs of the model's forward, computed from the states after the last layer."""
        model = self.model
        if isinstance(model, Critic):
            values, final = _values(stage, hidden, batch, pack)
            return StateValues(values=values, final_values=final)
        if isinstance(model, RewardModel):
            positions = last_positions(
                batch.input_ids, batch.cu_seqlens, model.hf.config.get_text_config().pad_token_id
            )
            return stage.values_at(hidden, positions, pack)
        assert isinstance(model, Policy)
        if "scores" in model.__dict__:  # replaced by a user's function of the logits for a while
            return model.scores(stage.all_states(hidden, pack), batch)
        logprobs, entropy = stage.token_scores(hidden, batch, pack, with_entropy=model.entropy)
        routing = None if stage.replay is None else stage.replay.scores(pack)
        if isinstance(model, ActorCritic):
            values, final = _values(stage, hidden, batch, pack)
            return ScoresAndValues(
                logprobs=logprobs, entropy=entropy, routing=routing, values=values, final_values=final
            )
        return TokenScores(logprobs=logprobs, entropy=entropy, routing=routing)


def placed_of(model: nn.Module) -> Placed:
    """Returns the chunks of a model; raises ValueError if it has none."""
    placed: Placed | None = model.__dict__.get(PLACED)
    if placed is None:
        raise ValueError(f"This {type(model).__name__} is not placed yet. Pass it to prepare() first.")
    return placed


def place(model: nn.Module, ranks: Ranks, *, device: torch.device, recompute: bool, shards_states: bool) -> Placed:
    """Builds this rank's stages, whose weights are not set yet, and moves the model itself to the meta device."""
    if not isinstance(model, Policy | Critic | RewardModel):
        raise ValueError(
            "--strategy megatron trains lightrl's Policy, ActorCritic, Critic and RewardModel, not "
            f"{type(model).__name__}. Use --strategy fsdp."
        )
    inner: Any = model.body if isinstance(model, Critic) else model.hf
    decoder = inner.get_decoder()
    check_model(model, decoder.config, ranks.sizes, sequence_parallel=ranks.sequence_parallel)
    shape = _shape_of(inner, decoder, device, replays_routing=detach_replay(model))
    to_meta(model)
    head = _head(model, shape.text.hidden_size)
    config = core_config(shape, ranks, recompute=recompute)
    stages = [Stage(config, shape, ranks, chunk, head).to(device) for chunk in range(ranks.sizes.vpp)]
    _tie(model, decoder, stages, shape, ranks, shards_states=shards_states)
    placed = Placed(stages=stages, ranks=ranks, model=model)
    model.__dict__[PLACED] = placed
    model.__dict__["logits_of"] = stages[-1].logits_of  # the last stage has the output layer
    model.__dict__["forward"] = partial(_forward, placed)  # overrides its class's
    return placed


def _head(model: nn.Module, hidden_size: int) -> nn.Linear | None:
    """Returns a head for the last stage that gives one number per token; its weights are not set."""
    if isinstance(model, RewardModel):
        head = nn.Linear(hidden_size, 1, bias=False)
        head.computes_in_float32 = True  # type: ignore[assignment]  # as the model's own
        return head
    return ValueHead(hidden_size) if hasattr(model, "value_head") else None


def _shape_of(inner: Any, decoder: Any, device: torch.device, *, replays_routing: bool) -> Shape:
    names = {name for name, _ in decoder.named_parameters()}
    output = inner.get_output_embeddings()
    return Shape(
        text=decoder.config,
        rotary=type(decoder.rotary_emb)(config=decoder.config).to(device),
        has_output=output is not None,
        is_tied=output is not None and output.weight is decoder.embed_tokens.weight,
        has_query_norm=any("q_norm" in name for name in names),
        has_bias=any("q_proj.bias" in name for name in names),
        num_experts=num_experts(decoder.config),
        replays_routing=replays_routing,
        padding_id=decoder.embed_tokens.padding_idx,
    )


def _tie(
    model: nn.Module, decoder: nn.Module, stages: Sequence[Stage], shape: Shape, ranks: Ranks, *, shards_states: bool
) -> None:
    """Records on each parameter of the model which part of it this rank holds."""
    names = {id(parameter): name for name, parameter in decoder.named_parameters()}
    loads: dict[int, list[int]] = {}  # by group of replicas: the number of elements that each replica steps
    for name, parameter in sorted(model.named_parameters()):
        slot = _slot(names.get(id(parameter)), name, shape, ranks)
        held = None if slot is None else _hold(parameter, slot, stages, ranks, loads if shards_states else None)
        setattr(parameter, HELD, held)


def _slot(name: str | None, outer_name: str, shape: Shape, ranks: Ranks) -> parts.Slot | None:
    if name is not None:
        layers = shape.text.num_hidden_layers
        return parts.slot_of(name, ranks.sizes, ranks.place, num_layers=layers, is_tied=shape.is_tied)
    if not ranks.is_last_stage:
        return None
    last = ranks.sizes.vpp - 1
    if outer_name.startswith("value_head."):
        return parts.Slot(chunk=last, path=outer_name, cut=parts.WHOLE)
    if outer_name.endswith(f".{HEAD_NAME}.weight"):
        return parts.Slot(chunk=last, path="value_head.weight", cut=parts.WHOLE)
    assert outer_name.endswith("lm_head.weight"), outer_name
    return parts.Slot(chunk=last, path="output_weight", cut=parts.ROWS)


def _hold(
    parameter: nn.Parameter,
    slot: parts.Slot,
    stages: Sequence[Stage],
    ranks: Ranks,
    loads: dict[int, list[int]] | None,
) -> Held:
    local = stages[slot.chunk].get_parameter(slot.path)
    local.requires_grad_(parameter.requires_grad)
    if slot.cut == parts.ROWS:
        with torch.no_grad():
            local.zero_()  # rows of padding stay zero
    is_expert = slot.cut in (parts.EXPERT_ROWS, parts.EXPERT_COLUMNS)
    replicas = ranks.expert_replicas if is_expert else ranks.replicas
    is_split = is_expert or slot.cut in (parts.ROWS, parts.COLUMNS)
    is_first = not slot.is_copy and (is_split or ranks.place.tp == 0)
    owner = -1 if loads is None else _least_loaded(local, replicas, loads)
    return Held(
        local=local,
        part=parts.part_of(tuple(parameter.shape), slot.cut, ranks.sizes, ranks.place),
        is_first_holder=is_first and dist.get_rank(replicas) == 0,
        sums=_sums(slot, replicas, ranks),
        replicas=replicas,
        owner=owner,
        has_states=is_first and dist.get_rank(replicas) == max(owner, 0),
    )


def _sums(slot: parts.Slot, replicas: dist.ProcessGroup, ranks: Ranks) -> tuple[dist.ProcessGroup, ...]:
    """Returns the groups over which the gradient of a parameter is summed."""
    groups = [replicas]
    is_before_split = slot.cut == parts.WHOLE and ranks.sequence_parallel and not slot.path.startswith("value_head")
    if slot.cut == parts.PER_HEAD or is_before_split:
        groups.append(ranks.tensors)  # each rank saw only its own heads or tokens
    if slot.joins_ends:
        assert ranks.ends is not None
        groups.append(ranks.ends)
    return tuple(group for group in groups if dist.get_world_size(group) > 1)


def _least_loaded(local: Tensor, replicas: dist.ProcessGroup, loads: dict[int, list[int]]) -> int:
    """Returns the replica with the fewest elements so far, which gets a parameter's states; all replicas agree."""
    size = dist.get_world_size(replicas)
    load = loads.setdefault(id(replicas), [0] * size)
    owner = min(range(size), key=load.__getitem__)
    load[owner] += local.numel()
    return owner


def _values(stage: Stage, hidden: Tensor, batch: PackedBatch, pack: Pack) -> tuple[Tensor, Tensor]:
    """Returns the values of the states that choose response tokens, and of each sequence's last state."""
    last_tokens = torch.tensor(batch.cu_seqlens[1:], device=batch.score_index.device) - 1
    values = stage.values_at(hidden, torch.cat([batch.score_index, last_tokens]), pack)
    num_scored = batch.score_index.shape[0]
    return values[:num_scored], values[num_scored:]


def _forward(placed: Placed, batch: PackedBatch) -> Any:
    """The model's forward if one stage has all layers."""
    if len(placed.stages) > 1 or placed.ranks.sizes.pp > 1:
        raise ValueError(
            f"With --megatron.pp_size {placed.ranks.sizes.pp} no rank can run the model by itself: call "
            "strategy.train_batch() or strategy.forward()."
        )
    (stage,) = placed.stages
    pack = stage.pack(batch)
    return placed.outputs(stage, stage(batch, pack), batch, pack)
