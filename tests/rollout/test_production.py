"""Production and consumption in threads of one process, with an engine whose tokens say where they come from."""

import random
import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from lightrl import process_group
from lightrl.comm import Comm
from lightrl.config import GRPOConfig
from lightrl.data.sampler import PromptSampler
from lightrl.engines.base import Completion, EngineGroup
from lightrl.engines.link import Link
from lightrl.records import Prompt, Sample
from lightrl.rewards.reward_set import RewardSet
from lightrl.roles import Role
from lightrl.rollout.bounded_collector import BoundedCollector, UsedTickets
from lightrl.rollout.production import CLAIMS, Production, TicketOrder
from lightrl.rollout.recorded_schedule import ScheduleLog, read_schedule

PROMPTS = [Prompt(index=index, text=str(index), token_ids=(index,)) for index in range(5)]
GROUP = 2


class ScriptedEngine:
    """Ends each request after a random number of steps; a token is the version that made it."""

    def __init__(self, seed):
        self.version = None
        self._draw, self._next, self._left, self._made = random.Random(seed), 0, {}, {}

    def submit(self, prompt, params):
        self._left[self._next] = self._draw.choice([1, 2, 3, 12])
        self._made[self._next] = []
        self._next += 1
        return self._next - 1

    def has_unfinished(self):
        return bool(self._left)

    def step(self):
        done = []
        time.sleep(self._draw.choice([0, 0.002]))
        for request in list(self._left):
            self._left[request] -= 1
            self._made[request].append(self.version)
            if not self._left[request]:
                del self._left[request]
                made = tuple(self._made.pop(request))
                done += [
                    Completion(
                        request_id=request,
                        sample_index=index,
                        prompt_token_ids=(1,),
                        output_token_ids=made,
                        logprobs=(0.0,) * len(made),
                        versions=made,
                        finish_reason="stop",
                    )
                    for index in range(GROUP)
                ]
        return done

    def set_aside(self):
        return nullcontext()


def sample_of(position, prompt, completion):
    return Sample(
        prompt=prompt,
        position=position,
        sample_index=completion.sample_index,
        response_ids=completion.output_token_ids,
        sampler_logprobs=completion.logprobs,
        versions=completion.versions,
        finish_reason="stop",
        text="",
    )


def config_of(bound, steps):
    config = GRPOConfig(num_prompts=3, group_size=GROUP, max_steps=steps, rollout_ranks=2)
    config.rollout.max_staleness = bound
    return config


def serve(link, config, seed, errors):
    """One rollout rank."""
    engine, rewards = ScriptedEngine(seed), RewardSet.of(lambda sample: float(len(sample.response_ids)))
    made = Production(
        config, link, engine, EngineGroup(), prompts=PROMPTS, rewards=rewards,
        collector=SimpleNamespace(sample_of=sample_of),
    )  # fmt: skip

    def carry_out(command):
        if command["do"] == "begin":
            made.begin(command["step"], command["first"], command["used"])
        elif command["do"] == "weights":
            engine.version = command["version"]
        return command["do"] != "stop"

    try:
        link.meet()
        made.run(carry_out)
        link.peers.end()
    except Exception as error:
        link.peers.report(error)
        errors.append(error)


def train(link, config, folder, seed, first_step=0, used=None, until=None):
    """The trainer: takes a batch at each step and syncs; returns the batches."""
    used, draw = used or UsedTickets(Comm()), random.Random(seed)
    link.meet()
    link.put(CLAIMS, b"0")
    link.post({"do": "begin", "step": first_step, "first": used.first, "used": sorted(used.beyond)})
    link.post({"do": "weights", "version": first_step})
    sampler = PromptSampler(len(PROMPTS), config.num_prompts, config.seed)
    collector = BoundedCollector(
        Comm(), link, PROMPTS, sampler, config=config, used=used, log=ScheduleLog(folder)
    )  # fmt: skip
    batches = []
    for step in range(first_step, until or config.max_steps):
        samples = collector.sample([], step=step, group_size=GROUP, temperature=1.0)
        collector.score(samples)
        batches.append([samples[index] for index in range(0, len(samples), GROUP)])
        time.sleep(draw.choice([0, 0, 0.01, 0.03]))
        link.post({"do": "weights", "version": step + 1})
    link.post({"do": "stop"})
    link.peers.end()
    return batches, used


@pytest.fixture
def run(monkeypatch, tmp_path):
    def start(config, seed, **resumed):
        monkeypatch.setattr(process_group, "_meeting", HashStore())
        roles = [Role(name="rollout", rank=rank, num_trainers=1, num_rollout=2) for rank in range(2)]
        links = [Link(role, torch.device("cpu"), timedelta(seconds=60)) for role in roles]
        errors = []
        servers = [
            threading.Thread(target=serve, args=(link, config, seed + rank, errors)) for rank, link in enumerate(links)
        ]
        for server in servers:
            server.start()
        role = Role(name="trainer", rank=0, num_trainers=1, num_rollout=2)
        result = train(Link(role, torch.device("cpu"), timedelta(seconds=60)), config, tmp_path, seed, **resumed)
        for server in servers:
            server.join(20)
        assert errors == []
        return result

    return start


@pytest.mark.parametrize(("bound", "seed"), [(1, 0), (2, 1), (3, 2)])
def test_no_group_becomes_too_old_and_none_is_lost(bound, seed, run, tmp_path):
    steps = 25
    batches, used = run(config_of(bound, steps), seed)
    ages = [step - sample.start_version for step, batch in enumerate(batches) for sample in batch]
    assert max(ages) == bound
    assert all(step - min(s.versions) <= bound for step, batch in enumerate(batches) for s in batch)
    tickets = [sample.ticket for batch in batches for sample in batch]
    assert sorted(tickets) == list(range(3 * steps))  # each once
    assert (used.first, used.beyond) == (3 * steps, set())
    order = PromptSampler(len(PROMPTS), 3, 0).draw(3 * steps)
    assert all(sample.prompt.index == order[sample.ticket] for batch in batches for sample in batch)
    assert any(len(set(sample.versions)) > 1 for batch in batches for sample in batch)  # weights came in between
    recorded = read_schedule(tmp_path)
    assert [[group.ticket for group in batch] for batch in recorded] == [[s.ticket for s in b] for b in batches]
    assert recorded[3][0].start_version == batches[3][0].start_version


def test_a_resumed_run_makes_the_tickets_that_are_left(run, tmp_path):
    config = config_of(2, 8)
    before, used = run(config, 5, until=4)
    again = UsedTickets(Comm())
    again.load_state_dict(used.state_dict())
    after, _ = run(config, 6, first_step=4, used=again)
    tickets = [sample.ticket for batch in before + after for sample in batch]
    assert sorted(tickets) == list(range(24))
    assert max(step - s.start_version for step, batch in enumerate(after, start=4) for s in batch) <= 2
    assert len(read_schedule(tmp_path)) == 8


def test_tickets_that_were_used_are_left_out():
    order = TicketOrder(4, [5, 7])
    assert [order[number] for number in (0, 3, 1, 2)] == [4, 9, 6, 8]
