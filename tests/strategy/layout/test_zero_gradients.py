"""ZeRO with ranks that have gradients of different parameters, or the same in another order."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import unused_program as program
from torch.testing import assert_close

from lightrl.testing import run_spmd

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason='needs DeepSpeed: pip install "lightrl[deepspeed]"'
)


def plain_training() -> tuple[list[str], dict[str, torch.Tensor]]:
    """Returns the norms and the weights of the same training in one process, by torch alone.

    A missing gradient is one of zeros, as ZeRO's flat tensors have it.
    """
    model, norms = program.Mixture([]), []
    optimizer = program.optimizer_of(model)
    for update in program.UPDATES:
        samples = [row for rank in update for micro_batch in rank for row in micro_batch]
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        program.loss_of(model(torch.tensor(samples))).backward()
        norms.append(f"norm {float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)):.5f}")
        optimizer.step()
    return norms, {name: item.detach() for name, item in model.named_parameters()}


@needs_deepspeed
@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("options", ["0", "1", "2", "2 --offload", "3"])
def test_experts_that_other_ranks_use_or_use_in_another_order(tmp_path: Path, options: str) -> None:
    path = tmp_path / "weights.pt"
    printed = run_spmd(program.__file__, str(path), "", "--zero", *options.split(), world_size=2, timeout_s=200)
    norms, weights = plain_training()
    assert [line for line in printed.splitlines() if line.startswith("norm")] == norms
    found = torch.load(path, weights_only=True)
    assert found.keys() == weights.keys()
    for name, expected in weights.items():
        assert_close(found[name], expected, msg=lambda text, name=name: f"{name}: {text}")
