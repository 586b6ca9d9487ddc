"""Corrupts weight syncs on their way or inside the engine, on 1 or 2 ranks; each fault must be caught and named.

usage: sabotage_program.py STRATEGY [options]
"""

import sys
from itertools import chain

import torch

from lightrl.comm import RankError
from lightrl.config import GRPOConfig, parse_config
from lightrl.engines.base import WeightSyncError
from lightrl.engines.colocated import EngineStatus
from lightrl.strategy import create_strategy
from lightrl.testing.tiny_training import tiny_policy

VICTIM = "model.layers.1.mlp.down_proj.weight"
OTHER = "model.layers.0.mlp.down_proj.weight"


def skip(pairs):
    return ((name, tensor) for name, tensor in pairs if name != VICTIM)


def swap(pairs):
    names = {VICTIM: OTHER, OTHER: VICTIM}
    return ((names.get(name, name), tensor) for name, tensor in pairs)


def scale(pairs):
    return ((name, tensor * 1.01 if name == VICTIM else tensor) for name, tensor in pairs)


def stale(pairs):
    return ((name, tensor - 1e-3 if name == VICTIM else tensor) for name, tensor in pairs)


def swap_rows(pairs):
    return ((name, tensor.roll(1, 0) if name == VICTIM else tensor) for name, tensor in pairs)


def add(pairs):
    return chain(pairs, [("model.extra.weight", torch.zeros(2))])


def repeat(pairs):
    return (pair for name, tensor in pairs for pair in [(name, tensor)] * (2 if name == VICTIM else 1))


def expect_failure(strategy, policy, *texts):
    try:
        strategy.update_engine_weights(policy)
    except WeightSyncError as error:
        assert all(text in str(error) for text in texts), error
        return
    raise AssertionError(f"nobody noticed: {texts}")


def check_on_the_way(strategy, policy):
    honest = strategy.full_parameters
    sabotages = {skip: (VICTIM,), swap: (VICTIM, OTHER), scale: (VICTIM,), stale: (VICTIM,), swap_rows: (VICTIM,)}
    sabotages[repeat] = (VICTIM, "twice")
    for sabotage, texts in [*sabotages.items(), (add, ("model.extra.weight",))]:
        strategy.full_parameters = lambda *args, change=sabotage: change(honest(*args))
        expect_failure(strategy, policy, *texts)
        strategy.full_parameters = honest
        assert strategy.engine.needs_weights  # what it holds now must not generate
    strategy.update_engine_weights(policy)


def check_behind_the_door(strategy, policy):
    """The engine takes what it is given and then holds, or serves, something else."""
    engine, honest = strategy.engine.engine, strategy.engine.engine.load_weights

    def load_and_spoil(weights, version):
        honest(weights, version)
        strategy.comm.barrier()  # under fsdp the ranks map the same memory, which another one may still compare
        with torch.no_grad():
            dict(engine.model.named_parameters())[VICTIM].mul_(1.5)

    engine.load_weights = load_and_spoil
    strategy.serving.num_syncs = 0  # the canary is due
    expect_failure(strategy, policy, "a logprob of the engine differs from the trainer's", "version 7")
    engine.load_weights = honest
    strategy.update_engine_weights(policy)
    assert strategy.serving.last_sync.canary is not None
    assert strategy.serving.last_sync.canary < 1e-4


def check_one_rank(strategy, policy):
    """What goes wrong on one rank only stops every rank, by name."""
    engine, honest = strategy.engine.engine, strategy.engine.engine.load_weights

    def load_and_refuse(weights, version):
        honest(weights, version)
        if strategy.comm.rank == strategy.comm.world - 1:
            raise WeightSyncError(f"{VICTIM} did not land")

    engine.load_weights = load_and_refuse
    try:
        strategy.update_engine_weights(policy)
    except (WeightSyncError, RankError) as error:
        assert f"{VICTIM} did not land" in str(error), error
    else:
        raise AssertionError("nobody noticed")
    engine.load_weights = honest
    strategy.update_engine_weights(policy)


def check_stale_shard(strategy, policy):
    """One rank gathers, or holds, values of an earlier step."""
    parameter = dict(strategy.unwrap_model(policy).named_parameters())[VICTIM]
    shard, honest, is_last = strategy.layout.shard(parameter), strategy.full_parameters, strategy.comm.rank == 1
    is_whole, fresh = strategy.layout.is_whole(parameter), strategy.layout.shard(parameter).clone()

    def gather(*args):
        with torch.no_grad():
            shard.sub_(1e-3 * is_last)
            yield from honest(*args)
            shard.copy_(fresh)

    if is_whole:  # then a rank sends what it holds: its copy of the model is stale
        with torch.no_grad():
            shard.sub_(1e-3 * is_last)
    else:
        strategy.full_parameters = gather
    try:
        strategy.update_engine_weights(policy)
    except (WeightSyncError, RankError) as error:
        assert VICTIM in str(error), error
        assert OTHER not in str(error)
        assert not is_whole or f"{VICTIM} differs between the ranks" in str(error)
    else:
        raise AssertionError("nobody noticed")
    assert strategy.engine.needs_weights or not is_whole
    strategy.full_parameters = honest
    with torch.no_grad():
        shard.copy_(fresh)
    strategy.update_engine_weights(policy)


def check_fingerprints_of_one_rank(strategy, policy):
    """A strategy that has fingerprints on some ranks only is refused at the first sync, on all ranks."""
    honest = strategy.weight_fingerprints
    for silent in (0, 1):
        strategy.weight_fingerprints = lambda *args, at=silent: None if strategy.comm.rank == at else honest(*args)
        try:
            strategy.setup_inference_engine(None, "native", actor=policy)
        except ValueError as error:
            assert f"{'Rank 0' if silent == 0 else 'rank 1'} has none" in str(error), error
        else:
            raise AssertionError("nobody noticed")
    strategy.weight_fingerprints = honest


def check_level_2(strategy, policy):
    """The weights come back by themselves when they are needed."""
    strategy.options.engine_sleep_level = 2
    prompts = [[1, 2, 3]]
    first = strategy.gather_and_generate({"max_tokens": 4, "seed": 5}, all_prompt_token_ids=prompts)
    assert strategy.engine.status is EngineStatus.SLEEPED
    assert strategy.engine.needs_weights
    assert strategy.engine.freed_bytes > sum(p.numel() * 4 for p in tiny_policy().parameters())
    again = strategy.gather_and_generate({"max_tokens": 4, "seed": 5}, all_prompt_token_ids=prompts)
    assert [item.output_token_ids for item in again] == [item.output_token_ids for item in first]
    strategy.update_engine_weights(policy)
    assert strategy.engine.status is EngineStatus.SLEEPED  # only its weights are awake
    assert not strategy.engine.needs_weights


if __name__ == "__main__":
    config = parse_config(GRPOConfig, ["--strategy", sys.argv[1], "--sync_bucket_mb", "1", *sys.argv[2:]])
    strategy = create_strategy(config)
    strategy.setup_distributed()
    policy = strategy.prepare_model(tiny_policy())
    strategy.set_global_step(7)
    if strategy.comm.world > 1:
        check_fingerprints_of_one_rank(strategy, policy)
    strategy.setup_inference_engine(None, "native", actor=policy)
    assert strategy.serving.last_sync.canary is not None  # the first sync is always looked at
    assert strategy.serving.last_sync.gb_per_s > 0
    strategy.update_engine_weights(policy)
    assert strategy.serving.last_sync.canary is None
    check_on_the_way(strategy, policy)
    check_behind_the_door(strategy, policy)
    check_one_rank(strategy, policy)
    if strategy.comm.world > 1:
        check_stale_shard(strategy, policy)
    check_level_2(strategy, policy)
    strategy.close()
    print("all checked", flush=True)
