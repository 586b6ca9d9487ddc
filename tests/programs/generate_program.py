"""Generates from the same prompts on 1 or 2 ranks, however they are spread; rank 0 writes the results.

usage: generate_program.py OUTPUT.json ENGINE_GROUP_SIZE STRATEGY [options]
"""

import json
import sys

import torch

from lightrl.comm import RankError
from lightrl.config import GRPOConfig, parse_config
from lightrl.engines.base import SamplingParams
from lightrl.engines.colocated import EngineStatus
from lightrl.strategy import create_strategy
from lightrl.testing.tiny_training import tiny_policy

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8], [9, 10], [11, 12, 13]]


def generate(strategy, counts, params, **options):
    """counts[r] prompts to rank r, in order."""
    start = sum(counts[: strategy.comm.rank])
    mine = PROMPTS[start : start + counts[strategy.comm.rank]]
    items = strategy.gather_and_generate(params, all_prompt_token_ids=mine, **options)
    for item in items:
        assert len(item.output_token_ids) == len(item.logprobs) == len(item.versions)
        assert item.prompt_token_ids in mine
    gathered = strategy.comm.all_gather_object([dict(item) for item in items])
    return [item for part in gathered for item in part]


def assert_same(ours, theirs):
    """Token for token; a matrix product of another batch size may round the last bit of a logprob otherwise."""
    for mine, yours in zip(ours, theirs, strict=True):
        assert {**mine, "logprobs": 0} == {**yours, "logprobs": 0}
        assert max(abs(a - b) for a, b in zip(mine["logprobs"], yours["logprobs"], strict=True)) < 1e-5


def expect(error_type, text, function):
    try:
        function()
    except error_type as error:
        assert text in str(error), error
        return
    raise AssertionError(f"no {error_type.__name__}")


def check_errors(strategy):
    """What one rank asks wrongly stops both, and the engine works after it."""
    rank, world = strategy.comm.rank, strategy.comm.world
    last = rank == world - 1
    prompts = [[1, 10_000]] if last else [[1, 2]]
    both = (
        (ValueError, "prompt") if last and not strategy.serving.group.size > 1 else ((ValueError, RankError), "10000")
    )
    expect(*both, lambda: strategy.gather_and_generate({"max_tokens": 2}, all_prompt_token_ids=prompts))
    assert strategy.engine.status is EngineStatus.SLEEPED  # by the finally
    expect((ValueError, RankError), "neither was given", lambda: strategy.gather_and_generate({}))
    unknown = {"max_tokens": 2, "beam_width": 3}
    expect(
        (ValueError, RankError), "beam_width", lambda: strategy.gather_and_generate(unknown, all_prompt_token_ids=[[1]])
    )
    assert strategy.gather_and_generate({"max_tokens": 2}, all_prompt_token_ids=[]) == []


def check_status(strategy):
    strategy.maybe_sleep_inference_engine()
    strategy.maybe_sleep_inference_engine()
    assert strategy.engine.status is EngineStatus.SLEEPED
    expect(RuntimeError, "The engine is asleep", lambda: strategy.engine_generate_local({"max_tokens": 1}, [[1]]))
    strategy.wakeup_inference_engine()
    strategy.wakeup_inference_engine()
    assert strategy.engine.status is EngineStatus.WAKEUP
    assert len(strategy.engine_generate_local({"max_tokens": 1, "n": 3}, [1, 2])) == 3


if __name__ == "__main__":
    output, group_size = sys.argv[1], int(sys.argv[2])
    flags = ["--strategy", sys.argv[3], "--engine_tp_size", str(group_size), *sys.argv[4:]]
    strategy = create_strategy(parse_config(GRPOConfig, flags))
    strategy.setup_distributed()
    policy = strategy.prepare_model(tiny_policy())
    strategy.set_global_step(7)
    strategy.setup_inference_engine(None, "native", actor=policy)
    world = strategy.comm.world
    shared = SamplingParams(max_new_tokens=6, temperature=1.0, n=2, seed=3)
    spreads = [[5], [5]] if world == 1 else [[3, 2], [0, 5]]
    results = [generate(strategy, counts, shared) for counts in spreads]
    assert_same(results[0], results[1])  # uneven, and none on one rank
    assert strategy.engine.status is EngineStatus.SLEEPED
    generate(strategy, spreads[0], shared, sleep_engine=False)
    assert strategy.engine.status is EngineStatus.WAKEUP
    assert all(item["versions"] == [7] * len(item["versions"]) for item in results[0])
    check_errors(strategy)
    check_status(strategy)
    assert_same(generate(strategy, spreads[0], shared), results[0])  # as before all those errors
    if strategy.comm.is_main:
        with open(output, "w") as file:
            json.dump(results[0], file)
    strategy.close()
    assert not torch.distributed.is_initialized()
    print("all checked", flush=True)
