"""Checks that ranks which split the kept tokens of a tree (--sp_size) give the results of whole sequences in a process.

It runs on several ranks and takes the flags of train_grpo.py.
"""

import sys
from types import SimpleNamespace

import torch
from split_program import MODELS, ONLY_TOKENS, SIZES, compare, seeded
from transformers import AutoModelForCausalLM, Gemma2Config

from lightrl.config import GRPOConfig, parse_config
from lightrl.metrics import Statistics
from lightrl.models.policy import Policy, response_batch
from lightrl.sharing.model import attach_sharing, share_by_itself
from lightrl.sharing.tree import SharedBatch, share
from lightrl.strategy import create_strategy


def gemma2():
    """Its windows and soft caps have no kernel for trees, so that keys are copied."""
    return Gemma2Config(
        **SIZES, num_key_value_heads=2, sliding_window=6, attn_logit_softcapping=2.0, query_pre_attn_scalar=8
    )


COPYING = {"windows": lambda: Policy(AutoModelForCausalLM.from_config(gemma2(), dtype=torch.float32))}
SCORERS = {name: build for name, build in MODELS.items() if name != "reward model"}


def batches():
    """Micro-batches with trees of an odd and of an even number of tokens, and one without."""
    draw = torch.Generator().manual_seed(3)

    def tokens(count):
        return tuple(torch.randint(2, 98, (count,), generator=draw).tolist())

    def group(prompt, *responses):
        return [(prompt, tokens(count)) for count in responses]

    odd = [*group(tokens(20), 4, 1, 7), (tokens(3), tokens(6))]  # 20 + 12 + 9
    even = [*group(tokens(11), 4, 4, 4, 4), *group(tokens(21), 2, 9)]  # 11 + 16 + 21 + 11, less 1
    even[-1] = (even[-1][0], even[-1][1][:-1])
    alone = [(tokens(5), tokens(4)), (tokens(5), tokens(2))]
    return [response_batch(sorted(pairs, key=lambda pair: len(pair[0]) + len(pair[1]))) for pairs in (odd, even, alone)]


def num_kept(batch):
    shared = share(batch)
    return len(shared.tree.kept) if isinstance(shared, SharedBatch) else len(batch.input_ids)


def halves(counts, size):
    return [-(-count // size) for count in counts]


def check_model(strategy, build, by_itself) -> None:
    """Outputs and gradients of all ranks' micro-batches, and how many tokens each rank computes."""
    alone, model = seeded(build), strategy.prepare_model(seeded(build))
    if by_itself:
        share_by_itself(SimpleNamespace(policy=model, strategy=strategy, statistics=Statistics(), batches=""))
    else:
        attach_sharing(model, strategy)
    odd, even, single = batches()
    # Each rank has a micro-batch without a tree, and they do not come in the same order.
    everyones = [([odd, single], [single, even])[rank % 2] for rank in range(strategy.comm.world)]
    mine = everyones[strategy.comm.rank]
    given = mine if by_itself else [share(batch) for batch in mine]
    sizes = []
    decoder = (model.hf if isinstance(model, Policy) else model.body).get_decoder()
    hook = decoder.layers[0].mlp.register_forward_pre_hook(lambda _, args: sizes.append(args[0].shape[1]))
    strategy.forward(given, model=model)
    hook.remove()
    assert sizes == halves([num_kept(batch) for part in everyones for batch in part], strategy.options.sp_size), sizes
    compare(strategy, alone, model, everyones=everyones, given=given)


def main() -> None:
    counts = [num_kept(batch) for batch in batches()]
    assert [count % 2 for count in counts[:2]] == [1, 0], counts
    assert all(count < len(batch.input_ids) for count, batch in zip(counts[:2], batches(), strict=False))
    strategy = create_strategy(parse_config(GRPOConfig, sys.argv[1:]))
    strategy.setup_distributed()
    is_cut = strategy.options.tp_size > 1
    for name, build in (SCORERS if is_cut else SCORERS | ONLY_TOKENS | COPYING).items():
        print(name, flush=True)
        check_model(strategy, build, by_itself=False)
    for name, build in ({} if is_cut else SCORERS | ONLY_TOKENS).items():
        print(name, "by itself", flush=True)
        check_model(strategy, build, by_itself=True)
    strategy.close()


if __name__ == "__main__":
    main()
