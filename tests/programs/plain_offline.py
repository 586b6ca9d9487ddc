"""Trains offline in plain PyTorch, by transformers' own forward, one sequence at a time, without any lightrl code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

# Five lines of uneven lengths: prompt, chosen, rejected.
PAIRS = [
    ("1+2=", "3", "44"),
    ("12+34=", "46", "5"),
    ("5+5=", "10", "100"),
    ("99+9=", "108", "9"),
    ("7+8=", "15", "1+1+1"),
]
EPS = 1e-4  # at Adam's own 1e-8 the rounding errors of gradients near 0 become whole steps


class Plain(NamedTuple):
    losses: list[float]
    norms: list[float]


def write_data(folder: Path) -> tuple[str, str]:
    """A file of responses and one of pairs, with margins of 0.5 on the first two pairs."""
    responses, pairs = folder / "responses.jsonl", folder / "pairs.jsonl"
    responses.write_text("".join(json.dumps({"prompt": p, "response": c}) + "\n" for p, c, _ in PAIRS))
    lines = [
        {"prompt": p, "chosen": c, "rejected": r, "margin": 0.5 if place < 2 else None}
        for place, (p, c, r) in enumerate(PAIRS)
    ]
    pairs.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(responses), str(pairs)


def answer_logprobs(model: Any, tokenizer: Any, prompt: str, answer: str) -> Tensor:
    """Of each token of the answer and of the end token behind it."""
    given = tokenizer(prompt)["input_ids"]
    ids = torch.tensor([given + tokenizer(answer)["input_ids"] + [tokenizer.eos_token_id]])
    logprobs = model(ids).logits[0, len(given) - 1 : -1].log_softmax(-1)
    return logprobs.gather(1, ids[0, len(given) :, None])[:, 0]


def load(folder: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def train(model: Any, loss_fn: Callable[[], Tensor], *, steps: int, lr: float) -> Plain:
    """Steps over the whole data, clipped at a norm of 1."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, eps=EPS)
    losses, norms = [], []
    for _ in range(steps):
        loss = loss_fn()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return Plain(losses, norms)
