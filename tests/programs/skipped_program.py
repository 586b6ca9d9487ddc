"""Trains on 2 ranks, of which one has a number that is not finite, under every strategy: python FILE STRATEGY ..."""

import dataclasses
import math
import sys

from lightrl.config import AlgorithmConfig, GRPOConfig, parse_config
from lightrl.metrics import Statistics
from lightrl.strategy import create_strategy
from lightrl.testing.tiny_training import differ, fresh, my_batches, parameters, same, train
from lightrl.trainers.objective import PolicyLoss

SHARDED = ["--strategy", "deepspeed", "--deepspeed.param_persistence_threshold", "0"]
FLAGS = {
    "ddp": ["--strategy", "ddp"],
    "fsdp": ["--strategy", "fsdp"],
    **{f"zero{stage}": [*SHARDED, "--deepspeed.zero_stage", str(stage)] for stage in range(4)},
}


def with_value(batch, name, value):
    """The batch with this value at the second response token of its first sample that has two, and that sample."""
    owners = batch.sequence_index.tolist()
    place = next(i for i in range(1, len(owners)) if owners[i] == owners[i - 1])
    values = getattr(batch, name).clone()
    values[place] = value
    return dataclasses.replace(batch, **{name: values}), batch.keys[owners[place]]


def check(strategy):
    """Each update is skipped on both ranks, the reason names sample and source, and the next update is made."""
    policy, _ = fresh(strategy)
    train(strategy, policy, 0)  # momentum, which would move the weights
    before = parameters(strategy, policy)
    last = strategy.comm.world - 1
    for options, name, value in (({}, "old_logprobs", math.nan), ({"kl_coef": 0.1}, "ref_logprobs", -math.inf)):
        objective = PolicyLoss(AlgorithmConfig(**options))
        (batch,) = my_batches(strategy, 1, size=99)
        batch = dataclasses.replace(batch, old_logprobs=batch.sampler_logprobs, ref_logprobs=batch.sampler_logprobs)
        bad, key = with_value(batch, name, value)
        result = strategy.train_batch(
            [bad if strategy.comm.rank == last else batch],
            lambda scores, batch, objective=objective: objective.loss(scores, batch, Statistics()),
            objective.weight,
            model=policy,
        )
        key = strategy.comm.all_gather_object(key)[last]
        assert result.skipped, (name, value)
        assert not math.isfinite(result.loss), result.loss
        wanted = f"rank {last}: {name} is {value:g} at response token 1 of sample {key}."
        assert result.reason.endswith(wanted), (wanted, result.reason)
        same(parameters(strategy, policy), before)
    assert not train(strategy, policy, 2).skipped
    assert differ(parameters(strategy, policy), before)


def main() -> None:
    for chosen in sys.argv[1:]:
        strategy = create_strategy(parse_config(GRPOConfig, FLAGS[chosen]))
        strategy.setup_distributed()
        check(strategy)
        print(f"{chosen} checked", flush=True)


if __name__ == "__main__":
    main()
