"""Compares groups of responses whose prompt is computed once (--share_prompts) with the same pack computed whole.

    python benchmarks/shared_prompts.py [--model mid --prompts 64 256 512 --response 64 --group 8 --groups 1]

Forward and backward of the same packs, in turns; CPU seconds of the process, since wall time suffers from what else
runs. "saved" is what a forward keeps for the backward, every storage once and without the weights; "peak" is how much a
process of its own grew over a forward and backward. The largest differences of loss and gradients are printed too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from decode import random_model
from torch import Tensor

from lightrl.models.policy import Policy, response_batch
from lightrl.records import PackedBatch
from lightrl.sharing.model import PromptSharing
from lightrl.sharing.tree import share

WAYS = ("whole", "shared")
VOCABULARIES = {"toy": 98, "mid": 8192}


def make_policy(name: str) -> Policy:
    policy = Policy(random_model(name, vocab_size=VOCABULARIES[name]))
    PromptSharing(policy)
    return policy.train()


def make_pack(way: str, vocabulary: int, prompt: int, args: argparse.Namespace) -> PackedBatch:
    draw = torch.Generator().manual_seed(1)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(vocabulary, (count,), generator=draw).tolist())

    pairs = []
    for _ in range(args.groups):
        question = tokens(prompt)
        lengths = torch.linspace(1 - args.spread, 1 + args.spread, args.group) * args.response
        pairs += [(question, tokens(max(1, int(length)))) for length in lengths]
    pairs.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
    batch = response_batch(pairs)
    return share(batch) if way == "shared" else batch


def loss_of(policy: Policy, batch: PackedBatch) -> Tensor:
    scores = policy(batch)
    weights = torch.randn(len(batch.targets), generator=torch.Generator().manual_seed(2))
    return -((scores.logprobs + 0.01 * scores.entropy) * weights).sum()


def saved_mib(policy: Policy, batch: PackedBatch) -> float:
    """Returns the size of what a forward keeps for its backward, without the weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of(policy, batch)
    del loss
    return sum(storages.values()) / 2**20


def cpu_seconds(run: Callable[[], Any]) -> float:
    begin = time.process_time()
    run()
    return time.process_time() - begin


def memory_mib(field: str) -> float:
    """Returns VmRSS (now) or VmHWM (peak) of this process."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split(f"{field}:")[1].split()[0]) / 1024


def measure_peak_here(args: argparse.Namespace) -> None:
    policy, vocabulary = make_policy(args.model), VOCABULARIES[args.model]
    pack = make_pack(args.peak, vocabulary, args.prompts[0], args)
    loss_of(policy, response_batch([((1, 2), (3, 4))])).backward()  # the gradients are there before
    before = memory_mib("VmRSS")
    loss_of(policy, pack).backward()
    print(json.dumps(memory_mib("VmHWM") - before))


def peak_mib(way: str, prompt: int) -> float:
    command = [sys.executable, __file__, *sys.argv[1:], "--prompts", str(prompt), "--peak", way]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    result: float = json.loads(output)
    return result


def compare(policy: Policy, prompt: int, args: argparse.Namespace) -> str:
    """Returns a line of the table."""
    packs = {way: make_pack(way, VOCABULARIES[args.model], prompt, args) for way in WAYS}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    losses, gradients = {}, {}

    def learn(way: str) -> None:
        policy.zero_grad()
        loss = loss_of(policy, packs[way])
        loss.backward()
        losses[way] = loss.item()

    for _ in range(args.rounds):
        for way in WAYS:
            seconds[way].append(cpu_seconds(lambda way=way: learn(way)))
            gradients[way] = {name: parameter.grad.clone() for name, parameter in policy.named_parameters()}
    saved = {way: saved_mib(policy, packs[way]) for way in WAYS}
    peak = {way: peak_mib(way, prompt) for way in WAYS} if not args.no_peak else dict.fromkeys(WAYS, float("nan"))
    whole, shared = (gradients[way] for way in WAYS)
    worst = max(((whole[name] - shared[name]).abs().max() / whole[name].abs().max()).item() for name in whole)
    medians = {way: statistics.median(seconds[way]) for way in WAYS}
    tokens = {"whole": packs["whole"].cu_seqlens[-1], "shared": len(packs["shared"].tree.kept)}  # type: ignore[attr-defined]
    columns = [
        "{whole:7d} -> {shared:5d}".format_map(tokens),
        *(
            "{whole:8.2f} -> {shared:7.2f} = {ratio:5.2f}x".format(**part, ratio=part["whole"] / part["shared"])
            for part in (medians, saved, peak)
        ),
        f"{abs(losses['whole'] - losses['shared']):.1e}",
        f"{worst:.1e}",
    ]
    return f"{prompt:6d}  " + "   ".join(columns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(VOCABULARIES), default="mid")
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 256, 512], help="tokens of a prompt")
    parser.add_argument("--response", type=int, default=64, help="tokens of a response, on average")
    parser.add_argument("--spread", type=float, default=0.0, help="how far the lengths lie around it, as a share")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-peak", action="store_true", help="start no processes for the peaks of memory")
    parser.add_argument("--peak", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.peak:
        measure_peak_here(args)
        return
    policy = make_policy(args.model)
    shape = f"{args.groups} prompt(s) x {args.group} responses of {args.response} tokens"
    print(f"{args.model}: {shape}, {args.threads} thread(s)")
    print(
        "prompt  tokens             CPU seconds                     saved MiB                       peak MiB         "
        "               loss      gradients (relative)"
    )
    for prompt in args.prompts:
        print(compare(policy, prompt, args), flush=True)


if __name__ == "__main__":
    main()
