"""Runs vLLM beside FSDP on 1, 2 or 4 ranks, checks its groups and the state it must not change; rank 0 writes samples.

usage: vllm_program.py OUTPUT.json ENGINE_GROUP_SIZE FAMILY MODEL_FOLDER [killed | raising]
"""

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from tiny_engine_models import load_tiny_model

from lightrl.config import StrategyOptions
from lightrl.engines.base import SamplingParams, WeightSyncError
from lightrl.models.policy import Policy, response_batch
from lightrl.strategy.fsdp import FSDPStrategy
from lightrl.strategy.torch_native import SingleStrategy

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8], [9, 10], [11, 12, 13], [50, 60]]
SHARED = SamplingParams(max_new_tokens=16, temperature=0.7, n=2, seed=3, ignore_eos=True)


def generate(strategy):
    """The same prompts whatever the ranks: the first rank has none, the last one several, if there is more than one."""
    rank, world = strategy.comm.rank, strategy.comm.world
    places = range(len(PROMPTS)) if world == 1 else [i for i in range(len(PROMPTS)) if min(i + 1, world - 1) == rank]
    items = strategy.gather_and_generate(SHARED, all_prompt_token_ids=[PROMPTS[i] for i in places])
    gathered = strategy.comm.all_gather_object([dict(item) for item in items])
    return [item for part in gathered for item in part]


def train(strategy, policy):
    """A step of training goes on beside the engine."""
    batch = response_batch([([1, 2], [3, 4, 5])])
    policy.train()
    loss = -policy(batch).logprobs.mean()
    loss.backward()
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-0.1)
            parameter.grad = None
    return float(loss.detach())


def check_group_agreement(strategy):
    """Ranks of a group that submit different requests would get garbage from vLLM, and no error."""
    engine = strategy.engine.engine
    for prompt, count in ((2 + strategy.comm.rank, 1), (2, 1 + strategy.comm.rank)):
        for _ in range(count):
            engine.submit([prompt], SamplingParams(max_new_tokens=3))
        try:
            engine.step()
        except RuntimeError as error:
            assert "submitted different requests" in str(error), error
        else:
            raise AssertionError("nobody noticed")
        engine.abort()


def check_slices(strategy, policy):
    """Each rank reads its own slice back."""
    (model,) = strategy.engine.engine._llm.apply_model(lambda model: model)
    honest = model.load_weights
    victim = "model.layers.1.self_attn.o_proj.weight"
    model.load_weights = lambda pairs: honest((n, t.roll(1, 1) if n == victim else t) for n, t in pairs)
    try:
        strategy.update_engine_weights(policy)
    except WeightSyncError as error:
        assert f"does not hold {victim} as it was given" in str(error), error
    else:
        raise AssertionError("nobody noticed")
    del model.load_weights
    strategy.update_engine_weights(policy)
    assert strategy.engine.engine.unread == ()


def raise_half_way(strategy):
    """On the last rank only, while the others wait for it inside vLLM."""
    model_runner = strategy.engine.engine._llm.llm_engine.model_executor.driver_worker.worker.model_runner
    if strategy.comm.rank == strategy.comm.world - 1:

        def fail(*_args, **_kwargs):
            raise ArithmeticError("the sampler of one rank fell over")

        model_runner.execute_model = fail
    strategy.gather_and_generate(SHARED, all_prompt_token_ids=PROMPTS)


def leftovers():
    return [path.name for path in Path("/dev/shm").glob("*lightrl*")]


if __name__ == "__main__":
    output, group_size, family, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
    options = StrategyOptions(engine_tp_size=group_size, exact_batches=True)
    cls = FSDPStrategy if "RANK" in os.environ else SingleStrategy
    strategy = cls(0, 1.0, 1, 1, options)
    strategy.setup_distributed(timedelta(seconds=30) if "raising" in sys.argv else None)
    policy = strategy.prepare_model(Policy(load_tiny_model(family, folder)))
    strategy.set_global_step(7)
    environment = dict(os.environ)
    strategy.setup_inference_engine(None, "vllm", actor=policy)
    changed = {name for name, _ in set(os.environ.items()) ^ set(environment.items())}
    changed = sorted(name for name in changed if not name.startswith("VLLM_"))
    assert changed == [], changed
    assert strategy.serving.last_sync.canary < 1e-5
    if "killed" in sys.argv:
        check_slices(strategy, policy)
        assert leftovers() == []
        strategy.comm.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    if "raising" in sys.argv:
        raise_half_way(strategy)
    first = generate(strategy)
    if group_size > 1:
        strategy.wakeup_inference_engine()
        check_group_agreement(strategy)
    strategy.wakeup_inference_engine()
    check_slices(strategy, policy)
    losses = [train(strategy, policy)]
    strategy.set_global_step(8)
    strategy.serving.num_syncs = 0  # the canary is due
    strategy.update_engine_weights(policy)
    assert strategy.serving.last_sync.canary < 1e-5
    second = generate(strategy)
    assert [item["versions"][0] for item in second] == [8] * 12
    if strategy.comm.world == 2:
        strategy.setup_inference_engine(None, "vllm", actor=policy)  # instead of the first, which is closed
        again = generate(strategy)
        assert [item["output_token_ids"] for item in again] == [item["output_token_ids"] for item in second]
    strategy.engine.close()
    losses.append(train(strategy, policy))  # the trainer's process group is still there
    assert losses[1] < losses[0]
    strategy.comm.barrier()
    assert leftovers() == []
    if strategy.comm.is_main:
        Path(output).write_text(json.dumps([first, second]))
    strategy.close()
    assert not dist.is_initialized()
    print("all checked", flush=True)
