"""Biases of routers keep their values in bfloat16: in the trainer, in the engine and in what is saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import router_bias_program as program
import torch
from safetensors import safe_open
from tiny_moe import BIASED, tiny_moe

from lightrl.models.router_biases import as_sent, router_biases
from lightrl.testing import run_spmd


def check(found: dict[str, dict[str, float]], folder: Path) -> None:
    """Other experts change a logprob by 0.7 to 1 on average, rounding elsewhere by 0.02."""
    assert set(found) == set(BIASED)
    assert max(value for values in found.values() for value in values.values()) < 0.05
    saved = [
        file.get_slice(name).get_dtype()
        for path in folder.rglob("*.safetensors")
        for file in [safe_open(path, "pt")]
        for name in file.keys()  # noqa: SIM118  # no mapping
        if name.endswith("_bias")
    ]
    assert saved == ["F32"] * len(saved)
    assert len(saved) >= 4 * len(BIASED)  # two layers, in the model and in the checkpoint


def test_one_process_chooses_experts_by_exact_biases(tmp_path: Path) -> None:
    check(program.main(tmp_path, "--strategy", "single"), tmp_path)


@pytest.mark.slow
def test_fsdp_chooses_experts_by_exact_biases(tmp_path: Path) -> None:
    run_spmd(program.__file__, str(tmp_path), "--strategy", "fsdp", world_size=2, timeout_s=400)
    check(torch.load(tmp_path / "found.pt", weights_only=True), tmp_path)


@pytest.mark.parametrize("family", sorted(BIASED))
def test_each_layer_has_a_bias_that_a_sync_does_not_round(family: str) -> None:
    found = router_biases(tiny_moe(family))
    assert len(found) == 2
    for name, bias in found.items():
        assert as_sent(name, bias, torch.bfloat16) is bias
    assert as_sent("model.layers.0.self_attn.q_proj.bias", torch.zeros(2), torch.bfloat16).dtype == torch.bfloat16
    assert as_sent("model.ids", torch.zeros(2, dtype=torch.int64), torch.bfloat16).dtype == torch.int64
