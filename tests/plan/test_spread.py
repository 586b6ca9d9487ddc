"""What strategies keep, by hand."""

from dataclasses import replace
from typing import Any

import pytest

from lightrl.config import DeepSpeedConfig, FSDPConfig, GRPOConfig, OptimConfig
from lightrl.plan.models import policy_of
from lightrl.plan.spread import Kept, kept_of

NUMEL = 2 * 64 * 32 + 32 + 3 * (2 * 32 * 32 + 2 * 16 * 32 + 2 * 8 + 3 * 32 * 48 + 2 * 32)


def kept(small_config: Any, ranks: int = 2, **options: Any) -> tuple[Kept, int]:
    config = GRPOConfig(**options)
    model = policy_of(small_config, config)
    return kept_of(model, config, ranks, several=True), model.buffer_bytes


def test_a_whole_model(small_config: Any) -> None:
    found, buffers = kept(small_config, strategy="ddp", ema_decay=0.9)
    assert found == Kept(
        weights=4 * NUMEL + buffers, optimizer=8 * NUMEL, average=4 * NUMEL, waiting=4 * NUMEL, gradients=4 * NUMEL
    )


def test_muon_has_one_moment_of_the_matrices_in_blocks(small_config: Any) -> None:
    found, _ = kept(small_config, strategy="ddp", optim=OptimConfig(name="muon"))
    assert found.optimizer == 8 * NUMEL - 4 * 3 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48)


def test_fsdp_shards_the_state_but_not_the_gradients_between_micro_batches(small_config: Any) -> None:
    found, buffers = kept(small_config, strategy="fsdp")
    assert found.weights == 2 * NUMEL + buffers  # every shape divides by two
    assert (found.optimizer, found.gradients, found.waiting) == (4 * NUMEL, 2 * NUMEL, 4 * NUMEL)
    block = (NUMEL - 2 * 64 * 32 - 32) / 3
    assert found.own_pass == 4 * (2 * 64 * 32 + 32 + block)
    offloaded, _ = kept(small_config, strategy="fsdp", fsdp=FSDPConfig(cpu_offload=True))
    assert (offloaded.weights, offloaded.optimizer, offloaded.host) == (buffers, 0, 8 * NUMEL)
    often, _ = kept(small_config, strategy="fsdp", fsdp=FSDPConfig(reduce_each_micro_batch=True))
    assert often == replace(found, waiting=2 * NUMEL)
    on_host, _ = kept(small_config, strategy="fsdp", fsdp=FSDPConfig(reduce_each_micro_batch=True, cpu_offload=True))
    assert on_host == replace(offloaded, waiting=0)


def test_tensor_parallelism_leaves_more_ranks_to_share_what_is_outside_of_blocks(small_config: Any) -> None:
    found, buffers = kept(small_config, 4, strategy="fsdp", tp_size=2)
    matrices, norms = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48, 2 * 8 + 2 * 32
    assert found.weights == 4 * ((2 * 64 * 32 + 32) / 4 + 3 * (matrices / 4 + norms / 2)) + buffers


def test_replicas_do_not_share_a_model(small_config: Any) -> None:
    found, _ = kept(small_config, 4, strategy="fsdp", fsdp=FSDPConfig(replicate_size=2))
    assert found == kept(small_config, 2, strategy="fsdp")[0]


@pytest.mark.parametrize(
    ("stage", "master", "optimizer", "waiting"),
    [(0, 0, 8, 4), (1, 2, 4, 4), (2, 2, 4, 2), (3, 0, 4, 0)],
)
def test_zero_stages(small_config: Any, stage: Any, master: int, optimizer: int, waiting: int) -> None:
    found, _ = kept(small_config, strategy="deepspeed", deepspeed=DeepSpeedConfig(zero_stage=stage, bucket_mb=1))
    assert found.buffers == (2 * NUMEL if stage == 3 else 0)  # of gradients, all the time
    if stage == 3:  # a small model stays gathered from the first block to the last; and a bucket
        assert (found.forward, found.own_pass) == (4 * NUMEL, 4 * NUMEL + 2**20)
    assert (found.master, found.optimizer, found.waiting) == (master * NUMEL, optimizer * NUMEL, waiting * NUMEL)


def test_a_strategy_of_a_user_is_unknown(small_config: Any) -> None:
    with pytest.raises(ValueError, match="--strategy mine:Strategy is not one of single, .* and megatron"):
        kept(small_config, strategy="mine:Strategy")
