"""Trains the tiny model under one strategy in many splits of the same samples; rank 0 writes what came out.

usage: parity_program.py STRATEGY OUTPUT.json
"""

import json
import sys

import torch
from safetensors.torch import save_file
from tiny_training import STEPS, adamw, loss_fn, make_batch, num_tokens, samples, sgd, tiny_policy

from lightrl.config import GRPOConfig
from lightrl.strategy import create_strategy

# name: (optimizer, max_norm, samples per micro-batch, who gets the samples)
VARIANTS = {
    "all at once": (adamw, 1.0, 99, "dealt"),
    "micro-batches of 1": (adamw, 1.0, 1, "dealt"),
    "micro-batches of 4": (adamw, 1.0, 4, "dealt"),
    "a rank without samples": (adamw, 1.0, 2, "all on the last rank"),
    "sgd without clipping": (sgd, 0.0, 2, "dealt"),
}


def train(strategy, make_optimizer, max_norm, micro_size, spread):
    rank, world = strategy.comm.rank, strategy.comm.world
    # Rank 0's weights must win, whatever the others were built with; ranks above 1 build on the meta device.
    policy = strategy.prepare_model(tiny_policy(seed=rank, device="meta" if rank > 1 else "cpu"))
    optimizer = make_optimizer(policy.parameters())
    strategy.register(policy, optimizer)
    strategy.max_norm = max_norm
    losses, norms = [], []
    for step in range(STEPS):
        everything = samples(step)
        if spread == "dealt":
            mine = everything[rank::world]
        else:
            mine = everything if rank == world - 1 else []
        parts = [mine[i : i + micro_size] for i in range(0, len(mine), micro_size)] or [[]]
        result = strategy.train_batch([make_batch(part) for part in parts], loss_fn, num_tokens, model=policy)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    parameters = {name: tensor.clone() for name, tensor in strategy.full_parameters(policy)}
    return losses, norms, parameters


if __name__ == "__main__":
    name, output = sys.argv[1], sys.argv[2]
    options = {}
    for item in sys.argv[3:]:
        key, value = item.split("=")
        options[key] = {"True": True, "False": False}.get(value, int(value) if value.isdigit() else value)
    config = GRPOConfig(strategy=name)
    for key, value in options.items():
        setattr(config.fsdp, key, value) if hasattr(config.fsdp, key) else setattr(config, key, value)
    strategy = create_strategy(config)
    strategy.setup_distributed()
    torch.manual_seed(0)
    results = {}
    for variant, settings in VARIANTS.items():
        losses, norms, parameters = train(strategy, *settings)
        results[variant] = {"losses": losses, "norms": norms}
        if strategy.comm.is_main:
            save_file(parameters, f"{output}.{list(VARIANTS).index(variant)}.safetensors")
    if strategy.comm.is_main:
        with open(output, "w") as file:
            json.dump(results, file)
    strategy.close()
