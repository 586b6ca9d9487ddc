"""Compares shared prompts with whole sequences in CPU seconds of a rank, when ranks split the tokens (--sp_size).

    torchrun --nproc_per_node 2 benchmarks/shared_prompts_ranks.py [--model mid --prompts 64 256 512]

The options are those of shared_prompts.py. --image and --no-peak do not apply: prompts are text alone, and no memory is
measured. Runs forward and backward of the same pack in turn. A turn takes as long as its busiest rank, for which the
others wait; "idle" is how much less the others compute, on average, as a share of that time.
"""

from __future__ import annotations

import os
import statistics
from typing import Any

import torch
from decode import random_model
from shared_prompts import VOCABULARIES, WAYS, cpu_seconds, loss_of, make_pack, parse

from lightrl.config import GRPOConfig
from lightrl.models.policy import Policy
from lightrl.sharing.model import PromptSharing
from lightrl.strategy import create_strategy


def main() -> None:
    args = parse(__doc__ or "")
    torch.set_num_threads(args.threads)
    world = int(os.environ["WORLD_SIZE"])
    strategy = create_strategy(GRPOConfig(strategy="fsdp", sp_size=world))
    strategy.setup_distributed()
    policy: Any = Policy(random_model(args.model, vocab_size=VOCABULARIES[args.model]))
    policy = strategy.prepare_model(policy)
    PromptSharing(policy)
    policy.train()
    for prompt in args.prompts:
        packs = {way: make_pack(way, VOCABULARIES[args.model], prompt, args) for way in WAYS}
        turns: dict[str, list[list[float]]] = {way: [] for way in WAYS}
        for _ in range(args.rounds):
            for way in WAYS:
                spent = cpu_seconds(lambda pack=packs[way]: loss_of(policy, pack).backward())
                turns[way].append(strategy.comm.all_gather_object(spent))
        busiest = {way: statistics.median(max(ranks) for ranks in turns[way]) for way in WAYS}
        idle = {way: statistics.median(1 - statistics.mean(ranks) / max(ranks) for ranks in turns[way]) for way in WAYS}
        if strategy.comm.is_main:
            ratio = busiest["whole"] / busiest["shared"]
            print(
                f"{prompt:6d}  {busiest['whole']:8.2f} -> {busiest['shared']:7.2f} = {ratio:5.2f}x   idle "
                f"{idle['whole']:.0%} -> {idle['shared']:.0%}",
                flush=True,
            )
    strategy.close()


if __name__ == "__main__":
    main()
