"""The hook of a page that logs a number of each update, in a run on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_doc_blocks import ROOT, blocks

from lightrl.testing import run_spmd


@pytest.mark.slow
def test_the_norms_of_the_layers_add_up_to_the_norm_of_the_update(tmp_path: Path) -> None:
    code = [text for text in blocks(ROOT / "docs" / "adding_a_strategy.md", "python") if "UpdateHook" in text]
    (tmp_path / "my_module.py").write_text("\n\n".join(code))
    options = ["--strategy", "my_module:Logged", "--max_steps", "1", "--eval.every", "0"]
    script = str(ROOT / "scripts" / "train_grpo.py")
    run_spmd(script, *options, "--output_dir", str(tmp_path / "run"), world_size=2, timeout_s=150, cwd=tmp_path)
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line)
    norms = [metrics[f"layer_grad_norm/{layer}/mean"] for layer in ("0", "1", "others")]
    assert sum(norm**2 for norm in norms) == pytest.approx(metrics["grad_norm"] ** 2, rel=1e-5)
    assert min(norms) > 0
