"""Samples episodes of three turns on any number of ranks; rank 0 writes them, by their names.

usage: episode_program.py OUTPUT.json ENGINE_GROUP_SIZE MAX_WAIT_S
"""

import json
import sys

from episodes import Echo  # noqa: F401  (the program's folder is on the path, so that the workflow finds it)

from lightrl.builtin.model import tiny_model
from lightrl.comm import RankError
from lightrl.config import GRPOConfig, WorkflowConfig
from lightrl.data.sampler import shard
from lightrl.metrics import Statistics
from lightrl.models.policy import Policy
from lightrl.records import Prompt
from lightrl.rewards.episode_reward import episode_reward
from lightrl.rewards.reward_set import RewardSet
from lightrl.rollout.client import EpisodeLimits
from lightrl.rollout.episode_collector import EpisodeCollector
from lightrl.rollout.workflow import load_workflow
from lightrl.strategy import create_strategy

LIMITS = EpisodeLimits(max_new_tokens=4, max_turns=3, max_tokens=64)


def prompts_of(tokenizer):
    texts = ["1+2=", "33+44=", "5+5=", "9+9=", "10+1="]
    return [
        (position, Prompt(index=position, text=text, token_ids=tuple(tokenizer(text)["input_ids"])))
        for position, text in enumerate(texts)
    ]


def collector_of(strategy, **changes):
    settings = {"workflow": "environment", "workflow_args": ("environment=episodes:Echo",), **changes}
    workflow = load_workflow(WorkflowConfig(**settings))
    return EpisodeCollector(strategy, RewardSet.of(episode_reward), workflow, seed=3, limits=LIMITS)


def row(sample):
    return [*sample.key, sample.response_ids, sample.own, sample.turns, sample.finish_reason, sample.reward]


def start(group_size=1, strategy_name="auto"):
    strategy = create_strategy(GRPOConfig(strategy=strategy_name, engine_tp_size=group_size))
    strategy.setup_distributed()
    model, tokenizer = tiny_model()
    policy = strategy.prepare(Policy(model))
    strategy.tokenizer = tokenizer
    strategy.setup_inference_engine(strategy.options, "native", actor=policy)
    return strategy


def main(output, group_size, max_wait_s):
    strategy = start(int(group_size), "ddp")
    comm = strategy.comm
    mine = shard(prompts_of(strategy.tokenizer), comm.rank, comm.world)
    arguments = ("environment=episodes:Echo", f"max_wait_s={max_wait_s}")
    collector = collector_of(strategy, workflow_args=arguments)
    samples = collector.sample(mine, step=2, group_size=3, temperature=1.0)
    statistics = Statistics()
    collector.score(samples, statistics)
    everything = comm.all_gather_object([row(sample) for sample in samples])
    metrics = statistics.reduce(comm)
    try:
        collector_of(strategy, workflow="episodes:Broken", workflow_args=()).sample(
            mine, step=2, group_size=1, temperature=1.0
        )
    except (RuntimeError, RankError) as error:
        assert "the tool is on fire" in str(error), error
    else:
        raise AssertionError("a workflow that always fails went through")
    troubled = collector_of(strategy, workflow="episodes:Troubled", workflow_args=())
    numbers = Statistics()
    troubled.score(troubled.sample(mine, step=2, group_size=3, temperature=1.0), numbers)
    metrics["tool_errors"] = numbers.reduce(comm)["episode/tool_errors"]
    if comm.is_main:
        found = {"samples": sorted(item for part in everything for item in part), "metrics": metrics}
        with open(output, "w") as file:
            json.dump(found, file)
    strategy.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
