"""examples/own_loop.py: a strategy in a loop of one's own trains like plain PyTorch, and continues on other ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from lightrl.builtin.model import tiny_model
from lightrl.builtin.task import train_problems
from lightrl.testing import run_spmd

LOOP = Path(__file__).resolve().parents[2] / "examples" / "own_loop.py"


def plain(num_steps: int) -> list[tuple[float, float]]:
    """The loss and the norm of the gradient in each step, from all 16 sums at once."""
    model, tokenizer = tiny_model()
    texts = [problem["prompt"] + problem["answer"] for problem in train_problems()]
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors}], weight_decay=0.0)
    found = []
    for step in range(num_steps):
        drawn = torch.randperm(len(texts), generator=torch.Generator().manual_seed(step))[:16].tolist()
        batch = tokenizer([texts[index] for index in drawn], padding=True, padding_side="right", return_tensors="pt")
        logprobs = model(**batch).logits[:, :-1].log_softmax(-1)
        of_tokens = logprobs.gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
        loss = -of_tokens[batch["attention_mask"][:, 1:].bool()].mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, (step + 1) / 2)
        optimizer.step()
        optimizer.zero_grad()
        found.append((float(loss.detach()), float(norm)))
    return found


@pytest.mark.slow
def test_two_ranks_and_then_one_train_like_plain_pytorch(tmp_path: Path) -> None:
    found = []
    for num_steps, world_size in ((2, 2), (4, 1)):  # the second run continues the first
        flags = ("--max_steps", str(num_steps), "--output_dir", str(tmp_path))
        found += re.findall(r"step (\d+) loss (\S+) norm (\S+)", run_spmd(LOOP, *flags, world_size=world_size))
    assert [int(step) for step, _, _ in found] == [1, 2, 3, 4]
    wanted = plain(4)
    assert max(norm for _, norm in wanted) > 1.2  # the clip at 1 acts
    for (_, loss, norm), (plain_loss, plain_norm) in zip(found, wanted, strict=True):
        assert float(loss) == pytest.approx(plain_loss, abs=2e-6)
        assert float(norm) == pytest.approx(plain_norm, rel=1e-5)


def test_it_is_short_and_uses_no_trainer() -> None:
    source = LOOP.read_text()
    assert len(source.splitlines()) <= 60
    assert "lightrl.trainers" not in source
