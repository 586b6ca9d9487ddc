"""Samples without a seed, as a loop of another trainer does; rank 0 writes what all ranks drew.

usage: unseeded_program.py OUTPUT.json STRATEGY FOLDER
"""

import json
import sys

from lightrl.config import GRPOConfig, parse_config
from lightrl.strategy import create_strategy
from lightrl.testing.tiny_training import fresh

PROMPTS = [[1, 2, 3], [1, 2, 3], [4, 5]]
PARAMS = {"max_tokens": 8, "temperature": 1.0, "ignore_eos": True}


def tokens(items):
    return [item.output_token_ids for item in items]


def gathered(strategy, own):
    mine = PROMPTS[: 2 if strategy.comm.world > 1 else 3] if strategy.comm.is_main else PROMPTS[2:]
    found = tokens(strategy.gather_and_generate(own, all_prompt_token_ids=mine, sleep_engine=False))
    return [item for part in strategy.comm.all_gather_object(found) for item in part]


def local(strategy):
    found = tokens(strategy.engine_generate_local(PARAMS, [PROMPTS[0], PROMPTS[0]]))
    return [item for part in strategy.comm.all_gather_object(found) for item in part]


def started(strategy_name):
    strategy = create_strategy(parse_config(GRPOConfig, ["--strategy", strategy_name, "--seed", "5"]))
    strategy.setup_distributed()
    policy, _ = fresh(strategy)
    strategy.setup_inference_engine(None, "native", actor=policy)
    return strategy, policy


if __name__ == "__main__":
    output, name, folder = sys.argv[1:]
    strategy, policy = started(name)
    report = {"gathered": [gathered(strategy, PARAMS) for _ in range(4)]}
    report["seeded"] = [gathered(strategy, {**PARAMS, "seed": 3}) for _ in range(2)]
    report["local"] = [local(strategy) for _ in range(4)]
    if strategy.comm.is_main:  # a rank may sample alone, for a look at what the model says
        strategy.engine_generate_local(PARAMS, [[1]])
    strategy.save_ckpt(policy, folder, max_mem=0)
    report["next"] = [gathered(strategy, PARAMS), local(strategy)]
    other, policy = started(name)
    report["again"] = [gathered(other, PARAMS)]
    other.load_ckpt(policy, folder)
    report["resumed"] = [gathered(other, PARAMS), local(other)]
    if strategy.comm.is_main:
        with open(output, "w") as file:
            json.dump(report, file)
    strategy.close()
