"""Generates in bfloat16 with mixtures of experts whose router biases are large and nearly equal.

usage: router_bias_program.py FOLDER [options of a strategy]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tiny_moe import BIASED, tiny_moe

from lightrl.config import GRPOConfig, parse_config
from lightrl.engines.base import EnginePrompt, SamplingParams
from lightrl.models.policy import Policy, response_batch
from lightrl.models.router_biases import is_router_bias
from lightrl.strategy import StrategyBase, create_strategy

PROMPTS = [EnginePrompt(token_ids=(5 + number, 6, 7)) for number in range(16)]


def policy_of(family: str) -> Policy:
    """Returns a policy whose biases alone choose the experts, the last ones; rounded, all biases are 10."""
    model = tiny_moe(family)
    for name, parameter in model.named_parameters():
        if is_router_bias(name):
            parameter.data = 10 + 0.004 * torch.arange(parameter.numel()).view(parameter.shape)
        elif name.endswith(("gate.weight", "router.weight")):
            parameter.data *= 1e-4
    return Policy(model)


def run(strategy: StrategyBase, family: str, folder: Path) -> dict[str, float]:
    """Returns how far the logprobs of the trainer and of the engine are from those in float32, on average."""
    policy = strategy.prepare_trained(policy_of(family), schedule_length=4).model
    strategy.setup_inference_engine(strategy.options, "native", actor=policy)
    strategy.save_pretrained(policy, folder / family)
    strategy.save_ckpt(policy, str(folder / f"{family}-checkpoint"))
    found = strategy.generate(PROMPTS, [SamplingParams(max_new_tokens=12, ignore_eos=True)] * len(PROMPTS))
    batch = response_batch([(item.prompt_token_ids, item.output_token_ids) for item in found])
    (scores,) = strategy.forward([batch], model=policy)
    with torch.no_grad():
        exact = policy_of(family)(batch).logprobs
    engine = torch.tensor([value for item in found for value in item.logprobs])
    return {
        "trainer": float((scores.logprobs - exact).abs().mean()),
        "engine": float((engine - exact).abs().mean()),
    }


def main(folder: Path, *options: str) -> dict[str, dict[str, float]]:
    fixed = ["--dtype", "bfloat16", "--distributed.device", "cpu", "--canary_every", "0"]
    strategy = create_strategy(parse_config(GRPOConfig, [*options, *fixed]))
    strategy.setup_distributed()
    found = {family: run(strategy, family, folder) for family in BIASED}
    if strategy.comm.is_main:
        torch.save(found, folder / "found.pt")
    strategy.close()
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
