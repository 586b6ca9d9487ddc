"""Compares `lightrl plan` with what runs allocate: predicted and measured bytes, setting by setting.

    python benchmarks/plan.py [--only fsdp lora ...]

Each setting takes two updates of a Qwen3 with 5.2 M weights (4 blocks, 256 wide, vocabulary 4096) on 32 samples of 70
tokens, with at most 512 tokens in a micro-batch, in float32 unless stated otherwise; settings with shared prompts use
samples of 192 tokens, 128 of them in the prompt, and at most 1024. The second update and the sync after it are measured
on the fullest rank, with the CPU allocator's account. Prints the table of docs/plan.md; the exit code is 1 if a
prediction of the update is off by more than 10 %.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from lightrl.testing import SpmdError, run_spmd

PROGRAM = Path(__file__).with_name("plan_program.py")
BASE = "--num_prompts 8 --group_size 4 --max_new_tokens 64 --max_tokens_per_microbatch 512 --engine native"
BASE += " --share_prompts False --log.tensorboard False --checkpoint.every 0 --eval.every 0 --canary_every 0"
ALLOWED = 0.10
HELD = "--fsdp.reshard_after_forward False"
SHARED = "--share_prompts True"
LONGER = "--max_tokens_per_microbatch 1024"
WAYS = (("whole sequences of 192 tokens", ""), ("shared prompts", SHARED))
WHOLE = "--max_tokens_per_microbatch 4096"
REFERENCE = "--algorithm.kl_coef 0.1"
TWO_UPDATES = "--num_minibatches 2"
ZERO = "--strategy deepspeed --deepspeed.bucket_mb 2 --deepspeed.zero_stage"
MEGATRON = "--strategy lightrl_megatron_cpu:CpuMegatronStrategy"
MEGATRON_CPU = Path(__file__).resolve().parents[1] / "tests" / "megatron_cpu"
ADAPTERS = "--lora.rank 8 --lora.target_modules all-linear"


class Setting(NamedTuple):
    """A run that is planned and measured."""

    name: str
    ranks: int
    options: str
    trainer: str = "grpo"
    prompt: int = 6  # tokens


SETTINGS = [
    Setting("GRPO, single", 1, "--strategy single"),
    Setting("GRPO, single, one micro-batch", 1, f"--strategy single {WHOLE}"),
    Setting("GRPO, single, bfloat16, reference, two updates", 1,
            f"--strategy single --dtype bfloat16 {REFERENCE} {TWO_UPDATES}"),
    Setting("GRPO, single, checkpointing", 1, f"--strategy single --gradient_checkpointing True {WHOLE}"),
    Setting("GRPO, single, EMA", 1, "--strategy single --ema_decay 0.9"),
    Setting("GRPO, single, LoRA", 1, f"--strategy single {ADAPTERS}"),
    Setting("GRPO, single, LoRA, reference", 1, f"--strategy single {ADAPTERS} {REFERENCE}"),
    Setting("GRPO, single, Muon", 1, "--strategy single --optim.name muon"),
    Setting("PPO, single, critic of its own", 1, "--strategy single", "ppo"),
    Setting("PPO, single, shared critic", 1, "--strategy single --critic.shared_backbone True", "ppo"),
    Setting("PPO, single, LoRA", 1, f"--strategy single {ADAPTERS}", "ppo"),
    Setting("GRPO, ddp", 2, "--strategy ddp"),
    Setting("GRPO, ddp, EMA, reference", 2, f"--strategy ddp --ema_decay 0.9 {REFERENCE}"),
    Setting("GRPO, ddp, LoRA", 2, f"--strategy ddp {ADAPTERS}"),
    Setting("GRPO, fsdp", 2, "--strategy fsdp"),
    Setting("GRPO, fsdp, reduced each micro-batch", 2, "--strategy fsdp --fsdp.reduce_each_micro_batch True"),
    Setting("GRPO, fsdp, one micro-batch", 2, f"--strategy fsdp {WHOLE}"),
    Setting("GRPO, fsdp, one micro-batch, no reshard", 2, f"--strategy fsdp {WHOLE} {HELD}"),
    Setting("GRPO, fsdp, bfloat16, reference", 2, f"--strategy fsdp --dtype bfloat16 {REFERENCE}"),
    Setting("GRPO, fsdp, EMA", 2, "--strategy fsdp --ema_decay 0.9"),
    Setting("GRPO, fsdp, LoRA", 2, f"--strategy fsdp {ADAPTERS}"),
    Setting("GRPO, fsdp, checkpointing", 2, f"--strategy fsdp --gradient_checkpointing True {WHOLE}"),
    Setting("GRPO, fsdp, tp_size 2", 2, "--strategy fsdp --tp_size 2"),
    Setting("GRPO, fsdp, tp_size 2, one micro-batch", 2, f"--strategy fsdp --tp_size 2 {WHOLE}"),
    Setting("GRPO, fsdp, sp_size 2", 2, "--strategy fsdp --sp_size 2"),
    Setting("GRPO, fsdp, sp_size 2, one micro-batch a rank", 2, f"--strategy fsdp --sp_size 2 {WHOLE}"),
    Setting("GRPO, fsdp, replicas of one rank", 2, "--strategy fsdp --fsdp.replicate_size 2"),
    Setting("PPO, fsdp, critic of its own", 2, "--strategy fsdp", "ppo"),
    Setting("PPO, fsdp, the waiting optimizer offloaded", 2,
            "--strategy fsdp --critic.offload_waiting_optimizer True", "ppo"),
    Setting("GRPO, ZeRO-0", 2, f"{ZERO} 0"),
    Setting("GRPO, ZeRO-1, 2 MB buckets", 2, f"{ZERO} 1"),
    Setting("GRPO, ZeRO-2, 2 MB buckets", 2, f"{ZERO} 2"),
    Setting("GRPO, ZeRO-2, one micro-batch", 2, f"{ZERO} 2 {WHOLE}"),
    Setting("GRPO, ZeRO-3, 2 MB buckets", 2, f"{ZERO} 3"),
    Setting("GRPO, ZeRO-3, one micro-batch", 2, f"{ZERO} 3 {WHOLE}"),
    Setting("GRPO, ZeRO-3, EMA", 2, f"{ZERO} 3 --ema_decay 0.9"),
    Setting("PPO, ZeRO-2", 2, f"{ZERO} 2", "ppo"),
    *(Setting(f"GRPO, single, {name}", 1, f"--strategy single {LONGER} {way}", prompt=128) for name, way in WAYS),
    Setting("GRPO, single, shared prompts, one micro-batch", 1, f"--strategy single {SHARED} {WHOLE}", prompt=128),
    Setting("GRPO, single, shared prompts by itself, one micro-batch", 1,
            f"--strategy single --share_prompts auto {WHOLE} --max_tokens_per_microbatch 8192", prompt=128),
    Setting("GRPO, single, shared prompts, checkpointing", 1,
            f"--strategy single {SHARED} {LONGER} --gradient_checkpointing True", prompt=128),
    Setting("GRPO, ddp, shared prompts, three prompts", 2,
            f"--strategy ddp {SHARED} {LONGER} --num_prompts 3", prompt=128),
    *(Setting(f"GRPO, fsdp, {name}", 2, f"--strategy fsdp {LONGER} {way}", prompt=128) for name, way in WAYS),
    Setting("GRPO, fsdp, shared prompts, reference, two updates", 2,
            f"--strategy fsdp {SHARED} {LONGER} {REFERENCE} {TWO_UPDATES}", prompt=128),
    *(Setting(f"GRPO, fsdp, sp_size 2, {name}", 2, f"--strategy fsdp --sp_size 2 {LONGER} {way}", prompt=128)
      for name, way in WAYS),
    Setting("PPO, fsdp, shared prompts", 2, f"--strategy fsdp {SHARED} {LONGER}", "ppo", prompt=128),
    Setting("GRPO, ZeRO-2, shared prompts", 2, f"{ZERO} 2 {SHARED} {LONGER}", prompt=128),
    Setting("GRPO, megatron, tp_size 2", 2, f"{MEGATRON} --tp_size 2"),
    Setting("GRPO, megatron, pp_size 2", 2, f"{MEGATRON} --megatron.pp_size 2"),
    Setting("GRPO, megatron, cp_size 2", 2, f"{MEGATRON} --megatron.cp_size 2"),
    Setting("GRPO, megatron, cp_size 2, one micro-batch a rank", 2, f"{MEGATRON} --megatron.cp_size 2 {WHOLE}"),
    Setting("GRPO, megatron, pp_size 2, one micro-batch a rank", 2, f"{MEGATRON} --megatron.pp_size 2 {WHOLE}"),
    Setting("GRPO, megatron, pp_size 2, recompute, one micro-batch a rank", 2,
            f"{MEGATRON} --megatron.pp_size 2 --megatron.recompute full {WHOLE}"),
    Setting("PPO, megatron, pp_size 2", 2, f"{MEGATRON} --megatron.pp_size 2", "ppo"),
    Setting("GRPO, megatron, tp_size 2 with split sequences, pp_size 2", 4,
            f"{MEGATRON} --tp_size 2 --megatron.sequence_parallel True --megatron.pp_size 2"),
]  # fmt: skip


def compare(setting: Setting, model: str, *, shows_parts: bool) -> dict[str, list[float]]:
    """Returns [predicted, measured] by phase."""
    with tempfile.TemporaryDirectory() as folder:
        words = f"--model {model} --output_dir {folder}/run {BASE} {setting.options}".split()
        said = run_spmd(
            PROGRAM,
            setting.trainer,
            str(setting.prompt),
            *words,
            world_size=setting.ranks,
            timeout_s=280,
            cwd=MEGATRON_CPU,
        )
    ranks = [json.loads(line.partition("RESULT ")[2]) for line in said.splitlines() if "RESULT " in line]
    if shows_parts:
        print(*map(json.dumps, ranks), sep="\n", flush=True)
    return {name: [ranks[0][name][0], max(rank[name][1] for rank in ranks)] for name in ("learn", "sync")}


def main() -> int:
    """Prints a row for each setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="*", default=[], help="words that must all be in the name of a setting (default: every setting)"
    )
    parser.add_argument("--parts", action="store_true", help="show what each prediction is made of")
    args = parser.parse_args()
    sys.path.insert(0, str(PROGRAM.parent))
    from plan_program import save_model

    print("| Run | Ranks | Predicted MiB | Measured MiB | Ratio | Sync: ratio |")
    print("|---|---|---|---|---|---|")
    is_off = False
    with tempfile.TemporaryDirectory() as model:
        save_model(Path(model))
        for setting in SETTINGS:
            if not all(word in setting.name for word in args.only):
                continue
            try:
                found = compare(setting, model, shows_parts=args.parts)
            except SpmdError as error:
                print(f"| {setting.name} | failed: {str(error)[-1500:]}", flush=True)
                is_off = True
                continue
            predicted, actual = (size / 2**20 for size in found["learn"])
            ratio, sync = predicted / actual, found["sync"][0] / found["sync"][1]
            off = not 1 - ALLOWED <= ratio <= 1 + ALLOWED
            is_off |= off
            shown = f"**{ratio:.2f}**" if off else f"{ratio:.2f}"
            print(
                f"| {setting.name} | {setting.ranks} | {predicted:.1f} | {actual:.1f} | {shown} | {sync:.2f} |",
                flush=True,
            )
    return int(is_off)


if __name__ == "__main__":
    raise SystemExit(main())
