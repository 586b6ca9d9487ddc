"""Trains on a user's dictionary in many forms on any number of ranks; every form must give plain torch's gradient.

python user_batch_program.py [options of train_grpo.py]
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch.nn import functional as F
from torch.testing import assert_close

from lightrl.config import GRPOConfig, parse_config
from lightrl.strategy import create_strategy
from lightrl.strategy.user_batch import UserBatch, gather_logprobs, gather_logprobs_entropy, next_token
from lightrl.testing.tiny_training import VOCAB, parameters, samples, tiny_policy

COUNT = 10  # samples; the last has an empty response


def rows() -> list[dict[str, Any]]:
    found = []
    for item in samples(0, COUNT):
        prompt = list(item.sample.prompt.token_ids)
        response = list(item.sample.response_ids) if item.sample.position < COUNT - 1 else []
        scale = torch.arange(len(prompt + response)) / 10  # a value per token
        mask = [0] * len(prompt) + [1] * len(response)
        found.append({"input_ids": prompt + response, "loss_mask": mask, "scale": scale, "reward": item.advantage})
    return found


def padded(mine: list[dict[str, Any]], *, left: bool = False) -> dict[str, Any]:
    width = max((len(row["input_ids"]) for row in mine), default=3) + 2

    def column(name: str) -> torch.Tensor:
        values = [torch.as_tensor(row[name]) for row in mine]
        cut = [F.pad(v, (width - len(v), 0) if left else (0, width - len(v)), value=1) for v in values]
        return torch.stack(cut) if cut else torch.zeros(0, width)

    ones = [{"x": torch.ones(len(row["input_ids"]), dtype=torch.int64)} for row in mine]
    masks = [F.pad(o["x"], (width - len(o["x"]), 0) if left else (0, width - len(o["x"]))) for o in ones]
    return {
        "input_ids": column("input_ids").long(),
        "attention_mask": torch.stack(masks) if masks else torch.zeros(0, width, dtype=torch.int64),
        "loss_mask": column("loss_mask").long(),
        "scale": column("scale").float(),
        "reward": torch.tensor([row["reward"] for row in mine]),
    }


def packed(mine: list[dict[str, Any]]) -> dict[str, Any]:
    bounds = torch.tensor([0, *[len(row["input_ids"]) for row in mine]]).cumsum(0)
    joined = {name: [torch.as_tensor(row[name]) for row in mine] for name in ("input_ids", "loss_mask", "scale")}
    tensors = {name: torch.cat(parts) if parts else torch.zeros(0) for name, parts in joined.items()}
    tensors = {**tensors, "input_ids": tensors["input_ids"].long(), "loss_mask": tensors["loss_mask"].long()}
    return {**tensors, "scale": tensors["scale"].float(), "cu_seqlens": bounds,
            "reward": torch.tensor([row["reward"] for row in mine])}  # fmt: skip


def weight_fn(data: dict[str, torch.Tensor]) -> torch.Tensor:
    return data["loss_mask"].count_nonzero()


def mean_of(data: dict[str, torch.Tensor], logprobs: torch.Tensor) -> torch.Tensor:
    assert data["attention_mask"].all() if "attention_mask" in data else True
    mask = next_token(data, "loss_mask").bool()
    rewards = data["reward"].repeat_interleave(data["cu_seqlens"].diff().long())
    terms = -logprobs * rewards * (1 + next_token(data, "scale"))
    return torch.where(mask, terms, 0.0).sum() / mask.count_nonzero()


def by_helper(logits: Any, data: dict[str, torch.Tensor]) -> torch.Tensor:
    return mean_of(data, gather_logprobs(logits, next_token(data, "input_ids")))


def by_hand(logits: Any, data: dict[str, torch.Tensor]) -> torch.Tensor:
    """The form of code for other engines: tokens rolled over the ends of sequences, where nothing is trained."""
    labels = torch.roll(data["input_ids"], shifts=-1, dims=-1)
    return mean_of(data, torch.log_softmax(logits.float(), dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1))


def by_cross_entropy(logits: Any, data: dict[str, torch.Tensor]) -> torch.Tensor:
    return mean_of(data, -F.cross_entropy(logits, next_token(data, "input_ids"), reduction="none"))


def with_entropy(logits: Any, data: dict[str, torch.Tensor]) -> torch.Tensor:
    logprobs, entropy = gather_logprobs_entropy(logits, next_token(data, "input_ids"))
    logp = logits.log_softmax(-1)
    assert_close(-(logp.exp() * logp).sum(-1), entropy, atol=1e-5, rtol=0)
    return mean_of(data, logprobs)


def reference() -> tuple[float, dict[str, torch.Tensor], list[torch.Tensor]]:
    """Plain torch, one sequence at a time, full logits."""
    model: Any = tiny_policy().hf
    model.set_attn_implementation("eager")
    total, count, logprobs = torch.zeros(()), 0, []
    for row in rows():
        ids = torch.tensor(row["input_ids"])
        logp = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        own = torch.cat([torch.zeros(1), logp[:-1].gather(1, ids[1:, None])[:, 0]])
        terms = -own * row["reward"] * (1 + row["scale"]) * torch.tensor(row["loss_mask"])
        total, count = total + terms.sum(), count + sum(row["loss_mask"])
        logprobs.append(own.detach())
    (total / count).backward()
    return float(total.detach()) / count, {n: p.grad for n, p in model.named_parameters()}, logprobs


def check(strategy: Any, batch: dict[str, Any], loss_fn: Any, wanted: Any, *, plain_model: bool = False) -> None:
    strategy.trained.entries = []
    model: Any = tiny_policy()
    if plain_model:
        model = model.hf
        model.set_attn_implementation("sdpa")
    model = strategy.prepare_model(model)
    strategy.register(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0))
    before = parameters(strategy, model)
    loss, gradient, _ = wanted
    assert_close(strategy.eval_batch(batch, loss_fn, weight_fn, model=model), loss, atol=1e-6, rtol=0)
    result = strategy.train_batch(batch, loss_fn, loss_weight_fn=weight_fn, model=model)
    assert_close(result.loss, loss, atol=1e-6, rtol=0)
    for name, value in parameters(strategy, model).items():
        assert_close(before[name] - value, gradient[name], atol=1e-6, rtol=0, msg=lambda text, n=name: f"{n}: {text}")
    counts = strategy.comm.all_gather_object(result.num_micro_batches)
    assert len(set(counts)) == 1, counts


def check_forward(strategy: Any, mine: list[dict[str, Any]], wanted: Any, which: slice) -> None:
    policy = strategy.prepare_model(tiny_policy())
    expected = wanted[2][which]
    batch = padded(mine)
    found = strategy.forward(UserBatch(batch, max_sequences=2), model=policy)
    assert found.shape == batch["input_ids"].shape
    for row, values in enumerate(expected):
        assert_close(found[row, : len(values)], values, atol=1e-5, rtol=0)
        assert not found[row, len(values) :].any()
    found = strategy.forward(UserBatch(packed(mine), max_sequences=2), model=policy)
    assert_close(found, torch.cat([*expected, torch.zeros(0)]), atol=1e-5, rtol=0)


def main() -> None:
    warnings.simplefilter("error", UserWarning)  # such as that of logits computed at once
    strategy = create_strategy(parse_config(GRPOConfig, sys.argv[1:]))
    strategy.setup_distributed()
    strategy.max_norm = 0.0
    rank, world = strategy.comm.rank, strategy.comm.world
    wanted = reference()
    everything = rows()
    spread, lopsided = everything[rank::world], everything if rank == world - 1 else []
    check(strategy, padded(spread), by_helper, wanted)
    check(strategy, packed(spread), by_hand, wanted)
    check(strategy, UserBatch(padded(spread, left=True), max_sequences=1), by_cross_entropy, wanted)
    check(strategy, UserBatch(packed(lopsided), max_tokens=30, per_sequence=["reward"]), with_entropy, wanted)
    check(strategy, UserBatch(padded(lopsided), max_sequences=3), by_hand, wanted)
    if strategy.options.tp_size == 1:
        check(strategy, UserBatch(padded(spread), max_sequences=2), by_hand, wanted, plain_model=True)
    check_forward(strategy, spread, wanted, slice(rank, None, world))
    assert VOCAB == 98
    print(f"rank {rank}: all checked", flush=True)
    strategy.close()


if __name__ == "__main__":
    main()
