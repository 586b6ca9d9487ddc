"""LoRA under every strategy against plain training of the same adapters in one process."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from lightrl.models import lora
from lightrl.testing import run_program, run_spmd
from lightrl.testing.strategy_contract import compare
from lightrl.testing.tiny_training import STEPS, Trained, padded_loss, samples, tiny_policy, trainable

peft = pytest.importorskip("peft")
program = pytest.importorskip("lora_program")

ZERO = "--strategy deepspeed --deepspeed.param_persistence_threshold 0 --deepspeed.zero_stage"
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason='needs DeepSpeed: pip install "lightrl[deepspeed]"'
)


@cache
def plain_training(case: str) -> Trained:
    """Of the same adapters, by HF's padded forward and torch's optimizer."""
    make_optimizer, max_norm = program.CASES[case]
    model: Any = tiny_policy().hf
    model.set_attn_implementation("eager")
    lora.add_adapters(model, program.OPTIONS, seed=program.SEED)
    optimizer = make_optimizer(trainable(model))
    losses, norms = [], []
    for step in range(STEPS):
        loss = padded_loss(model, samples(step))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trainable(model), max_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        norms.append(float(norm))
    return Trained(losses, norms, merged_by_peft(model))


def merged_by_peft(model: Any) -> dict[str, torch.Tensor]:
    for layer in model.modules():
        if isinstance(layer, peft.tuners.lora.Linear):
            layer.merge()
    return {name: item.detach() for name, item in lora.plain_parameters(model)}


def check(folder: Path) -> None:
    found = torch.load(folder / "found.pt", weights_only=True)
    for case in program.CASES:
        compare(Trained(**found[case]), plain_training(case), is_adam=case == "adamw")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    for name, item in model.named_parameters():
        assert_close(item.detach(), found["final"][name], atol=0, rtol=0)
    base: Any = tiny_policy().hf
    base.set_attn_implementation("eager")
    adapted = peft.PeftModel.from_pretrained(base, str(folder / "adapter"))
    ids = torch.tensor([[5, 9, 33, 2]])
    assert_close(adapted(ids).logits, model(ids).logits, atol=1e-5, rtol=0)


def test_one_process(tmp_path: Path) -> None:
    command = ["--strategy single", "--strategy single --gradient_checkpointing True"]
    run_program([program.sys.executable, program.__file__, str(tmp_path), *command], timeout_s=200)
    check(tmp_path / "0")
    check(tmp_path / "1")


def test_two_ranks(tmp_path: Path) -> None:
    commands = ["--strategy fsdp --gradient_checkpointing True", "--strategy ddp"]
    run_spmd(program.__file__, str(tmp_path), *commands, world_size=2, timeout_s=280)
    for place in range(len(commands)):
        check(tmp_path / str(place))


@needs_deepspeed
@pytest.mark.engine
@pytest.mark.slow
def test_two_ranks_of_deepspeed(tmp_path: Path) -> None:
    commands = [f"{ZERO} {stage}" for stage in range(4)]
    run_spmd(program.__file__, str(tmp_path), *commands, world_size=2, timeout_s=280)
    for place in range(len(commands)):
        check(tmp_path / str(place))


@pytest.mark.slow
@pytest.mark.long
def test_four_ranks_of_fsdp(tmp_path: Path) -> None:
    settings = ("--fsdp.replicate_size 2 --sync_bucket_mb 1", "--fsdp.cpu_offload True", "--sp_size 2")
    commands = [f"--strategy fsdp {setting}" for setting in settings]
    run_spmd(program.__file__, str(tmp_path), *commands, world_size=4, timeout_s=280)
    for place in range(len(commands)):
        check(tmp_path / str(place))
