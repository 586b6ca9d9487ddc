"""Compares plain sampling with the same single turn as a workflow, whose episodes run in an asyncio loop.

python benchmarks/pump.py --models toy mid --repeats 5

Both sample the same tokens. Seconds are CPU seconds on one thread; the two take turns, and the median counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from decode import SHAPES, random_model

from lightrl.builtin.model import tiny_model
from lightrl.config import GRPOConfig
from lightrl.models.policy import Policy
from lightrl.records import Prompt, Sample
from lightrl.rewards.episode_reward import episode_reward
from lightrl.rewards.reward_set import RewardSet
from lightrl.rollout.client import EpisodeLimits
from lightrl.rollout.collector import Collector
from lightrl.rollout.episode_collector import EpisodeCollector
from lightrl.rollout.scheduled_collector import SingleTurn
from lightrl.strategy import create_strategy


def collectors(name: str, length: int) -> tuple[Collector, Collector]:
    strategy = create_strategy(GRPOConfig(strategy="single"))
    strategy.setup_distributed()
    strategy.tokenizer = tiny_model()[1]
    policy = strategy.prepare(Policy(random_model(name)))
    strategy.setup_inference_engine(strategy.options, "native", actor=policy)
    context = strategy.serving.require_engine().engine.max_model_len
    limits = EpisodeLimits(max_new_tokens=length, max_turns=1, max_tokens=context)
    rewards = RewardSet.of(episode_reward)
    plain = Collector(strategy, rewards, seed=0, max_new_tokens=length)
    return plain, EpisodeCollector(strategy, rewards, SingleTurn(), seed=0, limits=limits)


def compare(name: str, repeats: int, num_prompts: int, group_size: int, length: int) -> None:
    plain, pumped = collectors(name, length)
    prompts = [
        (index, Prompt(index=index, text="", token_ids=(3, 4, 5 + index % 4, 6))) for index in range(num_prompts)
    ]

    def run(collector: Collector) -> list[Sample]:
        return collector.sample(prompts, step=0, group_size=group_size, temperature=1.0, sleep_engine=False)

    wanted, found = run(plain), run(pumped)  # also warms up
    assert [sample.response_ids for sample in wanted] == [sample.response_ids for sample in found]
    seconds: dict[str, list[float]] = {"plain": [], "pump": []}
    for _ in range(repeats):
        for label, collector in (("plain", plain), ("pump", pumped)):
            seconds[label].append(cpu_seconds(lambda collector=collector: run(collector)))  # type: ignore[misc]
    first, second = (statistics.median(seconds[label]) for label in ("plain", "pump"))
    tokens = sum(len(sample.response_ids) for sample in wanted)
    print(
        f"{name}, {num_prompts} prompts x {group_size}: {tokens} tokens, {first:.3f} s plain, {second:.3f} s as a "
        f"workflow ({second / first:.3f}x)"
    )


def cpu_seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models",
        nargs="+",
        choices=sorted(SHAPES),
        default=["toy", "mid"],
        help="random models: toy has 0.8 and mid 42 million parameters (default: both)",
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="turns of each side, of which the median counts (default: %(default)s)"
    )
    parser.add_argument("--num_prompts", type=int, default=16, help="prompts of a turn (default: %(default)s)")
    parser.add_argument("--group_size", type=int, default=8, help="samples of a prompt (default: %(default)s)")
    parser.add_argument("--max_new_tokens", type=int, default=64, help="tokens of a sample (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.models:
        compare(name, arguments.repeats, arguments.num_prompts, arguments.group_size, length=arguments.max_new_tokens)


if __name__ == "__main__":
    main()
