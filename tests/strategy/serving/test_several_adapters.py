"""Requests choose among the policy's adapter, the base model and a user's own: each has the logprobs of its own."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrl.config import GRPOConfig, LoraConfig
from lightrl.engines.base import SamplingParams, WeightSyncError
from lightrl.engines.native.adapted import AdaptedEngine, factors_of
from lightrl.models import lora
from lightrl.models.policy import Policy
from lightrl.strategy import StrategyBase, create_strategy
from lightrl.strategy.serving.adapter_source import serve_adapters
from lightrl.testing.tiny_training import tiny_policy

pytest.importorskip("peft")
program = pytest.importorskip("lora_program")
others = pytest.importorskip("other_adapters")
moe = pytest.importorskip("tiny_moe")

ALL = ("policy", "base", "opponent", "judge")
Served = tuple[StrategyBase, Policy, dict[str, Any]]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """(strategy, policy, models), the last as peft has them, by the names of their adapters."""
    base = plain(tiny_policy().hf)
    folders = others.user_adapters(base, tmp_path)
    strategy = create_strategy(GRPOConfig(strategy="single"))
    strategy.setup_distributed()
    serve_adapters(strategy, folders)
    policy = program.fresh(strategy)
    move(policy)
    strategy.setup_inference_engine(None, "native", actor=policy)
    models = {name: others.with_adapter(base, folder) for name, folder in folders.items()}
    yield strategy, policy, {"policy": plain(policy.hf), "base": base, **models}
    strategy.serving.close()


def plain(model: Any) -> Any:
    """Returns a copy that runs one sequence at a time, as transformers does."""
    own = copy.deepcopy(model)
    own.set_attn_implementation("eager")
    return own


def move(policy: Policy) -> None:
    with torch.no_grad():
        for adapter in lora.adapters_of(policy.hf).values():
            adapter.up.add_(torch.randn(adapter.up.shape) * 0.3)


def difference(strategy: StrategyBase, models: dict[str, Any], names: Any = ALL, **settings: Any) -> float:
    prompts, params, asked = others.mixed(names, **settings)
    engine = strategy.serving.require_engine()
    engine.wake()
    return float(others.largest_difference(engine.generate(prompts, params), asked, models))


def engine_of(strategy: StrategyBase) -> AdaptedEngine:
    engine: Any = strategy.serving.require_engine().engine
    return engine


def test_one_batch_mixes_adapters_and_each_row_has_its_own(served: Served) -> None:
    strategy, _, models = served
    assert difference(strategy, models) < 1e-5
    swapped = {**models, "opponent": models["judge"], "policy": models["base"]}
    assert difference(strategy, swapped, ("opponent",)) > 1e-2  # the adapters are not alike
    assert difference(strategy, swapped, ("policy",)) > 1e-2


def test_modules_mix_adapters_like_the_fused_forward(served: Served) -> None:
    strategy, _, models = served
    runner = engine_of(strategy)._runner
    assert runner.uses_fused_forward
    runner._fused = runner._verified = None
    assert difference(strategy, models) < 1e-5
    assert not runner.uses_fused_forward


def test_a_cache_of_the_models_own_has_the_adapter_of_its_sample(served: Served) -> None:
    strategy, _, models = served
    runner = engine_of(strategy)._runner
    runner._fused = runner._verified = None
    runner._modules = object()  # type: ignore[assignment]  # fails its comparison
    assert difference(strategy, models) < 1e-5
    assert type(runner._verified).__name__ == "OwnCacheForward"


def test_one_prompt_by_one_adapter_after_the_other(served: Served) -> None:
    strategy, _, models = served
    for name in (*ALL, *reversed(ALL)):
        assert difference(strategy, models, (name,)) < 1e-5, name


def test_samples_that_wait_for_a_row_keep_their_adapter(served: Served) -> None:
    strategy, _, models = served
    engine_of(strategy)._scheduler._num_rows = 3  # so that the prompts of a request are run once and copied
    assert difference(strategy, models, n=5) < 1e-5


def test_samples_that_go_on_after_a_sync_keep_their_adapter(served: Served) -> None:
    strategy, policy, models = served
    engine = strategy.serving.require_engine()
    params = {name: SamplingParams(max_new_tokens=20, ignore_eos=True, adapter=name) for name in ("opponent", "base")}
    asked = {engine.submit(others.PROMPTS[0], own): name for name, own in params.items()}
    engine.step()
    move(policy)
    strategy.update_engine_weights(policy)
    done = []
    while engine.has_unfinished():
        done += engine.step()
    assert {len(item.output_token_ids) for item in done} == {20}
    assert others.largest_difference(done, [asked[item.request_id] for item in done], models) < 1e-5


def test_only_the_policys_adapter_changes_with_a_sync(served: Served) -> None:
    strategy, policy, models = served
    move(policy)
    strategy.update_engine_weights(policy)
    adapters = lora.adapters_of(policy.hf).values()
    assert strategy.serving.last_sync is not None
    assert strategy.serving.last_sync.num_bytes == sum(item.down.nbytes + item.up.nbytes for item in adapters)
    assert difference(strategy, models, ("policy",)) > 1e-2
    assert difference(strategy, {**models, "policy": plain(policy.hf)}) < 1e-5


@pytest.mark.parametrize("level", [1, 2])
def test_all_adapters_are_right_after_a_sleep(served: Served, level: int) -> None:
    strategy, policy, models = served
    engine = strategy.serving.require_engine()
    engine.sleep(level)
    if level == 2:
        for held in (pair for layer in engine_of(strategy).model.modules() for pair in factors_of(layer).values()):
            held.up.zero_()  # as memory that was given back may be
        strategy.update_engine_weights(policy)
    assert difference(strategy, models) < 1e-5


@pytest.mark.parametrize("factor", [0, 2])
def test_a_lost_or_doubled_adapter_of_the_users_is_named(served: Served, factor: float) -> None:
    strategy, policy, _ = served
    layer: Any = engine_of(strategy).model.get_submodule("model.layers.1.self_attn.v_proj")
    layer.adapter_factors[2].up.mul_(factor)
    move(policy)
    with pytest.raises(
        WeightSyncError, match=r"does not hold judge:model\.layers\.1\.self_attn\.v_proj\.lora_B"
    ) as caught:
        strategy.update_engine_weights(policy)
    assert str(caught.value).count("does not hold") == 1
    strategy.update_engine_weights(policy)  # sends everything again
    assert strategy.serving.require_engine().version is not None


def test_an_unknown_adapter_is_refused_with_the_names_that_there_are(served: Served) -> None:
    strategy, _, models = served
    with pytest.raises(
        ValueError,
        match=r"prompt 0 asks for adapter 'rival'\. This engine has policy, base, .* --lora\.others rival=FOLDER",
    ):
        difference(strategy, models, ("rival",))
    assert difference(strategy, models) < 1e-5  # and it goes on working
    merged = create_strategy(GRPOConfig(strategy="single"))
    merged.setup_distributed()
    merged.setup_inference_engine(None, "native", actor=program.fresh(merged))
    with pytest.raises(ValueError, match=r"This engine has policy\. Others need --lora\.rank"):
        difference(merged, models, ("base",))


def test_gathered_requests_choose_an_adapter_and_are_not_trainable(served: Served) -> None:
    strategy, _, models = served
    asked = {"max_tokens": 6, "ignore_eos": True, "adapter": "judge"}
    items = strategy.engine_generate_local(asked, prompt_token_ids=others.PROMPTS)
    assert others.largest_difference(items, ["judge"] * 3, models) < 1e-5
    assert not any(item.is_trainable for item in items)


def served_moe(base: Any, folder: Path) -> Served:
    """The same of a mixture of experts, whose layers are run by modules."""
    folders = {
        "opponent": others.save_adapter(base, folder / "opponent", rank=2, seed=1, targets=("o_proj",)),
        "judge": others.save_adapter(base, folder / "judge", rank=5, seed=2, targets=lora._inner_linear_layers(base)),
    }
    strategy = create_strategy(GRPOConfig(strategy="single"))
    strategy.setup_distributed()
    serve_adapters(strategy, folders)
    hf = copy.deepcopy(base)
    lora.add_adapters(hf, LoraConfig(rank=3), seed=0)
    policy: Any = strategy.prepare_model(Policy(hf))
    move(policy)
    strategy.setup_inference_engine(None, "native", actor=policy)
    models = {name: others.with_adapter(base, folder) for name, folder in folders.items()}
    return strategy, policy, {"policy": plain(policy.hf), "base": base, **models}


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe"])
def test_mixtures_of_experts_mix_adapters_beside_what_all_tokens_pass(name: str, tmp_path: Path) -> None:
    strategy, _, models = served_moe(plain(moe.tiny_moe(name)), tmp_path)
    assert not engine_of(strategy)._runner.takes_turns
    assert difference(strategy, models) < 1e-5
    strategy.serving.close()


def test_rows_take_turns_where_experts_have_adapters(tmp_path: Path) -> None:
    strategy, policy, models = served_moe(plain(moe.listed_moe()), tmp_path)
    assert any(".experts.3.up_proj" in layer for layer in lora.adapters_of(policy.hf))
    runner = engine_of(strategy)._runner
    assert runner.takes_turns
    assert difference(strategy, models) < 1e-5
    assert difference(strategy, models, ("judge",)) < 1e-5
    assert not runner.uses_fused_forward
    runner._verified = None
    runner._modules = object()  # type: ignore[assignment]  # fails its comparison
    assert difference(strategy, models) < 1e-5
    assert type(runner._verified).__name__ == "OwnCacheForward"
    strategy.serving.close()
