"""Weight syncs that send adapters: what they send, what proves them, and what each fault is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2MoeConfig, Qwen3Config

from lightrl.config import GRPOConfig, LoraConfig
from lightrl.engines.base import WeightSyncError
from lightrl.engines.native import adapted
from lightrl.engines.native.adapted import AdaptedEngine
from lightrl.models import lora
from lightrl.models.policy import Policy
from lightrl.strategy import StrategyBase, create_strategy
from lightrl.strategy.serving.adapter_source import AdapterSource, check_adapters, serve_adapters, serve_as_configured

pytest.importorskip("peft")
program = pytest.importorskip("lora_program")
other_adapters = pytest.importorskip("other_adapters")

LAYER = "model.layers.1.self_attn.v_proj"
UP = f"{LAYER}.lora_B.weight"
Pairs = Iterator[tuple[str, Tensor]]


def served(*, is_unmerged: bool = True, dtype: Any = "float32") -> tuple[StrategyBase, Policy]:
    """Returns a strategy with an engine, and its policy, whose weights are numbers of bfloat16."""
    strategy = create_strategy(GRPOConfig(strategy="single", dtype=dtype))
    strategy.setup_distributed()
    if is_unmerged:
        serve_adapters(strategy)
    policy = program.fresh(strategy)
    with torch.no_grad():
        for _, parameter in lora.plain_parameters(policy.hf):
            parameter.copy_(parameter.bfloat16())
    set_adapters(policy, 1e-2)
    strategy.setup_inference_engine(None, "native", actor=policy)
    return strategy, policy


def set_adapters(policy: Policy, ratio: float) -> None:
    """Gives every adapter this size, against the weight that it is added to."""
    draws, plain = torch.Generator().manual_seed(3), dict(lora.plain_parameters(policy.hf))
    with torch.no_grad():
        for name, adapter in lora.adapters_of(policy.hf).items():
            adapter.up.copy_(torch.randn(adapter.up.shape, generator=draws))
            adapter.up.mul_(ratio * plain[name].norm() / adapter.delta(adapter.down, adapter.up).norm())


def engine_of(strategy: StrategyBase) -> AdaptedEngine:
    engine: Any = strategy.serving.require_engine().engine
    return engine


def test_only_the_adapters_are_sent_again() -> None:
    strategy, policy = served()
    first = strategy.serving.last_sync
    set_adapters(policy, 2e-2)
    assert program.largest_difference(strategy, policy) > 1e-4  # the engine has the older adapters still
    strategy.update_engine_weights(policy)
    second = strategy.serving.last_sync
    assert first is not None
    assert second is not None
    adapters = lora.adapters_of(policy.hf).values()
    size = sum(adapter.down.nbytes + adapter.up.nbytes for adapter in adapters)
    whole = sum(item.nbytes for _, item in lora.plain_parameters(policy.hf))
    assert (first.num_bytes, second.num_bytes) == (whole + size, size)
    assert program.largest_difference(strategy, policy) < 1e-5


def test_a_deep_sleep_and_a_failed_sync_are_followed_by_whole_weights() -> None:
    strategy, policy = served()
    engine = strategy.serving.require_engine()
    engine.sleep(2)
    assert program.largest_difference(strategy, policy) < 1e-5
    broken, strategy.serving.source.full_parameters = strategy.serving.source.full_parameters, dropping(strategy, UP)
    with pytest.raises(WeightSyncError):
        strategy.update_engine_weights(policy)
    strategy.serving.source.full_parameters = broken  # type: ignore[method-assign]
    strategy.update_engine_weights(policy)
    assert strategy.serving.last_sync is not None
    assert strategy.serving.last_sync.num_bytes > sum(item.nbytes for _, item in lora.plain_parameters(policy.hf))
    assert program.largest_difference(strategy, policy) < 1e-5


def changed(strategy: StrategyBase, change: Callable[[str, Tensor], Tensor | None]) -> Any:
    """Returns what sends a changed tensor in place of each, and none for None."""
    honest = strategy.serving.source.full_parameters

    def send(*args: Any) -> Pairs:
        for name, tensor in honest(*args):
            found = change(name, tensor)
            if found is not None:
                yield name, found

    return send


def dropping(strategy: StrategyBase, victim: str) -> Any:
    return changed(strategy, lambda name, tensor: None if name == victim else tensor)


FAULTS: dict[str, tuple[Callable[[str, Tensor], Tensor | None], str]] = {
    "not delivered": (lambda name, tensor: None if name == UP else tensor, f"missing {UP}"),
    "scaled twice": (lambda name, tensor: 2 * tensor if name == UP else tensor, f"{UP} differs from the trainer's"),
    "rows swapped": (lambda name, tensor: tensor.flip(0) if name == UP else tensor, f"{UP} differs"),
    "misshapen": (lambda name, tensor: tensor[:-1] if name == UP else tensor, f"misshapen adapter of {LAYER}"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_the_way_is_named(fault: str) -> None:
    change, message = FAULTS[fault]
    strategy, policy = served()
    strategy.serving.source.full_parameters = changed(strategy, change)  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match=message):
        strategy.update_engine_weights(policy)


def test_an_adapter_of_a_layer_that_has_none_is_named() -> None:
    strategy, policy = served()
    honest = strategy.serving.source.full_parameters
    extra = ("model.norm.lora_A.weight", torch.zeros(4, 4))
    strategy.serving.source.full_parameters = lambda *args: iter([*honest(*args), extra])  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match=r"unknown model\.norm\.lora_A\.weight"):
        strategy.update_engine_weights(policy)


def test_an_engine_that_keeps_an_older_adapter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, policy = served()
    set_adapters(policy, 2e-2)
    honest = AdaptedEngine._take
    monkeypatch.setattr(AdaptedEngine, "_take", lambda self, name, *pair: name == LAYER or honest(self, name, *pair))
    with pytest.raises(WeightSyncError, match=f"the engine does not hold {UP} as it was given"):
        strategy.update_engine_weights(policy)


def test_the_canary_sees_an_engine_that_applies_adapters_twice() -> None:
    strategy, policy = served()
    for part in engine_of(strategy)._runner._fused.parts():  # type: ignore[union-attr]
        if isinstance(part, adapted.AdaptedLinear):
            part._up.mul_(2)  # behind the comparison of weights
    strategy.serving.num_syncs = 0  # the canary is due
    strategy.serving.source.full_parameters = lambda *args: iter(())  # type: ignore[assignment, method-assign, return-value]
    strategy.serving.source.weight_fingerprints = lambda *args: None  # type: ignore[method-assign]
    engine_of(strategy)._sizes = {}
    set_adapters(policy, 1e-2)
    with pytest.raises(WeightSyncError, match="a logprob of the engine differs"):
        strategy.update_engine_weights(policy)


@pytest.mark.parametrize(("is_unmerged", "lost"), [(False, 0.5), (True, 0.01)])
def test_bfloat16_keeps_a_small_update_only_beside_the_weights(is_unmerged: bool, lost: float) -> None:
    strategy, policy = served(is_unmerged=is_unmerged, dtype="bfloat16")
    set_adapters(policy, 1e-3)
    strategy.update_engine_weights(policy)
    adapter, name = lora.adapters_of(policy.hf)[f"{LAYER}.weight"], f"{LAYER}.weight"
    wanted = adapter.delta(adapter.down, adapter.up).detach()
    base = dict(lora.plain_parameters(policy.hf))[name].detach()
    layer = engine_of(strategy).model.get_submodule(LAYER)
    found = layer.weight.float() - base
    for factors in adapted.factors_of(layer).values():
        found += factors.up.float() @ factors.down.float()
    share = float((found - wanted).norm() / wanted.norm())
    assert share < lost if is_unmerged else share > lost
    assert program.largest_difference(strategy, policy) < 0.05  # both are within the rounding of activations


def test_modules_apply_adapters_like_the_fused_forward() -> None:
    strategy, policy = served()
    runner = engine_of(strategy)._runner
    assert runner.uses_fused_forward
    runner._fused = runner._verified = None
    assert program.largest_difference(strategy, policy) < 1e-5
    assert not runner.uses_fused_forward


SHAPE = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}
SHAPE |= {"intermediate_size": 24, "num_key_value_heads": 1}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
ATTENTION = ("q_proj", "o_proj")


def check_for_sglang(folder: Path, model: Any, rival: Any, targets: tuple[str, ...]) -> None:
    """Checks a run before it reads weights: the model's folder has none."""
    model.config.save_pretrained(folder / "model")
    saved = other_adapters.save_adapter(model, folder / "rival", rank=2, targets=rival)
    options = LoraConfig(rank=2, engine="unmerged", others=(f"rival={saved}",), target_modules=targets)
    check_adapters(GRPOConfig(engine="sglang", lora=options), str(folder / "model"))


def test_layers_that_sglang_takes_no_adapters_beside_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    check_for_sglang(tmp_path, AutoModelForCausalLM.from_config(Qwen3Config(**SHAPE)), "all-linear", ("all-linear",))
    model = AutoModelForCausalLM.from_config(Qwen2MoeConfig(**SHAPE, **EXPERTS))
    check_for_sglang(tmp_path, model, ATTENTION, ATTENTION)
    named = r": --engine sglang applies adapters beside q_proj, k_proj, v_proj, o_proj, qkv_proj of .*, not beside "
    layer = r"model\.layers\.0\.mlp\.shared_expert_gate \(such layers: 2\)"
    with pytest.raises(ValueError, match=rf"--lora\.others rival{named}{layer}"):
        check_for_sglang(tmp_path, model, ("q_proj", "shared_expert_gate"), ATTENTION)
    with pytest.raises(ValueError, match=rf"--lora\.target_modules{named}{layer}"):
        check_for_sglang(tmp_path, model, ATTENTION, ("q_proj", "shared_expert_gate"))


def test_layers_of_a_vision_tower_are_refused_for_sglang(tmp_path: Path) -> None:
    tiny_vlm = pytest.importorskip("tiny_vlm", exc_type=ImportError)
    model, targets = tiny_vlm.tiny_model("qwen2_5_vl"), ("q_proj", "v_proj")
    check_for_sglang(tmp_path, model, r"model\.language_model\..*proj", targets)
    with pytest.raises(ValueError, match=r"rival: .* of this language model, not beside model\.visual\.blocks\.0\."):
        check_for_sglang(tmp_path, model, r"model\.visual\..*gate_proj", targets)  # a name of the language model's, too


@pytest.mark.parametrize(
    ("engine", "options", "is_unmerged"),
    [
        ("vllm", {}, False),  # by default the vision tower has adapters too
        ("vllm", {"target_modules": ("q_proj", "v_proj")}, True),
        ("vllm", {"engine": "unmerged"}, True),  # the sync refuses it by name
        ("native", {}, True),
    ],
)
def test_vllm_gets_adapters_of_a_vision_tower_merged(engine: str, options: dict[str, Any], is_unmerged: bool) -> None:
    config = GRPOConfig(strategy="single", dtype="bfloat16", engine=engine, lora=LoraConfig(rank=2, **options))
    strategy = create_strategy(config)
    model = pytest.importorskip("tiny_vlm").tiny_model("qwen2_5_vl")
    lora.add_adapters(model, config.lora, seed=0)
    serve_as_configured(strategy, config, model)
    assert isinstance(strategy.serving.source, AdapterSource) == is_unmerged
