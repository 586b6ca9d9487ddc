"""Measures the cost and the savings of unmerged LoRA adapters in the native engine.

python benchmarks/adapter_sync.py --rank 8 --rounds 5

First compares a weight sync of the adapters with one of the merged weights: bytes, CPU seconds, and how much of an
adapter bfloat16 keeps. Then compares decoding in float32, in turn in one process: without adapters, with one, and with
three that share each step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from decode import interleave, random_prompts
from sync import SHAPES, random_model
from torch import Tensor

from lightrl.config import GRPOConfig, LoraConfig
from lightrl.config.adapters import BASE, POLICY
from lightrl.engines.base import SamplingParams
from lightrl.engines.native.adapted import AdaptedEngine, factors_of
from lightrl.engines.native.engine import NativeEngine
from lightrl.engines.weights.adapters import DOWN, UP
from lightrl.models import lora
from lightrl.models.saved_adapters import SavedAdapter
from lightrl.strategy import create_strategy
from lightrl.strategy.serving.adapter_source import serve_adapters

NUM_REQUESTS, PROMPT_LENGTH, LENGTH = 48, 8, 48


def served(name: str, rank: int, *, is_unmerged: bool) -> tuple[Any, Any]:
    strategy = create_strategy(GRPOConfig(strategy="single", dtype="bfloat16", canary_every=0))
    strategy.setup_distributed()
    if is_unmerged:
        serve_adapters(strategy)
    model = random_model(name, torch.bfloat16).float()  # weights that are numbers of bfloat16, as in a checkpoint
    lora.add_adapters(model, LoraConfig(rank=rank), seed=0)
    policy: Any = strategy.prepare_model(model)
    strategy.setup_inference_engine(None, "native", actor=policy)
    return strategy, policy


def set_adapters(model: Any, ratio: float) -> None:
    """Gives every adapter this size, against the weight that it is added to."""
    plain = dict(lora.plain_parameters(model))
    with torch.no_grad():
        for name, adapter in lora.adapters_of(model).items():
            adapter.up.normal_()
            adapter.up.mul_(ratio * plain[name].norm() / adapter.delta(adapter.down, adapter.up).norm())


def lost_share(strategy: Any, model: Any) -> float:
    """Returns how much of all updates the engine lacks, by norm."""
    engine, plain = strategy.serving.engine.engine.model, dict(lora.plain_parameters(model))
    lost = wanted = 0.0
    for name, adapter in lora.adapters_of(model).items():
        layer = engine.get_submodule(name.removesuffix(".weight"))
        found = layer.weight.float() - plain[name].detach()
        for factors in factors_of(layer).values():
            found = found + factors.up.float() @ factors.down.float()
        delta = adapter.delta(adapter.down, adapter.up).detach()
        lost, wanted = lost + float((found - delta).norm() ** 2), wanted + float(delta.norm() ** 2)
    return float((lost / wanted) ** 0.5)


def adapted_engine(name: str, rank: int) -> AdaptedEngine:
    """Returns an engine with the policy's adapter and two others."""
    model = random_model(name, torch.float32)
    layers = [path for path, layer in model.named_modules() if isinstance(layer, torch.nn.Linear) and path != "lm_head"]

    def drawn() -> dict[str, tuple[Tensor, Tensor]]:
        shapes = {path: model.get_submodule(path).weight.shape for path in layers}
        return {
            path: (torch.randn(rank, inputs) / 10, torch.randn(outputs, rank) / 100)
            for path, (outputs, inputs) in shapes.items()
        }

    engine = AdaptedEngine(random_model(name, torch.float32), eos_token_ids=(), device=torch.device("cpu"))
    engine.expect(layers, {other: SavedAdapter(drawn()) for other in ("second", "third")})
    factors = [
        (path + part, item) for path, pair in drawn().items() for part, item in zip((DOWN, UP), pair, strict=True)
    ]
    engine.load_weights([*model.named_parameters(), *factors], 1)
    return engine


def decoding(engine: NativeEngine, name: str, adapters: Sequence[str]) -> Callable[[], None]:
    """Returns a round of requests that take turns in their adapters."""
    prompts = random_prompts(NUM_REQUESTS, PROMPT_LENGTH, SHAPES[name][2])
    params = [
        SamplingParams(max_new_tokens=LENGTH, seed=i, ignore_eos=True, adapter=adapters[i % len(adapters)])
        for i in range(NUM_REQUESTS)
    ]

    def run() -> None:
        done = engine.generate(prompts, params)
        assert {len(item.output_token_ids) for item in done} == {LENGTH}

    return run


def compare_decoding(name: str, rank: int, rounds: int) -> None:
    engine = adapted_engine(name, rank)
    ways = {
        "no adapters": (
            NativeEngine(random_model(name, torch.float32), eos_token_ids=(), device=torch.device("cpu")),
            [POLICY],
        ),
        "the base model beside three": (engine, [BASE]),
        "one of three": (engine, [POLICY]),
        "three in each step": (engine, [POLICY, "second", "third"]),
    }
    times = interleave(rounds, *(decoding(own, name, adapters) for own, adapters in ways.values()))
    for way, spent in zip(ways, times, strict=True):
        ratio = statistics.median(cpu / plain for (_, cpu), (_, plain) in zip(spent, times[0], strict=True))
        print(f"{name}, decoding, {way:28s} {statistics.median(cpu for _, cpu in spent):.3f} CPU seconds, {ratio:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", choices=list(SHAPES), default="mid", help="random model; toy is decoded, too (default: %(default)s)"
    )
    parser.add_argument("--rank", type=int, default=8, help="rank of the adapters (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=5, help="turns of each side, of which the median counts (default: %(default)s)"
    )
    options = parser.parse_args()
    pairs = [served(options.model, options.rank, is_unmerged=flag) for flag in (False, True)]
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(options.rounds):
        for (strategy, model), spent in zip(pairs, seconds, strict=True):
            started = time.process_time()
            strategy.update_engine_weights(model)
            spent.append(time.process_time() - started)
    sizes = [strategy.serving.last_sync.num_bytes for strategy, _ in pairs]
    print(f"bytes: merged {sizes[0]}, adapters {sizes[1]}, {100 * sizes[1] / sizes[0]:.2f} %")
    medians = [statistics.median(spent) for spent in seconds]
    print(f"CPU seconds: merged {medians[0]:.4f}, adapters {medians[1]:.4f}, {medians[0] / medians[1]:.1f} times less")
    for ratio in (1e-4, 1e-3, 1e-2):
        lost = []
        for strategy, model in pairs:
            torch.manual_seed(0)
            set_adapters(model, ratio)
            strategy.update_engine_weights(model)
            lost.append(100 * lost_share(strategy, model))
        print(f"an update of {ratio:g} of the weight: merged loses {lost[0]:.1f} %, adapters {lost[1]:.2f} %")
    for name in dict.fromkeys(("toy", options.model)):
        compare_decoding(name, options.rank, options.rounds)


if __name__ == "__main__":
    main()
