"""Shares one SGLang engine between 2 ranks: both get the same results, sharded weights arrive, errors reach both.

usage: sglang_program.py
"""

import sglang_fast_start
import torch

from lightrl.comm import RankError
from lightrl.config import StrategyOptions
from lightrl.engines.base import SamplingParams, WeightSyncError
from lightrl.strategy.fsdp import FSDPStrategy
from lightrl.testing.tiny_training import tiny_policy

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8]]
PARAMS = {"max_tokens": 8, "n": 2}


def perturb(policy):
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            local = parameter.to_local()
            local.add_(0.2 * torch.randn(local.shape, generator=draw))


def sync(strategy, policy, version):
    strategy.set_global_step(version)
    strategy.update_engine_weights(policy)  # its canary compares logprobs with those of the sharded model
    assert strategy.serving.last_sync.canary < 1e-5, strategy.serving.last_sync


def generate(strategy):
    mine = PROMPTS[:1] if strategy.comm.is_main else PROMPTS[1:]
    items = strategy.gather_and_generate(PARAMS, all_prompt_token_ids=mine)
    assert [item.prompt_token_ids for item in items[::2]] == mine
    assert all(item.versions == [strategy.global_step] * len(item.output_token_ids) for item in items)


def check_same_on_both(strategy):
    strategy.wakeup_inference_engine()
    engine = strategy.engine.engine
    completions = engine.generate(PROMPTS, [SamplingParams(max_new_tokens=5, n=2)] * 3)
    assert len(set(strategy.comm.all_gather_object(tuple(completions)))) == 1
    engine.submit([1, 2], SamplingParams(max_new_tokens=50, ignore_eos=True, n=2))
    engine.step()
    stopped = engine.abort()
    assert len(stopped) == 2
    assert len(set(strategy.comm.all_gather_object(tuple(stopped)))) == 1
    assert not engine.has_unfinished()


def check_errors(strategy, policy):
    engine = strategy.engine.engine
    pairs = list(strategy.full_parameters(policy))
    assert_raises(WeightSyncError, "missing model.norm.weight", lambda: engine.load_weights(pairs[:-1], 5))
    if engine._process is not None:  # an error that only the owner has
        (engine._reports / "extra.json").write_text('{"problems": ["the owner found this"], "unread": []}')
    assert_raises(WeightSyncError, "the owner found this", lambda: engine.load_weights(pairs, 5))
    if engine._process is not None:
        engine._process.require_alive = lambda: (_ for _ in ()).throw(RuntimeError("the owner's schedulers are gone"))
    engine.submit([1], SamplingParams())
    assert_raises((RuntimeError, RankError), "schedulers are gone", engine.step)


def assert_raises(kind, text, function):
    try:
        function()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no {kind} on this rank")


if __name__ == "__main__":
    sglang_fast_start.enable()
    options = StrategyOptions(engine_tp_size=2, engine_mem_fraction=0.2, canary_every=1, exact_batches=True)
    strategy = FSDPStrategy(0, 1.0, 1, 1, options)
    strategy.setup_distributed()
    policy = strategy.prepare_model(tiny_policy())
    strategy.setup_inference_engine(None, "sglang", actor=policy)
    assert strategy.serving.last_sync.canary < 1e-5, strategy.serving.last_sync
    assert strategy.engine.engine.max_model_len == 64
    generate(strategy)
    perturb(policy)
    sync(strategy, policy, 3)
    generate(strategy)  # leaves the engine asleep
    perturb(policy)
    strategy.engine.sleep(2)
    sync(strategy, policy, 4)
    check_same_on_both(strategy)
    check_errors(strategy, policy)
    strategy.close()
    print("all checked", flush=True)
