"""Sharded models whose ranks use different parameters, or with parts that never run."""

from __future__ import annotations

from pathlib import Path

import pytest
import resting_program as resting
import torch
import unused_program as program
from torch.testing import assert_close

from lightrl.testing import run_spmd


def plain_training() -> tuple[list[str], dict[str, torch.Tensor]]:
    """Returns the norms and the weights of the same training in one process, by torch alone."""
    model, norms = program.Mixture([]), []
    optimizer = program.optimizer_of(model)
    for update in program.UPDATES:
        samples = [row for rank in update for micro_batch in rank for row in micro_batch]
        program.loss_of(model(torch.tensor(samples))).backward()
        norms.append(f"norm {float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)):.5f}")
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: item.detach() for name, item in model.named_parameters()}


@pytest.mark.parametrize("units", ["Layer", ""])
def test_experts_that_other_ranks_use_and_parts_that_nobody_runs(tmp_path: Path, units: str) -> None:
    """With units '', members of lists become units, except experts, which other ranks would not gather."""
    printed = run_spmd(program.__file__, str(tmp_path / "weights.pt"), units, world_size=2, timeout_s=100)
    norms, weights = plain_training()
    assert [line for line in printed.splitlines() if line.startswith("norm")] == norms
    found = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert found.keys() == weights.keys()
    for name, expected in weights.items():
        assert_close(found[name], expected, msg=lambda text, name=name: f"{name}: {text}")


def test_parts_that_rest_keep_their_weights_and_what_was_frozen_at_first_trains(tmp_path: Path) -> None:
    printed = run_spmd(resting.__file__, str(tmp_path / "weights.pt"), world_size=2, timeout_s=100)
    model = resting.Resting()
    optimizer = program.optimizer_of(model)
    for samples in resting.UPDATES:
        program.loss_of(model(torch.tensor(samples))).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = torch.load(tmp_path / "weights.pt", weights_only=True)
    for name, expected in model.named_parameters():
        assert_close(found[name], expected.detach(), msg=lambda text, name=name: f"{name}: {text}")
    norms = [float(line.split()[1]) for line in printed.splitlines() if line.startswith("norm")]
    assert len(norms) == 2  # of the layers that were frozen
    assert all(norm > 0 for norm in norms)


def test_a_torch_that_cannot_sum_them_is_refused(tmp_path: Path) -> None:
    program_args = (str(tmp_path / "weights.pt"), "Layer", "--old_torch")
    printed = run_spmd(program.__file__, *program_args, world_size=2, timeout_s=100, expect_failure=True)
    assert printed.count("Only some ranks have a gradient of layers.0.experts.") >= 2
    assert "use --strategy ddp" in printed
