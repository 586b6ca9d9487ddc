"""Compares tiled log-probabilities and entropies, forward and backward, with the full log-softmax.

    python benchmarks/logprobs.py [--positions 2048 --hidden 256 --vocab 151936 --threads 2 --rounds 3]

Each measurement runs in its own process, so that peaks of memory do not mix; the two take turns. "extra peak" is how
much the process grew beyond its inputs, including the gradients of hidden states and weight.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from lightrl.models.logprobs import chosen_logprobs

WAYS = ("full", "tiles")


def full_log_softmax(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logprobs = torch.log_softmax((hidden @ weight.T).float(), dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], entropy


def forward_backward(way: str, hidden: Tensor, weight: Tensor, targets: Tensor, entropy_weight: float) -> None:
    function = full_log_softmax if way == "full" else chosen_logprobs
    logprobs, entropy = function(hidden, weight, targets)
    loss = -logprobs.mean()
    if entropy_weight:
        loss = loss - entropy_weight * entropy.mean()
    loss.backward()


def memory_mib(field: str) -> float:
    """Returns VmRSS (now) or VmHWM (peak) of this process."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split(f"{field}:")[1].split()[0]) / 1024


def measure_here(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    hidden = torch.randn(args.positions, args.hidden, dtype=dtype, requires_grad=True)
    weight = torch.randn(args.vocab, args.hidden, dtype=dtype).mul_(0.05).requires_grad_()
    targets = torch.randint(args.vocab, (args.positions,))
    small = weight.detach()[:64].clone().requires_grad_()
    forward_backward(args.way, hidden[:8].detach().requires_grad_(), small, targets[:8] % 64, args.entropy_weight)
    before, wall, cpu = memory_mib("VmRSS"), time.perf_counter(), time.process_time()
    forward_backward(args.way, hidden, weight, targets, args.entropy_weight)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(json.dumps({"seconds": wall, "cpu": cpu, "mib": memory_mib("VmHWM") - before}))


def measure_in_own_process(way: str) -> dict[str, float]:
    command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    result: dict[str, float] = json.loads(output)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=2048, help="scored positions (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=256, help="width of the hidden states (default: %(default)s)")
    parser.add_argument("--vocab", type=int, default=151_936, help="size of the vocabulary (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="type of hidden states and weight (default: %(default)s)")
    parser.add_argument(
        "--entropy-weight",
        type=float,
        default=0.0,
        help="weight of the entropy in the loss; with 0 it is computed without a gradient (default: %(default)s)",
    )
    parser.add_argument("--threads", type=int, default=2, help="threads of the process (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="turns of each side, of which the median counts (default: %(default)s)"
    )
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        measure_here(args)
        return
    results: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(args.rounds):
        for way in WAYS:
            results[way].append(measure_in_own_process(way))
    median = {
        way: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for way, runs in results.items()
    }
    print(f"{'way':8}{'seconds':>10}{'CPU s':>10}{'extra peak MiB':>16}{'time ratio':>12}{'memory ratio':>14}")
    for way, values in median.items():
        time_ratio = values["seconds"] / median["full"]["seconds"]
        memory_ratio = values["mib"] / median["full"]["mib"]
        print(
            f"{way:8}{values['seconds']:10.2f}{values['cpu']:10.2f}{values['mib']:16.0f}"
            f"{time_ratio:12.2f}{memory_ratio:14.3f}"
        )


if __name__ == "__main__":
    main()
