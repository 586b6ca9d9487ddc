"""Compares a weight sync of LoRA adapters with one of the merged weights: bytes, CPU seconds, and what bfloat16 keeps.

python benchmarks/adapter_sync.py --rank 8 --rounds 5
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from sync import random_model

from lightrl.config import GRPOConfig, LoraConfig
from lightrl.models import lora
from lightrl.strategy import create_strategy
from lightrl.strategy.serving.adapter_source import serve_adapters


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
        found, factors = layer.weight.float() - plain[name].detach(), getattr(layer, "adapter_factors", None)
        if factors is not None:
            found = found + factors.up.float() @ factors.down.float()
        delta = adapter.delta(adapter.down, adapter.up).detach()
        lost, wanted = lost + float((found - delta).norm() ** 2), wanted + float(delta.norm() ** 2)
    return float((lost / wanted) ** 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="mid")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
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


if __name__ == "__main__":
    main()
