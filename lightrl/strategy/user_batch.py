"""train_batch, eval_batch and forward for a user's dictionary of tensors, with a loss function of logits.

Sequences are spread evenly over ranks and micro-batches and packed end to end. The loss is computed inside the model's
forward, because a sharded output layer is whole only there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightrl.comm import Comm
from lightrl.data.balance import assign_to_ranks
from lightrl.data.packing import split_micro_batches
from lightrl.data.token_dict import (
    Kind,
    Kinds,
    TokenPack,
    TokenRow,
    UserBatch,
    dummy_row,
    kinds_of,
    next_token,
    pack_rows,
    read_rows,
    rows_of_pack,
)
from lightrl.models.lazy_logits import Logits, gather_logprobs, gather_logprobs_entropy
from lightrl.models.policy import Policy
from lightrl.strategy.results import Batches, LossFn, TrainBatchResult, WeightFn

__all__ = ["Logits", "UserBatch", "gather_logprobs", "gather_logprobs_entropy", "next_token"]


Strategy = Any  # a StrategyBase, which imports this module


def train_on_dict(
    strategy: Strategy, data: Mapping[str, Any], loss_fn: LossFn, weight_fn: WeightFn, model: nn.Module | None
) -> TrainBatchResult:
    """Takes one optimizer step; loss_fn(logits, packed data) is a mean over weight_fn(packed data) tokens."""
    trained = strategy.trained.entry(model).model
    packs = _micro_batches(strategy, data, over_ranks=True)
    with computing(trained, _mean_loss(loss_fn, weight_fn)):
        result: TrainBatchResult = strategy.train_batch(packs, _as_it_is, _weight(weight_fn), model=trained)
        return result


def evaluate(strategy: Strategy, data: Batches, loss_fn: LossFn, weight_fn: WeightFn, model: nn.Module | None) -> float:
    """Returns the loss that train_batch() would report, without training."""
    if isinstance(data, Mapping):
        return _evaluate_on_dict(strategy, data, loss_fn, weight_fn, model)
    outputs = strategy.forward(data, model=model)
    weights = [float(weight_fn(micro_batch)) for micro_batch in data]
    losses = [float(loss_fn(output, micro_batch)) for output, micro_batch in zip(outputs, data, strict=True)]
    weighted = sum((loss * weight for loss, weight in zip(losses, weights, strict=True) if weight), 0.0)
    total: dict[str, float] = strategy.comm.all_reduce({"loss": weighted, "weight": sum(weights, 0.0)}, "sum")
    return total["loss"] / total["weight"] if total["weight"] else 0.0


def _evaluate_on_dict(
    strategy: Strategy, data: Mapping[str, Any], loss_fn: LossFn, weight_fn: WeightFn, model: nn.Module | None
) -> float:
    chosen = model if model is not None else strategy.trained.entry(None).model
    packs = _micro_batches(strategy, data, over_ranks=True)
    with computing(chosen, _mean_loss(loss_fn, weight_fn)):
        return evaluate(strategy, packs, _as_it_is, _weight(weight_fn), chosen)


def token_logprobs(strategy: Strategy, data: Mapping[str, Any], model: nn.Module | None) -> Tensor:
    """Returns the log-probability of every token, in the shape of input_ids; 0 for first tokens and padding."""
    chosen = model if model is not None else strategy.trained.entry(None).model
    packs = _micro_batches(strategy, data, over_ranks=False)
    with computing(chosen, lambda logits, pack: gather_logprobs(logits, next_token(pack.data, "input_ids"))):
        outputs = strategy.forward(packs, model=chosen)
    ids = torch.as_tensor(data["input_ids"])
    result = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
    bounds = torch.as_tensor(data["cu_seqlens"]).tolist() if ids.dim() == 1 else []
    for pack, output in zip(packs, outputs, strict=True):
        for index, values in rows_of_pack(pack, output):
            if ids.dim() == 1:
                own = result[bounds[index] : bounds[index + 1]]
                own[1:] = values[:-1].to(own)
            else:
                places = torch.as_tensor(data["attention_mask"])[index].bool().nonzero()[1:, 0]
                result[index, places] = values[:-1].to(result)
    return result


# ---- Micro-batches -----------------------------------------------------------------------------------------------


def _micro_batches(strategy: Strategy, data: Mapping[str, Any], *, over_ranks: bool) -> list[TokenPack]:
    """Returns this rank's micro-batches; every rank gets the same number."""
    comm = strategy.comm
    batch = data if isinstance(data, UserBatch) else UserBatch(data)
    with comm.phase("reading a batch", local=True):
        rows = read_rows(batch)
        kinds = kinds_of(batch)
    kinds = _agreed(comm, kinds if rows else None)
    if over_ranks:
        rows = _balanced(comm, rows)
    limits = _limits(strategy, batch)
    with comm.phase("micro-batches", local=True) as agreed:
        parts = split_micro_batches(rows, **limits)
        agreed.largest = len(parts)
    if len(parts) < agreed.largest:
        parts = split_micro_batches(rows, min_num=agreed.largest, **limits)
    return [pack_rows(part or [dummy_row(kinds)]).to(strategy.device) for part in parts]


def _agreed(comm: Comm, kinds: Kinds | None) -> Kinds:
    """Returns the kinds of the keys, on which all ranks that have sequences must agree."""
    everywhere = [(rank, theirs) for rank, theirs in enumerate(comm.all_gather_object(kinds)) if theirs is not None]
    if not everywhere:
        raise ValueError("No rank has a sequence: give train_batch at least one.")
    first_rank, first = everywhere[0]
    for rank, theirs in everywhere[1:]:
        for name in sorted({*first, *theirs}):
            if first.get(name) != theirs.get(name):
                raise ValueError(
                    f"{name!r} of the batch is {_kind(first.get(name))} on rank {first_rank} and "
                    f"{_kind(theirs.get(name))} on rank {rank}. Give every rank the same keys, and say what shapes do "
                    "not tell by UserBatch(data, per_token=..., per_sequence=...)."
                )
    return first


def _kind(kind: Kind | None) -> str:
    if kind is None:
        return "missing"
    is_token, dtype, shape = kind
    return f"{'per token' if is_token else 'per sequence'}, {dtype}, {list(shape)}"


def _balanced(comm: Comm, rows: list[TokenRow]) -> list[TokenRow]:
    """Moves sequences between ranks until all have about the same number of tokens."""
    lengths = comm.all_gather_object([row.num_tokens for row in rows])
    first = sum(len(theirs) for theirs in lengths[: comm.rank])
    rows = [replace(row, index=first + row.index) for row in rows]
    owners = [rank for rank, theirs in enumerate(lengths) for _ in theirs]
    targets = assign_to_ranks([length for theirs in lengths for length in theirs], owners, comm.world)
    outgoing: list[list[TokenRow]] = [[] for _ in range(comm.world)]
    for row in rows:
        outgoing[targets[row.index]].append(row)
    return comm.exchange(outgoing)


def _limits(strategy: Strategy, batch: UserBatch) -> dict[str, Any]:
    if batch.max_tokens is not None or batch.max_sequences is not None:
        return {"max_tokens": batch.max_tokens, "max_samples": batch.max_sequences}
    tokens = getattr(strategy.options, "max_tokens_per_microbatch", None)
    if tokens is None or strategy.options.micro_batch_size:
        return {"max_tokens": None, "max_samples": strategy.micro_train_batch_size}
    return {"max_tokens": tokens, "max_samples": None}


# ---- The loss ----------------------------------------------------------------------------------------------------


def _as_it_is(loss: Tensor, pack: TokenPack) -> Tensor:
    return loss


def _weight(weight_fn: WeightFn) -> Callable[[TokenPack], float]:
    return lambda pack: float(weight_fn(pack.data)) if pack.indices else 0.0


def _mean_loss(loss_fn: LossFn, weight_fn: WeightFn) -> Callable[[Any, TokenPack], Tensor]:
    weight = _weight(weight_fn)

    def nothing(logits: Any, pack: TokenPack) -> Tensor:
        """Returns 0 with a gradient of 0, because every rank must run every backward."""
        return 0.0 * gather_logprobs(logits[:1], pack.input_ids[:1]).sum()

    def compute(logits: Any, pack: TokenPack) -> Tensor:
        if not weight(pack):
            return nothing(logits, pack)  # a mean over no token would be NaN
        loss = loss_fn(logits, pack.data)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(
                "A loss function must return one number, the mean over the tokens that loss_weight_fn counts, not "
                f"{list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__}."
            )
        return loss.sum() if loss.requires_grad else loss.sum() + nothing(logits, pack)  # sum() drops a dim of 1

    return compute


def _check_policy(policy: Policy) -> None:
    if policy.sequence_group is not None or type(policy).forward is not Policy.forward:
        raise ValueError(
            "train_batch over a dictionary takes no --sp_size above 1 and no policy with a value head. Use --tp_size, "
            "or give train_batch micro-batches that lightrl.data.packing.pack made."
        )


@contextmanager
def computing(model: nn.Module, compute: Callable[[Any, TokenPack], Tensor]) -> Iterator[None]:
    """Makes the model's forward return compute(logits, pack) inside the context.

    A Policy computes the logits in chunks. Any other model is called with padded rows, and its logits stay in memory.
    """
    name = "scores" if isinstance(model, Policy) else "forward"
    method: Any
    if isinstance(model, Policy):
        _check_policy(model)
        method = lambda hidden, pack: compute(Logits.of(model, hidden), pack)  # noqa: E731
    else:
        method = _padded(model.forward, compute)
    before = model.__dict__.get(name)
    model.__dict__[name] = method
    try:
        yield
    finally:
        del model.__dict__[name]
        if before is not None:
            model.__dict__[name] = before


def _padded(forward: Callable[..., Any], compute: Callable[[Any, TokenPack], Tensor]) -> Callable[[TokenPack], Tensor]:
    def run(pack: TokenPack) -> Tensor:
        lengths = torch.tensor(pack.cu_seqlens, device=pack.input_ids.device).diff()
        places = torch.arange(int(lengths.max()), device=lengths.device).expand(len(lengths), -1)
        is_real = places < lengths[:, None]
        ids = torch.zeros_like(places).masked_scatter(is_real, pack.input_ids)
        output = forward(input_ids=ids, attention_mask=is_real.long(), position_ids=places)
        logits = output.logits if hasattr(output, "logits") else output[0] if isinstance(output, tuple) else output
        return compute(logits[is_real].float(), pack)

    return run
