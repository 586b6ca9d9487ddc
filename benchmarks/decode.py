"""Compares the native engine's tokens per second with transformers' own `generate`, interleaved in one process.

python benchmarks/decode.py --threads 1 --rounds 3 --models toy mid
python benchmarks/decode.py --dtype bfloat16
python benchmarks/decode.py --kernels          # with --native.cpu_kernels
python benchmarks/decode.py --exact            # the engine of --exact in place of `generate`: the ratio is its cost

After the rows of equal lengths comes the floor for both sides: only the matrix products of all tokens, 64 rows each, by
the fastest of the engine's ways. No engine can be faster than "HF ms" divided by it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from lightrl.engines.base import SamplingParams
from lightrl.engines.native.amx import make_tiles
from lightrl.engines.native.engine import NativeEngine
from lightrl.engines.native.kernels import engine_with_kernels
from lightrl.engines.native.products import PackedWeight
from lightrl.exact.engine import ExactEngine
from lightrl.exact.environment import fix_arithmetic

NUM_REQUESTS = 64
PROMPT_LENGTH = 8  # short: this times decoding, and a prompt costs both sides the same
EQUAL_LENGTH = 64
LONGEST = 256

SHAPES: dict[str, dict[str, Any]] = {
    "toy": {
        "vocab_size": 98,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "mid": {
        "vocab_size": 32_000,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
}


def random_model(name: str, **changes: int) -> Any:
    """Returns a model of a shape with random weights, the same at each call; changes: such as another vocab_size."""
    torch.manual_seed(0)
    config = Qwen3Config(**{**SHAPES[name], **changes}, tie_word_embeddings=True, max_position_embeddings=1024)
    return Qwen3ForCausalLM(config).eval()


def random_prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    drawn: list[list[int]] = torch.randint(3, vocab_size, (count, length), generator=generator).tolist()
    return drawn


def long_tailed_lengths() -> list[int]:
    """Draws log-normal lengths with median 40, at most LONGEST: the longest is several times the mean."""
    drawn = np.random.default_rng(0).lognormal(mean=np.log(40), sigma=1.0, size=NUM_REQUESTS)
    return [int(length) for length in np.clip(drawn, 1, LONGEST)]


def native_round(engine: NativeEngine, prompts: list[list[int]], lengths: list[int], n: int = 1) -> Callable[[], None]:
    params = [SamplingParams(max_new_tokens=length, seed=i, ignore_eos=True, n=n) for i, length in enumerate(lengths)]

    def run() -> None:
        done = engine.generate(prompts, params)
        assert sum(len(item.output_token_ids) for item in done) == n * sum(lengths)

    return run


def generate_round(model: Any, prompts: list[list[int]], longest: int, n: int = 1) -> Callable[[], None]:
    """Generates one static batch, which runs until its longest answer ends."""
    ids = torch.tensor(prompts).repeat_interleave(n, dim=0)
    mask = torch.ones_like(ids)

    @torch.no_grad()
    def run() -> None:
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            min_new_tokens=longest,
            max_new_tokens=longest,
            pad_token_id=0,
        )
        assert out.shape[1] == ids.shape[1] + longest

    return run


def interleave(rounds: int, *runs: Callable[[], None]) -> list[list[tuple[float, float]]]:
    """Returns the (wall, processor) seconds of each run in each round, after one round to warm up."""
    seconds: list[list[tuple[float, float]]] = [[] for _ in runs]
    for turn in range(rounds + 1):
        for place, run in enumerate(runs):
            wall, processor = time.perf_counter(), time.process_time()
            run()
            if turn:
                seconds[place].append((time.perf_counter() - wall, time.process_time() - processor))
    return seconds


def report(label: str, num_tokens: int, native: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> None:
    """Prints both ratios; on a busy machine read the one of processor time."""
    native_s, theirs_s = (statistics.median(wall for wall, _ in rounds) for rounds in (native, theirs))
    pairs = list(zip(native, theirs, strict=True))
    wall_ratio = statistics.median(b[0] / a[0] for a, b in pairs)
    processor_ratio = statistics.median(b[1] / a[1] for a, b in pairs)
    print(
        f"{label:34s} {num_tokens:7d} {native_s * 1e3:10.1f} {theirs_s * 1e3:10.1f}"
        f" {num_tokens / native_s:10.0f} {num_tokens / theirs_s:10.0f} {wall_ratio:7.2f}x {processor_ratio:7.2f}x",
        flush=True,
    )


@torch.inference_mode()
def seconds_of_products(name: str, dtype: torch.dtype, kernels: bool) -> float:
    """Returns the CPU seconds of the products alone of EQUAL_LENGTH tokens in each of NUM_REQUESTS rows."""
    shape = SHAPES[name]
    hidden, inner, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    of_a_layer = [(hidden, (heads + 2 * kv_heads) * dim), (heads * dim, hidden), (hidden, 2 * inner), (inner, hidden)]
    layers = shape["num_hidden_layers"] * sum(_seconds_of_product(*sizes, dtype, kernels) for sizes in of_a_layer)
    return EQUAL_LENGTH * (layers + _seconds_of_product(hidden, shape["vocab_size"], dtype, kernels))


def _seconds_of_product(num_inputs: int, num_outputs: int, dtype: torch.dtype, kernels: bool) -> float:
    rows = torch.randn(NUM_REQUESTS, num_inputs, dtype=dtype)
    weight = torch.randn(num_outputs, num_inputs, dtype=dtype)
    turned = weight.t().contiguous()
    ways: list[Callable[[], object]] = [lambda: rows.mm(turned)]
    for packed in (PackedWeight(), *_tiles(weight, kernels)):
        if packed.product(rows, weight) is not None:
            ways.append(partial(packed.product, rows, weight))
    return min(_seconds_of_call(way) for way in ways)


def _tiles(weight: torch.Tensor, kernels: bool) -> list[PackedWeight]:
    make = make_tiles(weight) if kernels else None
    return [] if make is None else [make()]


def _seconds_of_call(call: Callable[[], object], count: int = 20) -> float:
    """Returns the least of the mean CPU seconds of some calls, over several turns."""
    means = []
    for _ in range(5):
        start = time.process_time()
        for _ in range(count):
            call()
        means.append((time.process_time() - start) / count)
    return min(means)


def compare(name: str, rounds: int, dtype: torch.dtype, kernels: bool) -> None:
    make = partial(engine_with_kernels, NativeEngine) if kernels else NativeEngine
    model, vocab_size = random_model(name).to(dtype), int(SHAPES[name]["vocab_size"])
    engine = make(random_model(name).to(dtype), eos_token_ids=(), device=torch.device("cpu"))
    prompts = random_prompts(NUM_REQUESTS, PROMPT_LENGTH, vocab_size)
    for label, lengths in (("equal lengths", [EQUAL_LENGTH] * NUM_REQUESTS), ("long tail", long_tailed_lengths())):
        times = interleave(rounds, native_round(engine, prompts, lengths), generate_round(model, prompts, max(lengths)))
        report(f"{name}: {label}, 64 requests", sum(lengths), *times)
        if label == "equal lengths":
            floor = seconds_of_products(name, dtype, kernels)
            native, theirs = (statistics.median(processor for _, processor in side) for side in times)
            print(
                f"    products alone {floor * 1e3:.1f} ms: {floor / native:.0%} of native, {floor / theirs:.0%} of HF"
            )
    if name == "toy":
        few, short = random_prompts(16, 10, vocab_size), [8] * 16
        times = interleave(3 * rounds, native_round(engine, few, short, n=16), generate_round(model, few, 8, n=16))
        report("toy: 16 prompts x 16 samples x 8", 16 * 16 * 8, *times)


def compare_exact(name: str, rounds: int) -> None:
    """Runs both engines in turn in one process, with the setting of MKL that --exact needs."""
    engines = [
        kind(random_model(name), eos_token_ids=(), device=torch.device("cpu")) for kind in (NativeEngine, ExactEngine)
    ]
    prompts = random_prompts(NUM_REQUESTS, PROMPT_LENGTH, int(SHAPES[name]["vocab_size"]))
    times = interleave(rounds, *(native_round(engine, prompts, [EQUAL_LENGTH] * NUM_REQUESTS) for engine in engines))
    report(f"{name}: equal lengths, 64 requests", EQUAL_LENGTH * NUM_REQUESTS, *times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="threads of the process (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="turns of each side, of which the median counts (default: %(default)s)"
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=sorted(SHAPES),
        default=["toy", "mid"],
        help="random models: toy has 0.8 and mid 42 million parameters (default: both)",
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="float32",
        help="type of the weights; without --exact only (default: %(default)s)",
    )
    parser.add_argument("--kernels", action="store_true", help="compiled kernels; without --exact only")
    parser.add_argument("--exact", action="store_true", help="compare with the engine of --exact instead")
    args = parser.parse_args()
    if args.exact:
        fix_arithmetic()
    torch.set_num_threads(args.threads)
    kernels = ", compiled kernels" if args.kernels else ""
    print(f"{args.dtype}{kernels}, {args.threads} thread(s), median of {args.rounds} rounds")
    columns = (
        ("tokens", 7),
        ("native ms", 10),
        ("exact ms" if args.exact else "HF ms", 10),
        ("native t/s", 10),
        ("exact t/s" if args.exact else "HF t/s", 10),
        ("ratio", 8),
        ("by CPU", 8),
    )
    print(f"{'workload':34s} " + " ".join(f"{title:>{width}s}" for title, width in columns))
    for name in args.models:
        if args.exact:
            compare_exact(name, args.rounds)
        else:
            compare(name, args.rounds, getattr(torch, args.dtype), args.kernels)


if __name__ == "__main__":
    main()
