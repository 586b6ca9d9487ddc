"""Two ranks share one vLLM that applies adapters unmerged: each rank proves its slices, and a fault on one is named.

usage: vllm_adapters_program.py MODEL_FOLDER [ENGINE_ARGS]
"""

import copy
import sys
import tempfile
from pathlib import Path

import other_adapters
from other_adapters import COLUMNS, ROWS, move
from tiny_engine_models import load_tiny_model

from lightrl.comm import RankError
from lightrl.config import LoraConfig, StrategyOptions
from lightrl.engines.base import WeightSyncError
from lightrl.models import lora
from lightrl.models.policy import Policy
from lightrl.strategy.fsdp import FSDPStrategy
from lightrl.strategy.serving.adapter_source import serve_adapters


def sync(strategy, policy):
    strategy.update_engine_weights(policy)
    assert strategy.serving.last_sync.canary < 1e-5, strategy.serving.last_sync


def held_factor(engine, name, adapter=1):
    """The memory that vLLM's kernels read a factor of an adapter from, on this rank; 1 is the policy's, 3 the judge."""
    (manager,) = engine._llm.apply_model(lambda model: model.lora_manager)
    layer = manager.modules[name.rsplit(".", 2)[0].replace("gate_proj", "gate_up_proj")]
    slot = manager.lora_index_to_id.index(adapter)
    return (layer.lora_a_stacked if "lora_A" in name else layer.lora_b_stacked)[0][slot]


def check_fault(strategy, policy, name, damage):
    """Damages a factor on the last rank alone, after vLLM has read it."""
    engine = strategy.engine.engine
    honest = engine._give

    def give(adapters, *other):
        held = held_factor(engine, name)
        before = held.clone()
        honest(adapters, *other)
        if strategy.comm.rank == 1 and not other:
            held.copy_(damage(held, before))

    engine._give = give
    move(policy, 7)
    try:
        strategy.update_engine_weights(policy)
    except (WeightSyncError, RankError) as error:
        assert f"does not hold {name} as it was given" in str(error), error
        assert str(error).count("as it was given") == 1, error
    else:
        raise AssertionError(f"nobody noticed {name}")
    del engine._give
    sync(strategy, policy)


def check_others(strategy, models):
    """Each rank has its slices of the user's adapters, too, and a fault in those of one rank is named."""
    names = ("policy", "base", "opponent", "judge")
    prompts, params, asked = other_adapters.mixed(names)
    strategy.engine.wake()
    items = strategy.engine.generate(prompts, params)
    own = [(item, name) for item, name in zip(items, asked, strict=True) if name != "policy"]  # the canary has that
    gap = other_adapters.largest_difference(*zip(*own, strict=True), models)
    assert gap < 1e-5, gap
    if strategy.comm.rank == 1:
        held_factor(strategy.engine.engine, COLUMNS, 3).mul_(2)
    try:
        strategy.update_engine_weights(policy)
    except (WeightSyncError, RankError) as error:
        assert f"does not hold judge:{COLUMNS} as it was given" in str(error), error
    else:
        raise AssertionError("nobody noticed the judge")
    sync(strategy, policy)


if __name__ == "__main__":
    options = StrategyOptions(engine_tp_size=2, canary_every=1, exact_batches=True, engine_args=tuple(sys.argv[2:]))
    strategy = FSDPStrategy(0, 1.0, 1, 1, options)
    strategy.setup_distributed()
    model = load_tiny_model("tied", sys.argv[1])
    base, scratch = copy.deepcopy(model).eval(), tempfile.TemporaryDirectory()
    folders = other_adapters.user_adapters(base, Path(scratch.name))  # the same on each rank
    models = {name: other_adapters.with_adapter(base, folder) for name, folder in folders.items()} | {"base": base}
    lora.add_adapters(model, LoraConfig(rank=4), seed=0)
    serve_adapters(strategy, folders)
    policy = strategy.prepare_model(Policy(model))
    move(policy, 1)
    strategy.setup_inference_engine(None, "vllm", actor=policy)
    first = strategy.serving.last_sync
    assert first.canary < 1e-5, first
    move(policy, 2)
    sync(strategy, policy)
    size = sum(4 * (item.down.numel() + item.up.numel()) for item in lora.adapters_of(policy.hf).values())
    assert strategy.serving.last_sync.num_bytes == size < first.num_bytes
    check_fault(strategy, policy, ROWS, lambda held, before: before)  # not delivered
    check_fault(strategy, policy, COLUMNS, lambda held, before: 2 * held)  # scaled twice
    check_others(strategy, models)
    strategy.engine.sleep(2)
    sync(strategy, policy)
    strategy.close()
    print("all checked", flush=True)
