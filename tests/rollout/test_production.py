"""Production and consumption in threads of one process, with an engine whose tokens say where they come from."""

import asyncio
import random
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from made_samples import made_sample
from saved_state import through_a_file
from torch.distributed import HashStore

from lightrl import process_group
from lightrl.comm import Comm
from lightrl.config import GRPOConfig
from lightrl.data.curriculum import Curriculum
from lightrl.data.sampler import PromptSampler
from lightrl.engines.base import Completion, EngineGroup, InferenceEngine, SamplingParams
from lightrl.engines.colocated import ColocatedEngine
from lightrl.engines.link import Link
from lightrl.records import Prompt, Status
from lightrl.rewards.episode_reward import episode_reward
from lightrl.rewards.reward_set import RewardSet
from lightrl.roles import Role
from lightrl.rollout.bounded_collector import BoundedCollector, Tickets
from lightrl.rollout.bounded_drop import DroppingCollector
from lightrl.rollout.bounded_filter import filtering
from lightrl.rollout.client import EpisodeLimits
from lightrl.rollout.episode import Episode
from lightrl.rollout.episode_collector import EpisodeCollector
from lightrl.rollout.episode_production import EpisodeProduction
from lightrl.rollout.production import CLAIMS, CONTINUED, Production, TicketOrder
from lightrl.rollout.recorded_schedule import ScheduleLog, read_schedule
from lightrl.rollout.sample_messages import to_bytes
from lightrl.rollout.workflow import Workflow

PROMPTS = [Prompt(index=index, text=str(index), token_ids=(index,)) for index in range(5)]
GROUP = 2


class ScriptedEngine(InferenceEngine):
    """Ends a sample after a number of tokens that its request decides; a token is one more than its version."""

    max_model_len, vocab_size = 1000, 1000

    def __init__(self, seed):
        self.version = None
        self._pause, self._next, self._rows = random.Random(seed), 0, {}

    def submit(self, prompt, params):
        for index in range(params.first_sample, params.first_sample + params.n):
            length = random.Random(hash((params.seed, index))).choice([1, 2, 3, 30])
            self._rows[self._next, index] = (prompt.token_ids, max(1, length - params.first_token), [])
        self._next += 1
        return self._next - 1

    def has_unfinished(self):
        return bool(self._rows)

    def step(self):
        time.sleep(self._pause.choice([0, 0.002]))
        for _, _, made in self._rows.values():
            made.append(self.version)
        ended = [key for key, (_, length, made) in self._rows.items() if len(made) == length]
        return [self._taken(key, "stop") for key in ended]

    def abort(self, request_ids=None):
        return [self._taken(key, "abort") for key in list(self._rows) if request_ids is None or key[0] in request_ids]

    def _taken(self, key, reason):
        prompt, _, made = self._rows.pop(key)
        return Completion(
            request_id=key[0],
            sample_index=key[1],
            prompt_token_ids=prompt,
            output_token_ids=tuple(version + 1 for version in made),
            logprobs=(-0.5,) * len(made),
            versions=tuple(made),
            finish_reason=reason,
        )

    def load_weights(self, weights, version):
        self.version = version

    def sleep(self, level=1):
        return 0

    def wake(self, part):
        pass

    def close(self):
        pass


class TwoTurns(Workflow):
    """Two turns with a tool between them that takes a moment, now and then. Sample 1 of ticket 4 fails."""

    async def arun_episode(self, engine, data):
        episode = Episode(data.token_ids)
        episode.say(await engine.generate(episode.ids))
        await asyncio.sleep(random.choice([0, 0, 0.003]))
        episode.hear([900, 901])
        episode.say(await engine.generate(episode.ids))
        episode.reward = float(len(episode.response_ids))
        if data.index == 4 and engine.sample_index == 1:
            raise RuntimeError("the tool is on fire")
        return episode


def production(link, config, engine, workflow):
    rewards = RewardSet.of(lambda sample: float(len(sample.response_ids)))
    parts = (config, link, engine, EngineGroup())
    if workflow is None:
        plain = SimpleNamespace(sample_of=sample_of, sampling=SamplingParams())
        return Production(*parts, prompts=PROMPTS, rewards=rewards, collector=plain)
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "", chat_template=None)
    limits = EpisodeLimits(max_new_tokens=40, max_turns=2, max_tokens=500)
    strategy = SimpleNamespace(comm=Comm(), tokenizer=tokenizer, media=None)
    collector = EpisodeCollector(strategy, rewards, workflow, seed=config.seed, limits=limits)
    return EpisodeProduction(*parts, prompts=PROMPTS, rewards=RewardSet.of(episode_reward), collector=collector)


def sample_of(position, prompt, completion):
    return made_sample(
        prompt=prompt,
        position=position,
        sample_index=completion.sample_index,
        response_ids=completion.output_token_ids,
        sampler_logprobs=completion.logprobs,
        versions=completion.versions,
    )


def config_of(bound, steps):
    config = GRPOConfig(num_prompts=3, group_size=GROUP, max_steps=steps, rollout_ranks=2, max_new_tokens=40)
    config.rollout.max_staleness = bound
    return config


def serve(link, config, seed, errors, workflow):
    """One rollout rank."""
    engine = ColocatedEngine(ScriptedEngine(seed))
    made = production(link, config, engine, workflow)

    def carry_out(command):
        if command["do"] == "begin":
            made.begin(command)
        elif command["do"] == "save":
            link.answer(to_bytes(made.save()))
        elif command["do"] in ("name", "drop"):
            getattr(made, command["do"])(command)
        elif command["do"] == "weights":
            engine.update_weights([], command["version"])
        return command["do"] != "stop"

    try:
        link.meet()
        made.run(carry_out)
        link.peers.end()
    except Exception as error:
        link.peers.report(error)
        errors.append(error)


def train(link, config, folder, seed, first_step=0, used=None, until=None, sampler=None):
    """The trainer: takes a batch at each step and syncs; returns the batches."""
    used, draw = used or Tickets(Comm()), random.Random(seed)
    link.meet()
    sampler = sampler or PromptSampler(len(PROMPTS), config.num_prompts, config.seed)
    kind = DroppingCollector if config.rollout.late == "drop" else BoundedCollector
    if config.rollout.filter:
        kind = filtering(kind, unequal_lengths)
    parts = {"config": config, "tickets": used, "log": ScheduleLog(folder), "first_step": first_step}
    collector = kind(Comm(), link, PROMPTS, sampler, **parts)
    known = {"first": used.first, "used": sorted(used.beyond), "begun": used.begun}
    link.post({"do": "begin", "step": first_step, **known})
    link.post({"do": "weights", "version": first_step})
    batches = []
    for step in range(first_step, until or config.max_steps):
        samples = collector.sample([], step=step, group_size=GROUP, temperature=1.0)
        collector.score(samples)
        if isinstance(sampler, Curriculum):
            sampler.observe(step, [(sample.prompt.index, len(sample.versions)) for sample in samples])
        batches.append(samples)
        time.sleep(draw.choice([0, 0, 0.01, 0.03]))
        link.post({"do": "weights", "version": step + 1})
    time.sleep(0.02 if until else 0)  # so that groups are under way
    state = used.state_dict()
    link.post({"do": "stop"})
    link.peers.end()
    return batches, state


@pytest.fixture
def run(monkeypatch, tmp_path):
    def start(config, seed, workflow=None, **resumed):
        monkeypatch.setattr(process_group, "_meeting", HashStore())
        roles = [Role(name="rollout", rank=rank, num_trainers=1, num_rollout=2) for rank in range(2)]
        links = [Link(role, torch.device("cpu"), timedelta(seconds=15)) for role in roles]
        errors = []
        servers = [
            threading.Thread(target=serve, args=(link, config, seed + rank, errors, workflow))
            for rank, link in enumerate(links)
        ]
        for server in servers:
            server.start()
        role = Role(name="trainer", rank=0, num_trainers=1, num_rollout=2)
        result = train(Link(role, torch.device("cpu"), timedelta(seconds=15)), config, tmp_path, seed, **resumed)
        for server in servers:
            server.join(20)
        assert errors == []
        return result

    return start


@pytest.mark.parametrize(
    ("bound", "seed", "workflow"), [(1, 0, None), (2, 1, None), (3, 2, None), (1, 0, TwoTurns()), (3, 4, TwoTurns())]
)
def test_no_group_becomes_too_old_and_none_is_lost(bound, seed, workflow, run, tmp_path):
    steps = 25
    batches, used = run(config_of(bound, steps), seed, workflow)
    ages = [step - sample.start_version for step, batch in enumerate(batches) for sample in batch]
    assert max(ages) == bound
    assert all(step - s.oldest_version <= bound for step, batch in enumerate(batches) for s in batch)
    tickets = [sample.ticket for batch in batches for sample in batch]
    assert sorted(tickets) == sorted([*range(3 * steps)] * GROUP)  # each once
    assert used == {"first": 3 * steps, "beyond": [], "finished": [], "running": []}
    order = PromptSampler(len(PROMPTS), 3, 0).draw(3 * steps)
    assert all(sample.prompt.index == order[sample.ticket] for batch in batches for sample in batch)
    assert any(len(set(sample.versions)) > 1 for batch in batches for sample in batch)  # weights came in between
    for sample in (sample for batch in batches for sample in batch):  # every token has the version that made it
        made = zip(sample.response_ids, sample.versions, sample.is_own, strict=True)
        assert all(token == version + 1 if is_own else token in (900, 901) for token, version, is_own in made)
    recorded = read_schedule(tmp_path)
    assert [[group.ticket for group in batch] for batch in recorded] == [
        [s.ticket for s in batch[::GROUP]] for batch in batches
    ]
    assert recorded[3][0].start_version == batches[3][0].start_version
    for group, sample in zip(recorded[3], batches[3][::GROUP], strict=True):
        calls = group.samples[0].calls
        own = [version for version, is_own in zip(sample.versions, sample.is_own, strict=True) if is_own]
        assert [version for call in calls for version, count in call for _ in range(count)] == own
        assert len(calls) == (1 if workflow is None else 2)
    if workflow is not None:
        failed = [sample for batch in batches for sample in batch if sample.status is Status.FAILED]
        assert {(sample.prompt.index, sample.sample_index) for sample in failed} == {(4, 1)}
        found = [sample for group in recorded for g in group for sample in g.samples if sample.status is Status.FAILED]
        assert len(found) == len(failed)


@pytest.mark.parametrize("workflow", [None, TwoTurns()])
def test_a_resumed_run_goes_on_with_what_was_under_way(workflow, run, tmp_path):
    config = config_of(2, 8)
    before, used = run(config, 5, workflow, until=4)
    again = Tickets(Comm())
    again.load_state_dict(through_a_file(used))
    begun = dict(again.begun)
    assert again.finished
    assert any(partials_of(item) for item in again.running)
    after, _ = run(config, 6, workflow, first_step=4, used=again)
    tickets = [sample.ticket for batch in before + after for sample in batch]
    assert sorted(tickets) == sorted([*range(24)] * GROUP)
    assert max(step - s.start_version for step, batch in enumerate(after, start=4) for s in batch) <= 2
    assert {s.ticket: s.start_version for batch in after for s in batch if s.ticket in begun} == begun
    assert any(s.ticket in begun and len(set(s.versions)) > 1 for batch in after for s in batch)  # one that went on
    assert len(read_schedule(tmp_path)) == 8


def dropping(bound, steps):
    config = config_of(bound, steps)
    config.rollout.late = "drop"
    return config


@pytest.mark.parametrize(
    ("bound", "seed", "workflow"), [(1, 0, None), (2, 1, None), (1, 2, TwoTurns()), (3, 3, TwoTurns())]
)
def test_late_groups_are_dropped_and_replaced(bound, seed, workflow, run):
    steps = 25
    batches, used = run(dropping(bound, steps), seed, workflow)
    assert all(len(batch) == 3 * GROUP for batch in batches)
    assert max(step - s.oldest_version for step, batch in enumerate(batches) for s in batch) <= bound
    trained = {sample.ticket for batch in batches for sample in batch}
    assert len(trained) == 3 * steps
    num_used = used["first"] + len(used["beyond"])
    assert num_used > 3 * steps, "none was dropped, so nothing was tested"
    assert used["finished"] == used["running"] == []
    assert trained < {*range(used["first"]), *used["beyond"]}


@pytest.mark.parametrize(("ratio", "workflow"), [(0.5, None), (1.0, TwoTurns())])
def test_every_step_has_its_share_of_groups_of_its_own_weights(ratio, workflow, run):
    steps = 12
    config = dropping(2, steps)
    config.rollout.on_policy_min_ratio = ratio
    batches, _ = run(config, 4, workflow)
    shares = [[sample.start_version == step for sample in batch] for step, batch in enumerate(batches)]
    assert len(batches) == steps
    assert min(sum(share) / len(share) for share in shares) >= ratio
    plain, _ = run(dropping(2, steps), 4, workflow)
    shares = [[sample.start_version == step for sample in batch] for step, batch in enumerate(plain)]
    assert min(sum(share) / len(share) for share in shares) < ratio, "nothing was tested"


@pytest.mark.parametrize("workflow", [None, TwoTurns()])
def test_dropped_groups_do_not_come_back_after_a_resume(workflow, run):
    config = dropping(1, 12)
    _, state = run(config, 5, workflow, until=6)
    used = Tickets(Comm())
    used.load_state_dict(through_a_file(state))
    gone = {*range(used.first), *used.beyond}
    after, _ = run(config, 6, workflow, first_step=6, used=used)
    assert len(after) == 6
    assert not gone & {sample.ticket for batch in after for sample in batch}
    assert max(step - s.oldest_version for step, batch in enumerate(after, start=6) for s in batch) <= 1


@pytest.mark.parametrize("workflow", [None, TwoTurns()])
def test_only_so_many_groups_run_at_once(workflow, run, monkeypatch):
    most = []
    step = Production._next_order
    monkeypatch.setattr(Production, "_next_order", lambda self: most.append(len(self._groups)) or step(self))
    run(config_of(1, 6), 0, workflow)
    assert max(most) == 3  # a batch on each engine
    most.clear()
    config = config_of(1, 6)
    config.rollout.max_groups = 4  # on two engines
    batches, _ = run(config, 0, workflow)
    assert (len(batches), max(most)) == (6, 2)


def unequal_lengths(group):
    return len({len(sample.response_ids) for sample in group.samples}) > 1


@pytest.mark.parametrize(
    ("config", "seed", "workflow"),
    [(config_of(1, 20), 0, None), (config_of(2, 20), 1, TwoTurns()), (dropping(1, 20), 2, None)],
    ids=["wait", "episodes", "drop"],
)
def test_rejected_groups_are_replaced_within_the_bound(config, seed, workflow, run):
    config.rollout.filter = "my_rewards:unequal_lengths"
    batches, used = run(config, seed, workflow)
    assert all(len(batch) == 3 * GROUP for batch in batches)
    assert max(step - s.oldest_version for step, batch in enumerate(batches) for s in batch) <= 2
    for batch in batches:
        for first, second in zip(batch[::GROUP], batch[1::GROUP], strict=True):
            assert len(first.response_ids) != len(second.response_ids)
    trained = {sample.ticket for batch in batches for sample in batch}
    num_used = used["first"] + len(used["beyond"])
    assert len(trained) == 60 < num_used, "none was rejected, so nothing was tested"
    assert used["finished"] == used["running"] == []


def test_rejected_groups_do_not_come_back_after_a_resume(run):
    config = config_of(2, 10)
    config.rollout.filter = "my_rewards:unequal_lengths"
    before, state = run(config, 5, until=5)
    used = Tickets(Comm())
    used.load_state_dict(through_a_file(state))
    gone = {*range(used.first), *used.beyond}
    after, _ = run(config, 6, first_step=5, used=used)
    assert [len(batch) for batch in after] == [3 * GROUP] * 5
    assert len(gone) > len({sample.ticket for batch in before for sample in batch}), "nothing was rejected"
    assert not gone & {sample.ticket for batch in after for sample in batch}


def with_curriculum(config):
    config.data.curriculum = "half_solved"  # the sampler of the test stands in for it
    return config


def seen_last(progress):
    """Prefers the prompts of the newest results."""
    steps = {index: result.step for index, result in progress.results.items()}
    return [1.0 + steps.get(index, 0) for index in range(len(progress.prompts))]


@pytest.mark.parametrize(
    ("config", "workflow"), [(config_of(2, 15), None), (config_of(1, 15), TwoTurns()), (dropping(1, 15), None)]
)
def test_a_curriculum_chooses_by_the_results_of_the_steps_before_a_start(config, workflow, run):
    chosen_at = {}  # by ticket: the step whose results came last

    class Watched(Curriculum):
        def _choose(self, ticket):
            chosen_at[ticket] = self._step
            return super()._choose(ticket)

    with_curriculum(config)
    made = Watched(seen_last, PROMPTS, config.num_prompts, config.seed)
    batches, _ = run(config, 3, workflow, sampler=made)
    samples = [sample for batch in batches for sample in batch]
    assert len({sample.ticket for sample in samples}) == 3 * 15
    for sample in samples:
        assert sample.prompt.index == made.index_at(sample.ticket)
        assert chosen_at[sample.ticket] <= sample.start_version
    ahead = config.rollout.max_staleness * 3
    for ticket in range(ahead + 3, 3 * 15 - ahead):
        assert chosen_at[ticket] >= ticket // 3 - config.rollout.max_staleness or config.rollout.late == "drop"


def test_a_curriculum_goes_on_with_what_it_had_chosen(run):
    config = with_curriculum(config_of(2, 8))
    made = Curriculum(seen_last, PROMPTS, config.num_prompts, config.seed)
    before, state = run(config, 5, until=4, sampler=made)
    used = Tickets(Comm())
    used.load_state_dict(through_a_file(state))
    again = Curriculum(seen_last, PROMPTS, config.num_prompts, config.seed)
    again.load_state_dict(made.state_dict())
    after, _ = run(config, 6, first_step=4, used=used, sampler=again)
    samples = [sample for batch in before + after for sample in batch]
    assert len({sample.ticket for sample in samples}) == 24
    assert all(sample.prompt.index == again.index_at(sample.ticket) for sample in samples)
    assert again.state_dict()["chosen"][:18] == made.state_dict()["chosen"][:18]


def test_groups_of_a_checkpoint_wait_for_their_prompts_from_the_curriculum(monkeypatch):
    monkeypatch.setattr(process_group, "_meeting", HashStore())
    role = Role(name="rollout", rank=0, num_trainers=1, num_rollout=1)
    link, engine = Link(role, torch.device("cpu"), timedelta(seconds=15)), ColocatedEngine(ScriptedEngine(0))
    made = production(link, with_curriculum(config_of(2, 8)), engine, None)
    link.put(CLAIMS, b"2")
    link.put(CONTINUED, b"0")
    made.begin({"first": 12, "used": [], "begun": [(12, 3), (13, 4)], "step": 4})
    engine.update_weights([], 4)
    assert made._claims() == []
    made.name({"prompts": [2]})
    assert made._claims() == [(0, 3)]
    made.name({"prompts": [0, 1]})
    assert made._claims() == [(1, 4), (2, 4)]  # the last is a new one, under the engine's weights


def partials_of(state):
    return state["partials"] if "partials" in state else [item for j in state["journals"] for item in j["partials"]]


def test_tickets_that_were_used_are_left_out():
    order = TicketOrder(4, [5, 7])
    assert [order[number] for number in (0, 3, 1, 2)] == [4, 9, 6, 8]
    order = TicketOrder(4, [5, 7], [6, 10])
    assert [order[number] for number in range(6)] == [6, 10, 4, 8, 9, 11]
