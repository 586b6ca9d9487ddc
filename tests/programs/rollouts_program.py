"""Makes AReaL's calls on any number of ranks; rank 0 writes what each returned, over all ranks.

usage: rollouts_program.py OUTPUT.json
"""

import json
import sys

import torch

from lightrl.builtin.model import tiny_model
from lightrl.config import GRPOConfig
from lightrl.models.policy import Policy
from lightrl.rollout.episode import Episode
from lightrl.rollout.rollouts import Rollouts, WaitTimeoutError
from lightrl.rollout.workflow import Workflow
from lightrl.strategy import create_strategy


class Uneven(Workflow):
    """Long turns for every third prompt; None for answer 4."""

    async def arun_episode(self, engine, data):
        if data.answer == 4:
            return None
        episode = Episode(data.token_ids)
        length = 24 if data.answer % 3 == 0 else 2
        episode.say(await engine.generate(episode.ids, max_new_tokens=length))
        episode.reward = float(data.answer)
        return episode


class Failing(Uneven):
    """Fails for even answers."""

    async def arun_episode(self, engine, data):
        if data.answer % 2 == 0:
            raise RuntimeError("on fire")
        return await super().arun_episode(engine, data)


class Tensors(Workflow):
    """An episode as a dict of tensors, as AReaL's workflows return it."""

    async def arun_episode(self, engine, data):
        turn = await engine.generate(data.token_ids, max_new_tokens=2)
        ids = [*data.token_ids, *turn.token_ids]
        mask = [0] * len(data.token_ids) + [1] * len(turn.token_ids)
        return {
            "input_ids": torch.tensor([ids]),
            "loss_mask": torch.tensor([mask]),
            "rewards": torch.tensor([100.0 + data.answer]),
        }


class Collective(Workflow):
    """Asks all ranks for something, which no episode may; the reward says whether it was refused."""

    def __init__(self, comm):
        self.comm = comm

    async def arun_episode(self, engine, data):
        episode = Episode(data.token_ids)
        episode.say(await engine.generate(episode.ids, max_new_tokens=2))
        calls = (self.comm.barrier, lambda: self.comm.phase("mine", local=True).__enter__())
        episode.reward = float(sum("An episode has called" in message_of(call) for call in calls))
        return episode


RECORDS = [{"prompt": f"{number}+{number}=", "answer": number} for number in range(12)]


def message_of(call):
    try:
        call()
    except (ValueError, RuntimeError, WaitTimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(output):
    torch.set_num_threads(1)
    strategy = create_strategy(GRPOConfig(strategy="ddp"))
    strategy.setup_distributed()
    model, strategy.tokenizer = tiny_model()
    policy = strategy.prepare(Policy(model))
    strategy.setup_inference_engine(strategy.options, "native", actor=policy)
    made = {}

    def note(name, batch):
        assert not strategy.engine.has_unfinished()
        assert batch["loss_mask"].shape == batch["input_ids"].shape == batch["versions"].shape
        rows = [
            [int(batch["group_ids"][row]), float(batch["rewards"][row])]
            + [batch[key][row][batch["attention_mask"][row]].tolist() for key in ("input_ids", "loss_mask", "versions")]
            for row in range(len(batch["rewards"]))
        ]
        made[name] = sorted(row for part in strategy.comm.all_gather_object(rows) for row in part)

    def rollouts(**options):
        return Rollouts(strategy, Uneven(), max_new_tokens=24, **{"batch_size": 2, "agree_every": 2} | options)

    now = rollouts(group_size=2)
    note("rollout_batch", now.rollout_batch(RECORDS[:6]))
    made["rejected"] = now.metrics()["episode/filtered"]
    note("failing", now.rollout_batch(RECORDS[:3], workflow=Failing()))
    counts = now.metrics()
    made["failed"] = [counts[name] for name in ("episode/failed", "episode/failed_share", "rollout/lost")]
    made["no prompt"] = message_of(lambda: now.rollout_batch([]))
    made["all fail"] = message_of(lambda: now.rollout_batch(RECORDS[:1], workflow=Failing()))
    note("tensors", now.rollout_batch(RECORDS[:1], workflow=Tensors()))

    note("collective", now.rollout_batch(RECORDS[:2], workflow=Collective(strategy.comm)))

    later = rollouts(max_staleness=3)
    for record in RECORDS[3:8]:  # 3 and 6 are long, 4 is rejected
        later.submit(record)
    made["too late"] = message_of(lambda: later.wait(2, timeout=0.0))
    note("wait", later.wait(2))
    later.pause()
    later.submit(RECORDS[8])
    made["paused"] = message_of(lambda: later.wait(3))
    later.resume()
    made["pending"] = later.num_pending
    note("wait again", later.wait(3))
    made["nothing"] = message_of(lambda: later.wait(1))
    made["different"] = message_of(lambda: (later.submit(RECORDS[strategy.comm.rank]), later.wait(1)))

    ahead = rollouts(max_staleness=1, max_concurrent=3)
    for step in range(6):
        note(f"step {step}", ahead.prepare_batch([RECORDS[:5], RECORDS[5:]]))
        assert ahead.num_pending <= 2 + 2
        strategy.set_global_step(step + 1)
        strategy.sync_weights(policy)
    made["metrics"] = sorted(ahead.metrics())
    made["empty"] = message_of(lambda: rollouts().prepare_batch([]))
    for each in (now, later, ahead):
        each.close()
    if strategy.comm.is_main:
        with open(output, "w") as file:
            json.dump(made, file)
    strategy.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
