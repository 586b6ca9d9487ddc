"""SGLang with the adapters of a policy: it computes what the trainer does, from adapters alone after the first sync."""

import copy
from contextlib import contextmanager

import other_adapters
import pytest
import sabotaged_adapters
import torch
from sabotaged_loader import FAULT_FILE
from sglang_testing import tiny

from lightrl.config import GRPOConfig, LoraConfig
from lightrl.engines.base import SamplingParams, WeightSyncError
from lightrl.models import lora
from lightrl.models.policy import Policy, response_batch
from lightrl.plan.adapters import described_adapters
from lightrl.plan.models import policy_of
from lightrl.strategy import create_strategy
from lightrl.strategy.serving.adapter_source import serve_adapters

pytest.importorskip("peft")
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14]]
PARAMS = [SamplingParams(max_new_tokens=20, ignore_eos=True, n=2)] * len(PROMPTS)


def rounded():
    """A model whose weights are numbers of bfloat16, as those of a checkpoint are."""
    model = tiny("tied")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


@contextmanager
def served(*, is_unmerged=True, others=None, **options):
    """(strategy, policy) with an engine that has the model's weights and adapters; the canary checks every sync."""
    from lightrl.engines.sglang.adapted import AdaptedSGLangEngine

    AdaptedSGLangEngine.loader = f"{sabotaged_adapters.__name__}.load_bucket"
    model = rounded()
    lora.add_adapters(model, LoraConfig(rank=4), seed=0)
    strategy = create_strategy(GRPOConfig(strategy="single", canary_every=1, engine_mem_fraction=0.2, **options))
    strategy.setup_distributed()
    if is_unmerged:
        serve_adapters(strategy, others)
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
def folders(tmp_path_factory):
    """Of two adapters of a user's, one of a larger rank than the policy's."""
    return other_adapters.user_adapters(rounded(), tmp_path_factory.mktemp("others"))


@pytest.fixture(scope="module")
def started(folders):
    with served(others=folders) as both:
        yield both


@pytest.fixture(scope="module")
def models(folders):
    """What each adapter makes of the model, as peft has it, but for the policy's."""
    base = rounded()
    return {"base": base, **{name: other_adapters.with_adapter(base, folder) for name, folder in folders.items()}}


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


ALL = ("policy", "base", "opponent", "judge")


def plain(policy):
    """A copy that runs one sequence at a time, as transformers does."""
    model = copy.deepcopy(policy.hf)
    model.set_attn_implementation("eager")
    return model


def gap_of(strategy, models, names=ALL):
    """The largest difference of a logprob to the model of the adapter that its request asked for."""
    prompts, params, asked = other_adapters.mixed(names)
    items = strategy.serving.require_engine().generate(prompts, params)
    return other_adapters.largest_difference(items, asked, models)


def test_one_batch_mixes_adapters_and_each_sample_has_its_own(ready, models):
    strategy, policy = ready
    assert raw_of(strategy).adapters == ALL
    models = {**models, "policy": plain(policy)}
    assert gap_of(strategy, models) < 1e-5
    for name in (*ALL, *reversed(ALL)):  # the same prompts, which are cached
        assert gap_of(strategy, models, (name,)) < 1e-5, name
    swapped = {**models, "opponent": models["judge"], "policy": models["base"]}
    assert gap_of(strategy, swapped, ("opponent",)) > 1e-2  # the adapters are not alike
    assert gap_of(strategy, swapped, ("policy",)) > 1e-2
    move(policy.hf, 0.05)
    strategy.update_engine_weights(policy)
    strategy.serving.require_engine().wake()
    assert gap_of(strategy, models, ("policy",)) > 1e-3
    assert gap_of(strategy, {**models, "policy": plain(policy)}) < 1e-5


def test_samples_of_all_adapters_go_on_during_a_sync(ready, models):
    strategy, policy = ready
    raw, names = raw_of(strategy), ("base", "opponent", "judge")
    many = {"max_new_tokens": 200, "ignore_eos": True}
    asked = {raw.submit([5, 6, 7], SamplingParams(adapter=name, **many)): name for name in names}
    raw.step()
    move(policy.hf, 0.05)
    raw.load_weights(strategy.serving.source.full_parameters(policy, torch.float32), 98)
    done = []
    while raw.has_unfinished():
        done += raw.step()
    assert {len(item.output_token_ids) for item in done} == {200}
    assert any(98 in item.versions for item in done)
    assert other_adapters.largest_difference(done, [asked[item.request_id] for item in done], models) < 1e-5


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
def test_sleep_keeps_adapters_or_is_followed_by_whole_weights(ready, models, level):
    strategy, policy = ready
    engine = strategy.serving.require_engine()
    engine.sleep(level)
    if level == 2:
        assert engine.needs_weights
        (raw_of(strategy)._reports / FAULT_FILE).write_text("memory_given_back")
        strategy.update_engine_weights(policy)
        assert strategy.serving.last_sync.num_bytes > sum(item.nbytes for _, item in lora.plain_parameters(policy.hf))
    engine.wake()
    assert differences(strategy, policy).max() < 1e-5
    assert gap_of(strategy, {**models, "policy": plain(policy)}) < 1e-5


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("lose_one", f"{sabotaged_adapters.VICTIM} is not held as it was given"),
        ("double_one", f"{sabotaged_adapters.VICTIM} is not held as it was given"),
        ("scale_of_engine", "multiplied the adapter policy by 2, not by 1"),
        ("double_unseen", "a logprob of the engine differs"),
    ],
)
def test_an_adapter_that_did_not_land_or_is_scaled_twice_is_named(ready, fault, named):
    strategy, policy = ready
    generate(strategy)  # the last batch has the policy's adapter
    file = raw_of(strategy)._reports / FAULT_FILE
    file.write_text(fault)
    move(policy.hf, 0.05)
    with pytest.raises(WeightSyncError, match=named) as caught:
        strategy.update_engine_weights(policy)
    assert str(caught.value).count(" is not held") == fault.endswith("_one")
    file.unlink()
    strategy.update_engine_weights(policy)
    assert strategy.serving.last_sync.canary < 1e-5


@pytest.mark.parametrize("fault", ["lose_judge", "double_judge"])
def test_a_lost_or_doubled_adapter_of_the_users_is_named(ready, models, fault):
    strategy, policy = ready
    file = raw_of(strategy)._reports / FAULT_FILE
    victim = "model.layers.0.mlp.down_proj.lora_B.weight"
    file.write_text(f"{fault} {victim}")
    with pytest.raises(WeightSyncError, match=f"judge:{victim} is not held as it was given") as caught:
        strategy.update_engine_weights(policy)
    assert str(caught.value).count(" is not held") == 1
    file.unlink()
    strategy.update_engine_weights(policy)  # sends everything again
    strategy.serving.require_engine().wake()
    assert gap_of(strategy, {**models, "policy": plain(policy)}) < 1e-5


def test_a_plan_counts_the_slots_that_there_are(ready, folders):
    strategy, policy = ready
    config = GRPOConfig(engine="sglang", lora=LoraConfig(rank=4, engine="unmerged"))
    config.lora.others = tuple(f"{name}={folder}" for name, folder in folders.items())
    widened = rounded().config
    widened.intermediate_size = 64  # as SGLang widens 48 for the kernels of a CPU
    planned = described_adapters(config.lora, policy_of(widened, config))
    reports = raw_of(strategy)._reports
    (reports / FAULT_FILE).write_text("count_slots")
    strategy.update_engine_weights(policy)
    assert planned.sglang_numel(config) == int((reports / sabotaged_adapters.SLOTS_FILE).read_text())


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
