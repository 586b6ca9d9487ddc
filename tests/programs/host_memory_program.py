"""Weight syncs through memory that all ranks map: what is in it, when it is written, and who notices if it is not.

usage: host_memory_program.py [options of fsdp]
"""

import gc
import sys
import time
from pathlib import Path

import torch

from lightrl.comm import RankError
from lightrl.config import GRPOConfig, parse_config
from lightrl.engines.base import WeightSyncError
from lightrl.engines.native.engine import build_native_engine
from lightrl.engines.weights import host_memory
from lightrl.engines.weights.account import WeightAccount
from lightrl.engines.weights.host_memory import is_mapped
from lightrl.strategy import create_strategy
from lightrl.strategy.layout import host_layout
from lightrl.testing.strategy_checks import greedy
from lightrl.testing.tiny_training import tiny_policy

VICTIM = "model.layers.1.mlp.down_proj.weight"


def held(strategy):
    return dict(strategy.engine.engine.model.named_parameters())


def all_together(strategy):
    return all(map(is_mapped, held(strategy).values()))


def change(strategy, policy):
    """Does what an update does: every rank changes its shards."""
    with torch.no_grad():
        for parameter in policy.parameters():
            strategy.layout.shard(parameter).mul_(1.25)


def wholes(strategy, policy):
    return {name: whole.clone() for name, whole in strategy.full_parameters(policy, held(strategy)[VICTIM].dtype)}


def check_contents(strategy, policy):
    """The engine has the trainer's weights to the bit, and only a sync changes them."""
    engine, comm = held(strategy), strategy.comm
    for name, whole in wholes(strategy, policy).items():
        assert torch.equal(engine[name], whole), name
    comm.barrier()
    if comm.is_main:
        engine[VICTIM].data[0, 0] = 7
    comm.barrier()
    assert engine[VICTIM][0, 0] == 7  # on every rank
    change(strategy, policy)
    wholes(strategy, policy)  # as a checkpoint gathers them
    assert engine[VICTIM][0, 0] == 7
    comm.barrier()
    strategy.update_engine_weights(policy)
    for name, whole in wholes(strategy, policy).items():
        assert torch.equal(engine[name], whole), name


def check_generation(strategy, policy):
    """The fused forward reads the common memory, before and after it was moved."""
    alone = tiny_policy()
    alone.hf.load_state_dict(wholes(strategy, policy), strict=False)  # lm_head is tied
    alone.hf.set_attn_implementation("eager")
    items = strategy.gather_and_generate({"max_tokens": 4, "temperature": 0.0}, all_prompt_token_ids=[[5, 9, 33]])
    for item in items:
        assert item.output_token_ids == greedy(alone.hf, item.prompt_token_ids, len(item.output_token_ids))
    forward = strategy.engine.engine._runner._fused
    assert is_mapped(forward.layers[0].qkv.weight)
    assert is_mapped(forward.layers[1].down.weight)


def check_order(strategy, policy):
    """No rank writes while another has not yet come to the sync: it may still generate."""
    before, is_late = held(strategy)[VICTIM].clone(), strategy.comm.rank == strategy.comm.world - 1
    strategy.comm.barrier()
    change(strategy, policy)
    if is_late:
        time.sleep(0.5)
        assert torch.equal(held(strategy)[VICTIM], before)
    strategy.update_engine_weights(policy)
    assert not torch.equal(held(strategy)[VICTIM], before)


def check_lost_writes(strategy, policy):
    """Every rank names the tensors to which one rank wrote nothing."""
    honest = host_layout.copy_weight
    change(strategy, policy)
    if strategy.comm.rank == 1:
        host_layout.copy_weight = lambda place, shard: None
    try:
        strategy.update_engine_weights(policy)
    except (WeightSyncError, RankError) as error:
        assert f"{VICTIM} differs from the trainer's" in str(error), error
    else:
        raise AssertionError("nobody noticed")
    assert strategy.engine.needs_weights
    host_layout.copy_weight = honest
    strategy.update_engine_weights(policy)


def check_refusal(strategy, policy):
    """If the engine of one rank misses a weight, no rank generates before the next sync: it would wait for that one."""
    honest = WeightAccount.problems
    if strategy.comm.rank == 1:
        WeightAccount.problems = lambda account: ["missing"]
    try:
        strategy.update_engine_weights(policy)
    except (WeightSyncError, RankError) as error:
        assert "missing" in str(error), error
    WeightAccount.problems = honest
    assert strategy.engine.needs_weights
    strategy.update_engine_weights(policy)
    assert not strategy.engine.needs_weights


def check_level_2(strategy, policy):
    """Weights that are dropped leave the memory, and the next sync brings them back to it."""
    strategy.engine.sleep(2)
    assert not any(map(is_mapped, held(strategy).values()))
    assert all(parameter.untyped_storage().nbytes() == 0 for parameter in held(strategy).values())
    assert "lightrl-weights" not in Path("/proc/self/maps").read_text()
    strategy.update_engine_weights(policy)
    assert all_together(strategy)


def check_apart(strategy, policy):
    """If one rank maps other memory, as on another host, every rank keeps weights of its own."""
    honest = host_memory._mapped
    if strategy.comm.rank == 1:
        host_memory._mapped = lambda path, size: torch.zeros(size, dtype=torch.uint8)
    strategy.setup_inference_engine(None, "native", actor=policy)
    host_memory._mapped = honest
    strategy.update_engine_weights(policy)
    assert not any(map(is_mapped, held(strategy).values()))
    for name, whole in wholes(strategy, policy).items():
        assert torch.equal(held(strategy)[name], whole), name


def check_mapped_before(strategy, policy):
    """Weights that each rank has mapped for itself, as from a file, are not taken for common ones."""

    def build(**parts):
        engine = build_native_engine(**parts)
        for parameter in engine.model.parameters():
            parameter.data = torch.frombuffer(bytearray(parameter.nbytes), dtype=parameter.dtype).view(parameter.shape)
        assert all(map(is_mapped, engine.model.parameters()))
        return engine

    strategy.serving.factories = {"native": build}
    strategy.setup_inference_engine(None, "native", actor=policy)
    for name, whole in wholes(strategy, policy).items():
        assert torch.equal(held(strategy)[name], whole), name


def check_end(strategy, policy):
    """The memory is given back with its engine."""
    strategy.setup_inference_engine(None, "native", actor=policy)
    assert "lightrl-weights" in Path("/proc/self/maps").read_text()
    strategy.serving.close()
    gc.collect()
    assert "lightrl-weights" not in Path("/proc/self/maps").read_text()


if __name__ == "__main__":
    strategy = create_strategy(parse_config(GRPOConfig, ["--strategy", "fsdp", *sys.argv[1:]]))
    strategy.setup_distributed()
    policy = strategy.prepare_model(tiny_policy())
    strategy.setup_inference_engine(None, "native", actor=policy)
    assert all_together(strategy)
    check_contents(strategy, policy)
    if "bfloat16" not in sys.argv:  # in which a greedy choice is a matter of rounding
        check_generation(strategy, policy)
    check_order(strategy, policy)
    check_lost_writes(strategy, policy)
    check_refusal(strategy, policy)
    check_level_2(strategy, policy)
    if "bfloat16" not in sys.argv:
        check_generation(strategy, policy)
    check_apart(strategy, policy)
    check_mapped_before(strategy, policy)
    check_end(strategy, policy)
    strategy.close()
    print("all checked", flush=True)
