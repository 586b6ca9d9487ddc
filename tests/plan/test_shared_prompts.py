"""--share_prompts in a plan: what it comes to, and what the largest micro-batch holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from made_samples import made_sample
from transformers import Gemma2Config, Qwen3Config, Qwen3NextConfig

from lightrl.config import GRPOConfig, PPOConfig, SFTConfig
from lightrl.config.strategy import DistributedConfig
from lightrl.data.packing import split_micro_batches
from lightrl.plan.batches import Batches, batches_of, flops_of_step, passes_of
from lightrl.plan.command import PlanConfig
from lightrl.plan.models import policy_of
from lightrl.plan.peaks import Machine, Models, Plan, plan_run
from lightrl.plan.plan_program import machine_of
from lightrl.plan.shared_prompts import sharing_of, with_shared_prompts
from lightrl.records import Experience, Prompt
from lightrl.sharing.tree import num_computed
from lightrl.sharing.updates import families

GROUPS: dict[str, Any] = {"num_prompts": 8, "group_size": 4, "max_new_tokens": 64}


def batches(config: GRPOConfig, *, ranks: int = 1, prompt: int = 128, is_accelerator: bool = False) -> Batches:
    whole = batches_of(config, ranks=ranks, prompt_tokens=prompt, response_tokens=0)
    return with_shared_prompts(whole, config, sharing_of(config, is_accelerator=is_accelerator), ranks, [])


@pytest.mark.parametrize(
    ("config", "is_accelerator", "way", "reason"),
    [
        (GRPOConfig(), True, "none", "auto is off on a GPU"),
        (GRPOConfig(), False, "by itself", "auto is on for a CPU"),
        (GRPOConfig(dtype="bfloat16"), False, "none", "auto is off beside other options"),
        (GRPOConfig(share_prompts=True), True, "asked for", "--share_prompts True"),
        (PPOConfig(share_prompts=False), False, "none", "--share_prompts False"),
        (SFTConfig(), False, "none", ""),
    ],
)
def test_what_the_option_comes_to(config: Any, is_accelerator: bool, way: str, reason: str) -> None:
    found = sharing_of(config, is_accelerator=is_accelerator)
    assert found.way == way
    assert reason in found.reason
    assert bool(reason) == bool(found.reason)


def test_a_micro_batch_holds_families_by_the_tokens_that_are_computed() -> None:
    config = GRPOConfig(**GROUPS, share_prompts=True, max_tokens_per_microbatch=1024)
    found = batches(config)
    # A family takes 128 + 4 x 64 = 384 tokens, two fit into 1024: 4 micro-batches of 8 samples.
    assert (found.micro_batches, found.pack.families, found.pack.num_sequences) == (4, (4, 4), 8)
    assert (found.pack.num_computed, found.pack.num_tokens) == (768, 8 * 192)
    assert found.computed_share == 0.5
    # Whole sequences: 5 fit, so 7 micro-batches of at most 5.
    assert (batches_of(config, ranks=1, prompt_tokens=128, response_tokens=0).pack.num_sequences) == 5


def test_families_that_do_not_fit_are_halved() -> None:
    found = batches(GRPOConfig(**GROUPS, share_prompts=True, max_tokens_per_microbatch=300))
    assert (found.micro_batches, found.pack.families, found.pack.num_computed) == (16, (2,), 256)
    found = batches(GRPOConfig(**{**GROUPS, "group_size": 3}, share_prompts=True, max_tokens_per_microbatch=300))
    assert (found.micro_batches, found.pack.families) == (16, (2,))  # two samples of a prompt, and the third
    # One sample is longer than that, as in any other plan.
    assert batches(GRPOConfig(**GROUPS, share_prompts=True, max_tokens_per_microbatch=100)).pack.families == (1,)


def test_micro_batches_of_so_many_samples() -> None:
    found = batches(GRPOConfig(**GROUPS, share_prompts=True, micro_batch_size=6))
    assert (found.micro_batches, found.pack.families) == (8, (4,))  # no two families fit
    # Three of each family, and the fourths by threes, which share nothing and compute most.
    found = batches(GRPOConfig(**GROUPS, share_prompts=True, micro_batch_size=3))
    assert (found.micro_batches, found.pack.families) == (11, (1, 1, 1))


def test_families_are_dealt_to_ranks() -> None:
    sizes: dict[str, Any] = {"group_size": 4, "max_new_tokens": 64, "share_prompts": True}
    found = batches(GRPOConfig(**sizes, num_prompts=3, max_tokens_per_microbatch=1024), ranks=2)
    # Families of 384 give 768 and 384; halves of 256 give 3 each, 768 too: so they stay whole.
    assert (found.of_rank, found.pack.families, found.micro_batches) == (8, (4, 4), 1)
    one = batches(GRPOConfig(**sizes, num_prompts=1, max_tokens_per_microbatch=1024), ranks=2)
    assert (one.of_rank, one.pack.families) == (2, (2,))  # halves: 256 on each rank in place of 384 and 0
    split = batches(GRPOConfig(**sizes, num_prompts=2, strategy="fsdp", sp_size=2), ranks=2)
    assert split.micro_batches == 2  # each rank runs those of both


@pytest.mark.parametrize(("prompt", "limit"), [(128, 1024), (30, 700), (200, 420), (3, 500), (64, 5000)])
def test_the_largest_micro_batch_is_that_of_the_packer(prompt: int, limit: int) -> None:
    samples = [_sample(position, index, prompt) for position in range(8) for index in range(4)]
    parts = split_micro_batches(families(samples, max_tokens=limit), max_tokens=limit, max_samples=None)
    packs = [[item.sample for family in part for item in family.items] for part in parts]
    computed = [num_computed([(*one.prompt_ids, *one.response_ids) for one in pack]) for pack in packs]
    found = batches(GRPOConfig(**GROUPS, share_prompts=True, max_tokens_per_microbatch=limit), prompt=prompt)
    assert found.micro_batches == len(packs)
    assert found.pack.num_computed == max(computed)
    assert found.pack.num_sequences == max(len(pack) for pack in packs)
    assert found.computed_share == pytest.approx(sum(computed) / (32 * (prompt + 64)))


def _sample(position: int, index: int, prompt: int) -> Experience:
    made = made_sample(
        prompt=Prompt(index=position, text="", token_ids=tuple(range(position, position + prompt))),
        position=position,
        sample_index=index,
        response_ids=(1000 + index,) * 64,
    )
    return Experience(sample=made, reward=0.0, advantage=0.0)


def test_by_itself_it_counts_what_is_sure() -> None:
    one = batches(GRPOConfig(**GROUPS, max_tokens_per_microbatch=8192))
    assert one.pack.families == (4,) * 8
    # On two ranks, 16 samples of 8 prompts: at worst 2 of each, 320 in place of 384 tokens, less than 85 %.
    two = batches(GRPOConfig(**GROUPS, max_tokens_per_microbatch=8192), ranks=2)
    assert (two.pack.families, two.pack.num_computed) == ((2,) * 8, 8 * 256)
    # 5 samples in a micro-batch may be of 5 prompts.
    assert batches(GRPOConfig(**GROUPS, max_tokens_per_microbatch=1024)).pack.families == ()
    # 32 prompts of 20 tokens save 480 of 2688, 18 %; of 15 tokens 360 of 2528, 14 %: too little.
    assert batches(GRPOConfig(**GROUPS, max_tokens_per_microbatch=8192), prompt=20).pack.families == (4,) * 8
    assert batches(GRPOConfig(**GROUPS, max_tokens_per_microbatch=8192), prompt=15).pack.families == ()


def test_the_trainer_works_for_the_tokens_that_it_computes(small_config: Any) -> None:
    config = GRPOConfig(**GROUPS, share_prompts=True, max_tokens_per_microbatch=1024)
    model, passes = policy_of(small_config, config), passes_of(config)
    whole = batches_of(config, ranks=1, prompt_tokens=128, response_tokens=0)
    shared = batches(config)
    # 3 passes of a training, of which half the tokens are left, and one of the engine: 2.5 in place of 4.
    found = [flops_of_step(config, model, one, passes) for one in (shared, whole)]
    assert found[0] == pytest.approx(2.5 / 4 * found[1])


# ---- Whole plans


def planned(config: Any, hf_config: Any, *, is_accelerator: bool = False) -> Plan:
    machine = Machine(ranks=1, memory=0, prompt_tokens=128, response_tokens=0, is_accelerator=is_accelerator)
    return plan_run(config, Models(hf_config, config), machine)


def test_a_plan_says_what_it_takes(small_config: Any) -> None:
    whole = planned(GRPOConfig(**GROUPS, share_prompts=False, max_tokens_per_microbatch=8192), small_config)
    by_itself = planned(GRPOConfig(**GROUPS, max_tokens_per_microbatch=8192), small_config)
    on_gpu = planned(GRPOConfig(**GROUPS, max_tokens_per_microbatch=8192), small_config, is_accelerator=True)
    assert by_itself.peak.total < 0.65 * whole.peak.total
    assert whole.prompts == "each sample computes its prompt: --share_prompts False"
    assert on_gpu.prompts == "each sample computes its prompt: --share_prompts auto is off on a GPU"
    assert by_itself.prompts == (
        "prompts are computed once: --share_prompts auto is on for a CPU; the largest micro-batch runs 3072 tokens"
    )
    small = planned(GRPOConfig(**GROUPS, max_tokens_per_microbatch=1024), small_config)
    assert small.prompts.startswith("--share_prompts auto is on for a CPU, but no micro-batch is sure")
    assert planned(SFTConfig(), small_config).prompts == ""


def gemma2() -> Gemma2Config:
    return Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=16,
    )  # fmt: skip


def test_a_model_whose_attention_has_windows_is_left_out_by_itself() -> None:
    config = PPOConfig(**GROUPS, max_tokens_per_microbatch=8192)
    models = Models(Qwen3Config(**{name: getattr(gemma2(), name) for name in _SIZES}), config, {"critic": gemma2()})
    found = plan_run(config, models, Machine(ranks=1, memory=0, prompt_tokens=128, response_tokens=0,
                                             is_accelerator=False))  # fmt: skip
    assert found.prompts.endswith("the largest micro-batch runs 3072 tokens (critic: 6144)")
    assert found.batches.pack_of("critic").families == ()
    asked = PPOConfig(**GROUPS, share_prompts=True, max_tokens_per_microbatch=8192)
    assert planned(asked, gemma2()).prompts.endswith("--share_prompts True; the largest micro-batch runs 3072 tokens")


_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim",
)  # fmt: skip


def test_a_model_that_needs_whole_sequences_is_refused_by_name() -> None:
    recurrent = Qwen3NextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_experts=0, layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    )  # fmt: skip
    asked = GRPOConfig(**GROUPS, share_prompts=True)
    with pytest.raises(ValueError, match="--share_prompts does not go with model type 'qwen3_next': its layers carry"):
        planned(asked, recurrent)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_dry_run_is_for_the_device_of_this_machine() -> None:
    def on_gpu(device: Any, *, is_here: bool) -> bool:
        config = GRPOConfig(distributed=DistributedConfig(device=device))
        return machine_of(config, PlanConfig(device_memory="1GB"), is_here=is_here).is_accelerator

    assert [on_gpu("auto", is_here=is_here) for is_here in (True, False)] == [False, True]
    assert [on_gpu(device, is_here=True) for device in ("cpu", "cuda")] == [False, True]
