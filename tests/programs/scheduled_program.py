"""Rolls out six steps by a schedule on any number of ranks; rank 0 writes what each batch has.

usage: scheduled_program.py OUTPUT.json KILLED_AFTER PARTIAL TAIL_BATCH wait|drop

With drop the bound is 1 in place of 3.

After step KILLED_AFTER the state goes through a file into a new schedule, as after a kill. -1: never.
"""

import json
import sys

import torch
from saved_state import through_a_file

from lightrl.builtin.model import tiny_model
from lightrl.comm import RankError
from lightrl.config import GRPOConfig
from lightrl.metrics import Statistics
from lightrl.models.policy import Policy
from lightrl.records import Prompt
from lightrl.rewards.episode_reward import episode_reward
from lightrl.rewards.reward_set import RewardSet
from lightrl.rollout.client import EpisodeLimits
from lightrl.rollout.episode import Episode
from lightrl.rollout.journal import remembered
from lightrl.rollout.schedule import Schedule
from lightrl.rollout.scheduled_collector import Pace
from lightrl.rollout.scheduler import Rules
from lightrl.rollout.workflow import Workflow
from lightrl.seeding import mix_seed
from lightrl.strategy import create_strategy
from lightrl.trainers.scheduled import COLLECTORS, SCHEDULERS

RULES = {"batch_size": 4, "max_staleness": 3, "over_issue": 1.0, "tail_after": 2}
LIMIT = 40
TOOL_CALLS = []


class Uneven(Workflow):
    """Two turns around a tool; few samples are long, and tickets that 7 divides fail."""

    async def arun_episode(self, engine, data):
        if data.index % 7 == 6:
            raise ValueError("scripted")
        draw = mix_seed(data.index, engine.sample_index)
        length = LIMIT if draw % 5 == 0 else 2 + draw % 7
        episode = Episode(data.token_ids)
        episode.say(await engine.generate(episode.ids, max_new_tokens=length))
        episode.hear(await remembered(self.tool(data, engine.sample_index)))
        episode.say(await engine.generate(episode.ids, max_new_tokens=1 + draw % 3))
        episode.reward = 1.0
        return episode

    async def tool(self, data, index):
        TOOL_CALLS.append((data.index, index))
        return [3 + data.index % 9, 5]


def parts(strategy, tail_batch, partial, late):
    comm = strategy.comm
    ids = [strategy.tokenizer(f"{index}+{index}=")["input_ids"] for index in range(64)]
    prompts = [Prompt(index=index, text="", token_ids=tuple(item)) for index, item in enumerate(ids)]
    rules = Rules(**{**RULES, "max_staleness": 1 if late == "drop" else 3}, tail_batch=tail_batch)
    scheduler = SCHEDULERS[late](rules)
    schedule = Schedule(scheduler, comm, prompts, lambda ticket: ticket)
    limits = EpisodeLimits(max_new_tokens=LIMIT, max_turns=2, max_tokens=200)
    return COLLECTORS[late](
        strategy,
        RewardSet.of(episode_reward),
        Uneven(),
        schedule,
        Pace(agree_every=4, partial=partial),
        Statistics(),
        seed=3,
        limits=limits,
    )


def main(output, killed_after, partial, tail_batch, late):
    torch.set_num_threads(1)
    strategy = create_strategy(GRPOConfig(strategy="ddp"))
    strategy.setup_distributed()
    model, strategy.tokenizer = tiny_model()
    policy = strategy.prepare(Policy(model))
    strategy.setup_inference_engine(strategy.options, "native", actor=policy)
    collector = parts(strategy, int(tail_batch), partial == "True", late)
    comm, batches, carried, dropped = strategy.comm, [], [], []
    for step in range(6):
        samples = collector.sample([], step=step, group_size=3, temperature=1.0)
        assert not strategy.engine.has_unfinished()
        rewards = collector.score(samples)
        rows = [
            (s.position, s.sample_index, s.ticket, s.start_version, s.response_ids, s.versions, s.own, reward)
            for s, reward in zip(samples, rewards, strict=True)
        ]
        batches.append(sorted(row for part in comm.all_gather_object(rows) for row in part))
        assert {*collector.schedule.buffer.tickets} <= collector.schedule.scheduler.finished
        carried.append([collector.schedule.scheduler.running, sorted(collector.schedule.scheduler.finished)])
        dropped.append(collector._statistics.take().get("rollout/dropped"))
        strategy.set_global_step(step + 1)
        strategy.sync_weights(policy)
        if step == int(killed_after):
            state = through_a_file(collector.schedule.state_dict())
            collector.close()
            collector = parts(strategy, int(tail_batch), partial == "True", late)
            collector.schedule.load_state_dict(state)
    collector.close()
    calls = sum(comm.all_gather_object(len(TOOL_CALLS)))
    if comm.is_main:
        with open(output, "w") as file:
            json.dump({"batches": batches, "carried": carried, "tool_calls": calls, "dropped": dropped}, file)
    strategy.close()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except RankError as error:
        sys.exit(str(error))
