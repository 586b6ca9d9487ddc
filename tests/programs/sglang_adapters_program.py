"""Two ranks and the real SGLang with a policy's adapters and two of a user's; a fault in one scheduler is named.

usage: sglang_adapters_program.py ENGINE_TP_SIZE
"""

import copy
import sys
import tempfile
from pathlib import Path

import other_adapters
import sabotaged_adapters
import sglang_fast_start
from other_adapters import COLUMNS, ROWS, move
from sabotaged_loader import FAULT_FILE
from sglang_testing import tiny

from lightrl.comm import RankError
from lightrl.config import LoraConfig, StrategyOptions
from lightrl.engines.base import WeightSyncError
from lightrl.engines.sglang.adapted import AdaptedSGLangEngine
from lightrl.models import lora
from lightrl.models.policy import Policy
from lightrl.strategy.fsdp import FSDPStrategy
from lightrl.strategy.serving.adapter_source import serve_adapters

LAST = 1  # the rank, and of two schedulers the one, that a fault befalls


def sync(strategy, policy):
    strategy.update_engine_weights(policy)  # its canary compares the policy's logprobs with those of the sharded model
    assert strategy.serving.last_sync.canary < 1e-5, strategy.serving.last_sync


def check_users(strategy, models):
    """Every sample has the logprobs of peft's own model of the adapter that it asked for."""
    prompts, params, asked = other_adapters.mixed(("policy", *models))
    strategy.engine.wake()
    items = strategy.engine.generate(prompts, params)
    own = [(item, name) for item, name in zip(items, asked, strict=True) if name != "policy"]  # the canary has that
    gap = other_adapters.largest_difference(*zip(*own, strict=True), models)
    assert gap < 1e-5, gap
    print(f"logprobs of users' adapters are within {gap:.1e}", flush=True)


def check_fault(strategy, policy, fault, victim, named, *, scheduler):
    """On the last rank's engine, or in one of the schedulers of the only engine."""
    engine = strategy.engine.engine
    if strategy.comm.rank == (0 if scheduler else LAST):
        (engine._reports / FAULT_FILE).write_text(f"{fault} {victim} {scheduler}")
    move(policy, 7)
    try:
        strategy.update_engine_weights(policy)
    except (WeightSyncError, RankError) as error:
        assert f"{named} is not held as it was given" in str(error), error
        assert str(error).count("is not held as it was given") == 1, error
    else:
        raise AssertionError(f"nobody noticed {fault} of {victim}")
    (engine._reports / FAULT_FILE).unlink(missing_ok=True)
    sync(strategy, policy)


if __name__ == "__main__":
    sglang_fast_start.enable()
    AdaptedSGLangEngine.loader = f"{sabotaged_adapters.__name__}.load_bucket"
    size = int(sys.argv[1])
    options = StrategyOptions(engine_tp_size=size, engine_mem_fraction=0.2, canary_every=1, exact_batches=True)
    strategy = FSDPStrategy(0, 1.0, 1, 1, options)
    strategy.setup_distributed()
    model, scratch = tiny("tied"), tempfile.TemporaryDirectory()
    base = copy.deepcopy(model)
    folders = other_adapters.user_adapters(base, Path(scratch.name))  # the same on each rank
    models = {"base": base, **{name: other_adapters.with_adapter(base, folder) for name, folder in folders.items()}}
    lora.add_adapters(model, LoraConfig(rank=4), seed=0)
    serve_adapters(strategy, folders)
    policy = strategy.prepare_model(Policy(model))
    move(policy, 1)
    strategy.setup_inference_engine(None, "sglang", actor=policy)
    first = strategy.serving.last_sync
    assert first.canary < 1e-5, first
    check_users(strategy, models)
    move(policy, 2)
    sync(strategy, policy)
    expected = sum(4 * (item.down.numel() + item.up.numel()) for item in lora.adapters_of(policy.hf).values())
    assert strategy.serving.last_sync.num_bytes == expected < first.num_bytes
    check_users(strategy, models)
    for fault, victim, named in (
        ("lose_one", ROWS, ROWS),
        ("double_one", COLUMNS, COLUMNS),
        ("double_judge", COLUMNS, f"judge:{COLUMNS}"),
    ):
        check_fault(strategy, policy, fault, victim, named, scheduler=size - 1)
    check_users(strategy, models)
    strategy.engine.sleep(2)
    sync(strategy, policy)
    check_users(strategy, models)
    strategy.close()
    print("all checked", flush=True)
