"""Compares packs whose prompts are computed once (--share_prompts) with the same packs computed whole.

    python benchmarks/shared_prompts.py [--model mid --prompts 64 256 512 --response 64 --group 8 --groups 1]
    python benchmarks/shared_prompts.py --image 192    # and an image of as many tokens in the middle of each prompt

Runs forward and backward of the same packs in turn, in CPU seconds of the process, since wall time depends on other
work. "saved" is what a forward keeps for the backward, each storage counted once, without weights. "peak" is how much a
separate process grew during forward and backward. The largest differences of loss and gradients are printed too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from decode import SHAPES, random_model
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from lightrl.models.policy import Policy, response_batch
from lightrl.models.score_check import random_image_in
from lightrl.records import PackedBatch
from lightrl.sharing.model import PromptSharing
from lightrl.sharing.tree import share

WAYS = ("whole", "shared")
VOCABULARIES = {"toy": 98, "mid": 8192}


def vision_config(name: str) -> Any:
    """Returns the config of a model with the text shape of that name and a small vision tower."""
    text: dict[str, Any] = {key: value for key, value in SHAPES[name].items() if key != "head_dim"}
    text |= {"bos_token_id": None, "eos_token_id": None}
    text["vocab_size"] = VOCABULARIES[name] + 4  # the last four are the placeholders and their markers
    section = mrope_section(text["hidden_size"] // text["num_attention_heads"])
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": section, "rope_theta": 1e4}
    size = text["hidden_size"] // 2
    tower = {"depth": 4, "hidden_size": size, "intermediate_size": 3 * size, "num_heads": 4}
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config={**tower, "out_hidden_size": text["hidden_size"], "fullatt_block_indexes": [3]},
        **{key: VOCABULARIES[name] + index for index, key in enumerate(names)},
    )


def mrope_section(head_dim: int) -> list[int]:
    """Returns how many of the pairs of a head turn by the frame, the row and the column."""
    quarter = head_dim // 8
    return [quarter, (head_dim // 2 - quarter) // 2, (head_dim // 2 - quarter) // 2]


def make_policy(name: str, image: int) -> Policy:
    if image:
        torch.manual_seed(0)
        policy = Policy(Qwen2_5_VLForConditionalGeneration(vision_config(name)))
    else:
        policy = Policy(random_model(name, vocab_size=VOCABULARIES[name]))
    PromptSharing(policy)
    return policy.train()


def make_pack(way: str, vocabulary: int, prompt: int, args: argparse.Namespace) -> PackedBatch:
    draw = torch.Generator().manual_seed(1)
    config = vision_config(args.model) if args.image else None
    patches = (1, 8, args.image // 2)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(vocabulary, (count,), generator=draw).tolist())

    samples = []
    for index in range(args.groups):
        question = tokens(prompt)
        encoded = None if config is None else random_image_in(config, question, index, patches)
        ids = question if encoded is None else encoded.token_ids
        lengths = torch.linspace(1 - args.spread, 1 + args.spread, args.group) * args.response
        samples += [((ids, tokens(max(1, int(length)))), encoded) for length in lengths]
    samples.sort(key=lambda sample: sum(map(len, sample[0])))
    pairs, prompts = zip(*samples, strict=True)
    batch = response_batch(pairs, encoded=None if config is None else prompts)
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
    policy, vocabulary = make_policy(args.model, args.image), VOCABULARIES[args.model]
    pack = make_pack(args.peak, vocabulary, args.prompts[0], args)
    warm_up = response_batch([((1, 2), (3, 4))])
    if args.image:
        warm_up = replace(warm_up, position_ids=warm_up.position_ids.expand(3, -1))
    loss_of(policy, warm_up).backward()  # the gradients are there before
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


def parse(description: str) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model",
        choices=sorted(VOCABULARIES),
        default="mid",
        help="random model: toy has 0.8 and mid 29 million parameters (default: %(default)s)",
    )
    parser.add_argument(
        "--prompts", type=int, nargs="+", default=[64, 256, 512], help="tokens of a prompt (default: 64 256 512)"
    )
    parser.add_argument(
        "--image", type=int, default=0, help="tokens of an image, a multiple of 8; 0: text alone (default: %(default)s)"
    )
    parser.add_argument("--response", type=int, default=64, help="mean tokens of a response (default: %(default)s)")
    parser.add_argument(
        "--spread",
        type=float,
        default=0.0,
        help="largest deviation of a response from that mean, as a share of it (default: %(default)s)",
    )
    parser.add_argument("--group", type=int, default=8, help="responses of a prompt (default: %(default)s)")
    parser.add_argument("--groups", type=int, default=1, help="prompts of a pack (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads of the process (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=5, help="turns of each side, of which the median counts (default: %(default)s)"
    )
    parser.add_argument("--no-peak", action="store_true", help="start no processes for the peaks of memory")
    parser.add_argument("--peak", choices=WAYS, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse(__doc__ or "")
    torch.set_num_threads(args.threads)
    if args.peak:
        measure_peak_here(args)
        return
    policy = make_policy(args.model, args.image)
    image = f" with an image of {args.image} tokens" if args.image else ""
    shape = f"{args.groups} prompt(s){image} x {args.group} responses of {args.response} tokens"
    print(f"{args.model}: {shape}, {args.threads} thread(s)")
    print(
        "prompt  tokens             CPU seconds                     saved MiB                       peak MiB         "
        "               loss      gradients (relative)"
    )
    for prompt in args.prompts:
        print(compare(policy, prompt, args), flush=True)


if __name__ == "__main__":
    main()
