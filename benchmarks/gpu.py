"""Measures training, decoding and sleep of random Qwen3-shaped models in bfloat16 on one GPU.

    python benchmarks/gpu.py [--models 0.6b 4b --lengths 16384 65536 --peak_tflops 989 --bandwidth_tb 3.35]

Training means forward and backward of one packed sequence with gradient checkpointing, without an optimizer. MFU counts
6 operations per parameter and token, plus those of causal attention. Decoding is compared with reading the weights once
for each token of all rows; the second of two runs counts, which replays the CUDA graphs that the first captured. Peak
and bandwidth default to those of an H100. Without a GPU, it runs on the CPU, where only `--models tiny` makes sense.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from lightrl.engines.base import SamplingParams
from lightrl.engines.native.eager import EagerEngine
from lightrl.engines.native.engine import NativeEngine
from lightrl.models.policy import Policy, response_batch

# Hidden size, layers, intermediate size, heads, heads of keys, vocabulary.
SHAPES = {
    "tiny": (64, 2, 128, 2, 1, 500),
    "0.6b": (1024, 28, 3072, 16, 8, 151_936),
    "4b": (2560, 36, 9728, 32, 8, 151_936),
}
NUM_ROWS, NUM_TOKENS = 64, 128  # of decoding


def random_model(name: str, device: torch.device) -> Any:
    hidden, layers, intermediate, heads, kv_heads, vocabulary = SHAPES[name]
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        max_position_embeddings=1 << 17,
        tie_word_embeddings=True,
    )
    with device:  # drawing 4 billion numbers takes a CPU minutes
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of the second of two calls."""
    for _ in range(2):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
    return time.perf_counter() - started


def train(name: str, length: int, device: torch.device, peak_tflops: float) -> str:
    model = random_model(name, device)
    model.gradient_checkpointing_enable()
    policy = Policy(model, entropy=False).train()
    batch = response_batch([((1, 2), tuple(index % 400 for index in range(length - 2)))]).to(device)

    def learn() -> None:
        policy.zero_grad()
        (-policy(batch).logprobs.mean()).backward()

    taken = seconds(learn, device)
    _, layers, _, heads, *_ = SHAPES[name]
    numel = sum(parameter.numel() for parameter in model.parameters())
    flops = 6 * numel * length + 6 * layers * heads * 128 * length**2  # half of the 12 for whole attention
    peak = f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if device.type == "cuda" else ""
    return f"train {length} tokens: {length / taken:.0f} tokens/s, MFU {flops / taken / peak_tflops / 1e12:.1%}{peak}"


def decode(name: str, device: torch.device, bandwidth_tb: float, kind: type[NativeEngine] = NativeEngine) -> str:
    model = random_model(name, device)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    engine = kind(model, eos_token_ids=(), device=device, max_model_len=1024)

    def generate() -> None:
        for row in range(NUM_ROWS):
            engine.submit([1 + row, 2, 3], SamplingParams(max_new_tokens=NUM_TOKENS, seed=row))
        while engine.has_unfinished():
            engine.step()

    taken = seconds(generate, device)
    floor = NUM_TOKENS * num_bytes / bandwidth_tb / 1e12
    freed = engine.sleep(2)
    how = " without graphs" if kind is EagerEngine else ""
    return (
        f"decode {NUM_ROWS} rows{how}: {NUM_ROWS * NUM_TOKENS / taken:.0f} tokens/s, "
        f"{floor / taken:.1%} of the bandwidth; "
        f"sleep frees {freed / 2**30:.2f} GiB, of which {num_bytes / 2**30:.2f} are weights"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models",
        nargs="+",
        choices=list(SHAPES),
        default=["0.6b", "4b"],
        help="shapes, named by their size (default: 0.6b 4b)",
    )
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="*",
        default=[16_384, 65_536],
        help="tokens of the trained sequences (default: 16384 65536)",
    )
    parser.add_argument(
        "--peak_tflops",
        type=float,
        default=989.0,
        help="peak of the device in bfloat16, for MFU (default: %(default)s)",
    )
    parser.add_argument(
        "--bandwidth_tb", type=float, default=3.35, help="TB/s of the device's memory (default: %(default)s)"
    )
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    failed = 0
    for name in args.models:
        works = [partial(train, name, length, device, args.peak_tflops) for length in args.lengths]
        works += [partial(decode, name, device, args.bandwidth_tb, kind) for kind in (NativeEngine, EagerEngine)]
        for work in works:
            try:
                line = work()
            except torch.OutOfMemoryError as error:
                line, failed = f"out of memory: {str(error).splitlines()[0]}", 1
            print(f"{name:6}{line}", flush=True)
            gc.collect()  # a model in a cycle would leave no room for the next one
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
