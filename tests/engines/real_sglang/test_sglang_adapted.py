"""SGLang with the adapters of a policy: it computes what the trainer does, from adapters alone after the first sync."""

from contextlib import contextmanager

import pytest
import sabotaged_adapters
import torch
from sabotaged_loader import FAULT_FILE
from sglang_testing import tiny

from lightrl.config import GRPOConfig, LoraConfig
from lightrl.engines.base import SamplingParams, WeightSyncError
from lightrl.models import lora
from lightrl.models.policy import Policy, response_batch
from lightrl.strategy import create_strategy
from lightrl.strategy.serving.adapter_source import serve_adapters

pytest.importorskip("peft")
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14]]
PARAMS = [SamplingParams(max_new_tokens=20, ignore_eos=True, n=2)] * len(PROMPTS)


@contextmanager
def served(*, is_unmerged=True, rank=4, **options):
    """(strategy, policy) with an engine that has the model's weights and adapters; the canary checks every sync."""
    from lightrl.engines.sglang.adapted import AdaptedSGLangEngine

    AdaptedSGLangEngine.loader = f"{sabotaged_adapters.__name__}.load_bucket"
    model = tiny("tied")
    lora.add_adapters(model, LoraConfig(rank=rank), seed=0)
    with torch.no_grad():
        for _, parameter in lora.plain_parameters(model):
            parameter.copy_(parameter.bfloat16())  # as those of a checkpoint are
    strategy = create_strategy(GRPOConfig(strategy="single", canary_every=1, engine_mem_fraction=0.2, **options))
    strategy.setup_distributed()
    if is_unmerged:
        serve_adapters(strategy)
    move(model, 0.02)
    policy = strategy.prepare_model(Policy(model))
    strategy.setup_inference_engine(None, "sglang", actor=policy)
    try:
        yield strategy, policy
    finally:
        strategy.serving.close()


def move(model, ratio):
    """Gives every adapter this size, against the weight that it is added to."""
    plain = dict(lora.plain_parameters(model))
    with torch.no_grad():
        for name, adapter in lora.adapters_of(model).items():
            adapter.up.copy_(torch.randn(adapter.up.shape))
            adapter.up.mul_(ratio * plain[name].norm() / adapter.delta(adapter.down, adapter.up).norm())


@pytest.fixture(scope="module")
def started():
    with served() as both:
        yield both


@pytest.fixture
def ready(started):
    """After a sync of new adapters, awake."""
    strategy, policy = started
    (raw_of(strategy)._reports / FAULT_FILE).unlink(missing_ok=True)
    move(policy.hf, 0.05)
    strategy.update_engine_weights(policy)
    strategy.serving.require_engine().wake()
    return strategy, policy


def raw_of(strategy):
    return strategy.serving.require_engine().engine


def generate(strategy, params=PARAMS):
    return raw_of(strategy).generate(PROMPTS, params)


def differences(strategy, policy, items=None):
    """Of each logprob, engine against trainer."""
    items = items or generate(strategy)
    pairs = [(item.prompt_token_ids, item.output_token_ids) for item in items]
    (scores,) = strategy.forward([response_batch(pairs)], model=policy)
    return (scores.logprobs - torch.tensor([value for item in items for value in item.logprobs])).abs()


def test_the_engine_has_the_logprobs_of_the_trainer(ready):
    strategy, policy = ready
    before = generate(strategy)
    assert differences(strategy, policy, before).max() < 1e-5
    move(policy.hf, 0.05)
    strategy.update_engine_weights(policy)
    sync = strategy.serving.last_sync
    assert sync.canary < 1e-5
    assert sync.num_bytes == sum(item.down.nbytes + item.up.nbytes for item in lora.adapters_of(policy.hf).values())
    strategy.serving.require_engine().wake()
    after = generate(strategy)  # of the same prompts, which were cached under the older adapters
    assert differences(strategy, policy, after).max() < 1e-5
    assert differences(strategy, policy, before).max() > 1e-2


def test_requests_under_way_go_on_with_the_new_adapters(ready):
    strategy, policy = ready
    raw = raw_of(strategy)
    raw.submit([5, 6, 7], SamplingParams(max_new_tokens=240, ignore_eos=True))
    raw.step()
    move(policy.hf, 0.05)
    raw.load_weights(strategy.serving.source.full_parameters(policy, torch.float32), 99)
    done = []
    while raw.has_unfinished():
        done += raw.step()
    assert {version for version in done[0].versions if version != 99} == {strategy.serving.last_sync.version}
    assert 0 < done[0].versions.index(99) < 240
    assert differences(strategy, policy).max() < 1e-5


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_keeps_adapters_or_is_followed_by_whole_weights(ready, level):
    strategy, policy = ready
    engine = strategy.serving.require_engine()
    engine.sleep(level)
    if level == 2:
        assert engine.needs_weights
        strategy.update_engine_weights(policy)
        assert strategy.serving.last_sync.num_bytes > sum(item.nbytes for _, item in lora.plain_parameters(policy.hf))
    engine.wake()
    assert differences(strategy, policy).max() < 1e-5


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("lose_one", f"{sabotaged_adapters.VICTIM} is not held as it was given"),
        ("double_one", f"{sabotaged_adapters.VICTIM} is not held as it was given"),
        ("scale_of_engine", "multiplied the adapters by 2, not by 1"),
        ("double_unseen", "a logprob of the engine differs"),
    ],
)
def test_an_adapter_that_did_not_land_or_is_scaled_twice_is_named(ready, fault, named):
    strategy, policy = ready
    file = raw_of(strategy)._reports / FAULT_FILE
    file.write_text(fault)
    move(policy.hf, 0.05)
    with pytest.raises(WeightSyncError, match=named) as caught:
        strategy.update_engine_weights(policy)
    assert str(caught.value).count(" is not held") == fault.endswith("_one")
    file.unlink()
    strategy.update_engine_weights(policy)
    assert strategy.serving.last_sync.canary < 1e-5


def test_missing_unknown_and_misshapen_adapters_are_named(ready):
    strategy, policy = ready
    pairs = list(strategy.serving.source.full_parameters(policy, torch.float32))
    name, tensor = pairs[1]
    given = [pairs[0], (name, tensor[:, :-1]), *pairs[2:-1], ("policy.norm.lora_A.weight", tensor)]
    with pytest.raises(WeightSyncError) as caught:
        raw_of(strategy).load_weights(iter(given), 7)
    for text in (f"missing {pairs[-1][0]}", "unknown policy.norm.lora_A.weight", "misshapen adapter of"):
        assert text in str(caught.value)
    strategy.serving.require_engine().version = None
    strategy.update_engine_weights(policy)


def gap(*, is_unmerged):
    """Mean difference of a logprob in bfloat16, engine against trainer, with updates of 0.3 % of the weights."""
    with served(is_unmerged=is_unmerged, dtype="bfloat16") as (strategy, policy):
        torch.manual_seed(1)
        move(policy.hf, 3e-3)
        strategy.update_engine_weights(policy)
        strategy.serving.require_engine().wake()
        many = [SamplingParams(max_new_tokens=200, ignore_eos=True, n=16)] * len(PROMPTS)
        return float(differences(strategy, policy, generate(strategy, many)).mean())


def test_bfloat16_gap_of_merged_and_unmerged_adapters():
    merged, unmerged = gap(is_unmerged=False), gap(is_unmerged=True)
    assert unmerged < merged
