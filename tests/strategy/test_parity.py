"""Any strategy, any world size, any split of the samples: the training of plain padded PyTorch."""

import json
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from parity_program import VARIANTS
from safetensors.torch import load_file
from tiny_training import plain_training
from torch.testing import assert_close

from lightrl.testing import run_program, run_spmd

PROGRAM = Path(__file__).parents[1] / "programs" / "parity_program.py"
reference = cache(plain_training)


def check(output: Path) -> None:
    results = json.loads(output.read_text())
    for place, (variant, (make_optimizer, max_norm, _, _)) in enumerate(VARIANTS.items()):
        losses, norms, parameters = reference(make_optimizer, max_norm)
        assert_close(torch.tensor(results[variant]["losses"]), torch.tensor(losses), atol=1e-5, rtol=0, msg=variant)
        assert_close(torch.tensor(results[variant]["norms"]), torch.tensor(norms), atol=0, rtol=1e-4, msg=variant)
        trained = load_file(f"{output}.{place}.safetensors")
        assert sorted(trained) == sorted(parameters), variant
        for name, value in parameters.items():
            # AdamW turns a gradient of 1e-9 into a step of the size of lr, so it gets more room than SGD.
            atol = 1e-5 if max_norm == 0 else 1e-4
            assert_close(
                trained[name], value, atol=atol, rtol=0, msg=lambda text, n=name, v=variant: f"{v} {n}: {text}"
            )


def test_single(tmp_path: Path) -> None:
    run_program([sys.executable, str(PROGRAM), "single", str(tmp_path / "out.json")], timeout_s=120)
    check(tmp_path / "out.json")


def test_ddp(tmp_path: Path) -> None:
    run_spmd(PROGRAM, "ddp", str(tmp_path / "out.json"), world_size=2, timeout_s=200)
    check(tmp_path / "out.json")


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, []),
        (2, []),
        (2, ["reshard_after_forward=False", "gradient_checkpointing=True"]),
        (2, ["cpu_offload=True"]),
        (4, []),
        (4, ["replicate_size=2"]),
    ],
)
def test_fsdp(tmp_path: Path, world_size: int, options: list[str]) -> None:
    run_spmd(PROGRAM, "fsdp", str(tmp_path / "out.json"), *options, world_size=world_size, timeout_s=200)
    check(tmp_path / "out.json")
