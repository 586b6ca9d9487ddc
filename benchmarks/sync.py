"""Compares a weight sync to the native engine with a copy of the same bytes, in turn, on one or two ranks.

python benchmarks/sync.py --models toy mid large --rounds 7 --share_weights
torchrun --nproc_per_node 2 benchmarks/sync.py --strategies ddp fsdp --models toy mid

A sync is everything in update_engine_weights: fingerprints, gather, copy and proofs. The canary is off, since it
generates. Read the ratio of CPU seconds on a machine that others use. On several ranks, each rank makes a sync and a
copy of the whole model: times are means over the ranks, including gloo's threads. `transport` is the exchange between
ranks alone, with bare collectives in buckets of the same size; the last ratio leaves it out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from lightrl.config import GRPOConfig, parse_config
from lightrl.strategy import create_strategy
from lightrl.strategy.layout.dtensor import gather_flat

SHAPES = {"toy": (128, 4, 98), "mid": (512, 8, 32_000), "large": (1024, 8, 32_000)}  # hidden size, layers, vocabulary
BUCKET_BYTES = 16 << 20  # of whole tensors, as fsdp gathers them on CPUs


def random_model(name: str, dtype: torch.dtype) -> Any:
    hidden, layers, vocabulary = SHAPES[name]
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 64),
        num_key_value_heads=max(1, hidden // 128),
        head_dim=64,
        tie_word_embeddings=True,
    )
    model: Any = Qwen3ForCausalLM(config)
    return model.to(dtype)


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Returns the wall-clock and the CPU seconds of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - wall, time.process_time() - cpu


def exchange(comm: Any, num_gathered: int, num_tensors: int) -> Callable[[], None]:
    """Returns what makes the collectives of a sync, and nothing else."""
    own, sums = torch.ones(BUCKET_BYTES // comm.world, dtype=torch.uint8), torch.zeros(num_tensors)

    def run() -> None:
        for start in range(0, num_gathered, BUCKET_BYTES):
            length = min(BUCKET_BYTES, num_gathered - start) // comm.world
            gather_flat([own[:length]], comm.world, None)
        comm.all_reduce(sums, "sum")  # the fingerprints
        comm.max_int(0)  # whether a rank failed

    return run


def compare(strategy: Any, name: str, dtype: str, rounds: int) -> str:
    model = random_model(name, getattr(torch, dtype))
    sources = [parameter.detach().to(strategy.device, copy=True) for parameter in model.parameters()]
    targets = [torch.empty_like(source) for source in sources]
    num_bytes = sum(source.nbytes for source in sources)
    policy = strategy.prepare_model(model)
    strategy.setup_inference_engine(None, "native", actor=policy)

    def copy() -> list[Tensor]:
        return [target.copy_(source) for target, source in zip(targets, sources, strict=True)]

    def sync() -> None:
        strategy.update_engine_weights(policy)

    parameters, comm = list(policy.parameters()), strategy.comm
    num_gathered = 0 if all(map(strategy.layout.is_whole, parameters)) else num_bytes
    transport = exchange(comm, num_gathered, len(parameters))
    runs = [[seconds(work) for work in (sync, copy, transport)] for _ in range(rounds + 1)][1:]
    own = [statistics.median(run[work][clock] for run in runs) for clock in (0, 1) for work in (0, 1, 2)]
    walls, cpus = comm.all_reduce(torch.tensor(own, dtype=torch.float64), "mean").view(2, 3).tolist()
    strategy.serving.close()
    line = (
        f"{num_bytes / 1e6:7.1f} MB {dtype:8}: sync {1e3 * walls[0]:8.2f} ms ({1e3 * cpus[0]:.2f} of a core), memcpy "
        f"{1e3 * walls[1]:7.2f} ms ({1e3 * cpus[1]:.2f}), ratio {walls[0] / walls[1]:5.1f} ({cpus[0] / cpus[1]:.1f})"
    )
    if comm.world == 1:
        return line
    return f"{line}, transport {1e3 * cpus[2]:.2f} of a core, without it ({(cpus[0] - cpus[2]) / cpus[1]:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models",
        nargs="+",
        choices=list(SHAPES),
        default=["toy", "mid"],
        help="random models: toy has 0.8, mid 42 and large 133 million parameters (default: toy mid)",
    )
    parser.add_argument("--strategies", nargs="+", default=["single"], help="strategies (default: single)")
    parser.add_argument(
        "--dtypes",
        nargs="+",
        default=["float32"],
        choices=["float32", "bfloat16"],
        help="types of the weights (default: float32)",
    )
    parser.add_argument(
        "--rounds", type=int, default=7, help="turns of each side, of which the median counts (default: %(default)s)"
    )
    parser.add_argument("--share_weights", action="store_true", help="let the engine read the trainer's weights")
    parser.add_argument("--cpu_kernels", action="store_true", help="read weights with compiled kernels")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.strategies:
        for dtype in arguments.dtypes:
            flags = ["--strategy", name, "--canary_every", "0", "--dtype", dtype]
            flags += ["--native.share_weights", str(arguments.share_weights)]
            flags += ["--native.cpu_kernels", str(arguments.cpu_kernels)]
            strategy = create_strategy(parse_config(GRPOConfig, flags))
            strategy.setup_distributed(timedelta(seconds=300))
            for model in arguments.models:
                line = compare(strategy, model, dtype, arguments.rounds)
                if strategy.comm.is_main:
                    print(f"{name:9} x{strategy.comm.world}  {line}", flush=True)
    strategy.close()


if __name__ == "__main__":
    main()
