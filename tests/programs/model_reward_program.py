"""Scores samples by a reward model under any strategy: `model_reward_program.py FOLDER STRATEGY OUT`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from reward_samples import answered

from lightrl.config import GRPOConfig
from lightrl.metrics import Statistics
from lightrl.models.policy import load_tokenizer
from lightrl.records import Sample
from lightrl.rewards.reward_set import RewardSet
from lightrl.rollout.collector import Scorer
from lightrl.strategy import create_strategy

TEXTS = ["1+2", "33+44=7", "5", "12+34=46", "9+9=18"]


def main() -> None:
    folder, strategy_name, out = sys.argv[1:]
    config = GRPOConfig(
        strategy=strategy_name,
        reward=("reward_model",),
        reward_model=folder,
        reward_args=("reward_model.max_tokens=9",),
    )
    rewards = RewardSet.from_config(config)
    strategy = create_strategy(config)
    strategy.setup_distributed()
    strategy.tokenizer = load_tokenizer(folder)
    rewards.prepare(strategy)
    scorer = Scorer(strategy.comm, rewards)
    samples = [answered(text, position=place, prompt_text="3+") for place, text in enumerate(TEXTS)]
    samples = [_tokenized(sample, strategy.tokenizer) for sample in samples]
    found = {}
    for name, mine in (
        ("uneven", samples if strategy.comm.is_main else []),
        ("shared", samples[strategy.comm.rank :: strategy.comm.world]),
    ):
        statistics = Statistics()
        scored = zip(mine, scorer.score(mine, statistics), strict=True)
        everyones = strategy.comm.all_gather_object([(sample.position, reward) for sample, reward in scored])
        found[name] = [reward for _, reward in sorted(item for part in everyones for item in part)]
        found[f"{name} mean"] = statistics.reduce(strategy.comm)["reward/reward_model"]
    if strategy.comm.is_main:
        Path(out).write_text(json.dumps(found))
    strategy.close()


def _tokenized(sample: Sample, tokenizer: Any) -> Sample:
    ids = tokenizer(sample.prompt.text)["input_ids"]
    response = [*tokenizer(sample.text)["input_ids"], tokenizer.eos_token_id]
    count = len(response)
    return replace(
        sample,
        prompt_ids=tuple(ids),
        response_ids=tuple(response),
        sampler_logprobs=(0.0,) * count,
        versions=(0,) * count,
    )


if __name__ == "__main__":
    main()
