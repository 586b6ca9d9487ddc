"""Episodes that were played under two versions of the weights are played again from their schedule."""

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from lightrl.builtin.model import tiny_model
from lightrl.comm import Comm
from lightrl.config import GRPOConfig, StrategyOptions
from lightrl.engines.base import EngineGroup, SamplingParams
from lightrl.engines.colocated import ColocatedEngine
from lightrl.engines.native.engine import build_native_engine
from lightrl.records import Prompt, ScoredGroup
from lightrl.rewards.episode_reward import episode_reward
from lightrl.rewards.reward_set import RewardSet
from lightrl.rollout.client import EpisodeLimits
from lightrl.rollout.episode import Episode
from lightrl.rollout.episode_collector import EpisodeCollector, EpisodeJob
from lightrl.rollout.journal import Journal
from lightrl.rollout.phases import PhasedDriver
from lightrl.rollout.production import segments
from lightrl.rollout.recorded_schedule import ScheduleLog, read_schedule
from lightrl.rollout.replayed_episodes import ReplayedEpisodes
from lightrl.rollout.workflow import Workflow
from lightrl.seeding import mix_seed

PROMPT = Prompt(index=0, text="", token_ids=(3, 5))
CONFIG = GRPOConfig(num_prompts=1, group_size=2, max_new_tokens=5)


class Turns(Workflow):
    def __init__(self, count):
        self.count = count

    async def arun_episode(self, engine, data):
        episode = Episode(data.token_ids)
        for _ in range(self.count):
            episode.say(await engine.generate(episode.ids))
            episode.hear([7])
        return episode


class TurnsAndSharedWork(Turns):
    async def arun_episode(self, engine, data):
        episode = Episode(data.token_ids)
        episode.say(await engine.generate(episode.ids, max_new_tokens=3 - engine.sample_index))
        episode.hear((await engine.once("work", self.work)).token_ids)
        for _ in range(self.count - 1):
            episode.say(await engine.generate(episode.ids))
            episode.hear([7])
        return episode

    async def work(self, engine):
        return await engine.generate([9, 9, 9], max_new_tokens=3)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture
def engine(model):
    policy, tokenizer = model
    made = build_native_engine(
        source=policy, tokenizer=tokenizer, options=StrategyOptions(), device=torch.device("cpu"), group=EngineGroup()
    )
    return ColocatedEngine(made, tokenizer)


def load(engine, model, version):
    weights = [(name, value.detach() + 0.01 * version) for name, value in model[0].named_parameters()]
    engine.update_weights(weights, version)


def collector_of(engine, workflow):
    @contextmanager
    def session():
        yield engine

    serving = SimpleNamespace(session=session)
    strategy = SimpleNamespace(comm=Comm(), tokenizer=engine.tokenizer, serving=serving, media=None)
    limits = EpisodeLimits(max_new_tokens=5, max_turns=9, max_tokens=40)
    collector = EpisodeCollector(strategy, RewardSet.of(episode_reward), workflow, seed=CONFIG.seed, limits=limits)
    return collector, strategy


@pytest.fixture
def recorded(engine, model, tmp_path):
    return record(engine, model, tmp_path, Turns(3))


def record(engine, model, folder, workflow):
    """Plays one group of three turns, which weights 1 interrupt in the second."""
    load(engine, model, 0)
    collector, _ = collector_of(engine, workflow)
    driver = PhasedDriver(engine, EngineGroup())
    jobs = [
        EpisodeJob(0, PROMPT, index, mix_seed(1, CONFIG.seed, 0, 0), SamplingParams(max_new_tokens=5), 2)
        for index in range(2)
    ]
    journals = [Journal(0, index, 0) for index in range(2)]
    for job, journal in zip(jobs, journals, strict=True):
        driver.begin(journal, partial(collector.play, driver, job))
    driver.step(7)
    load(engine, model, 1)
    ended = {}
    while len(ended) < 2:
        driver.step(1)
        ended |= driver.take_ended()
    driver.close()
    samples = tuple(collector.as_sample(job, ended[0, job.sample_index]) for job in jobs)
    calls = [[segments(versions, 0) for versions in journal.versions_of_calls()] for journal in journals]
    log = ScheduleLog(folder)
    log.append(0, [], [])
    group = ScoredGroup(samples=samples, rewards=(0.0, 0.0), step=1)
    log.append(1, [group], [calls])
    lines = (folder / "schedule.jsonl").read_text().replace('"ticket": -1', '"ticket": 0')
    (folder / "schedule.jsonl").write_text(lines.replace('"start_version": -1', '"start_version": 0'))
    return group, read_schedule(folder)


def replay(engine, model, schedule, workflow):
    collector, strategy = collector_of(engine, workflow)
    made = ReplayedEpisodes(collector, strategy, schedule, config=CONFIG, prompts=[PROMPT])
    options = {"group_size": 2, "temperature": 1.0}
    try:
        load(engine, model, 0)
        assert made.sample([], step=0, **options) == []
        load(engine, model, 1)
        return made.sample([], step=1, **options)
    finally:
        made.close()


def test_the_same_episodes_are_played_again(engine, model, recorded):
    group, schedule = recorded
    assert any(len(call) == 2 for sample in schedule[1][0].samples for call in sample.calls)  # one went on
    samples = replay(engine, model, schedule, Turns(3))
    for mine, wanted in zip(samples, group.samples, strict=True):
        assert (mine.response_ids, mine.versions, mine.own) == (wanted.response_ids, wanted.versions, wanted.own)
        assert mine.start_version == 0


def test_work_for_all_siblings_is_done_again(engine, model, tmp_path):
    group, schedule = record(engine, model, tmp_path, TurnsAndSharedWork(2))
    assert sorted(len(sample.calls) for sample in schedule[1][0].samples) == [2, 3]
    samples = replay(engine, model, schedule, TurnsAndSharedWork(2))
    for mine, wanted in zip(samples, group.samples, strict=True):
        assert (mine.response_ids, mine.versions, mine.own) == (wanted.response_ids, wanted.versions, wanted.own)


def test_a_turn_without_a_token_is_played_again(engine, model, recorded, tmp_path):
    """An engine cuts a turn before the placeholder of an image; here this is the first token of a second turn."""
    first = recorded[0].samples[0]
    engine._placeholder_ids = {first.response_ids[first.own.index(False) + 1]}
    group, schedule = record(engine, model, tmp_path, Turns(3))
    calls = [call for sample in schedule[1][0].samples for call in sample.calls]
    assert ((0, 0),) in calls
    samples = replay(engine, model, schedule, Turns(3))
    assert [mine.response_ids for mine in samples] == [wanted.response_ids for wanted in group.samples]
    assert [mine.versions for mine in samples] == [wanted.versions for wanted in group.samples]


def test_episodes_that_ask_for_more_are_refused(engine, model, recorded):
    with pytest.raises(ValueError, match=r"sample \(0, [01]\) asks for turn 4, which it did not in the recorded run"):
        replay(engine, model, recorded[1], Turns(4))


class TurnsAndMoreSharedWork(TurnsAndSharedWork):
    async def work(self, engine):
        for _ in range(4):  # more calls than the record has of a sample, shared ones and its own
            made = await super().work(engine)
        return made


def test_episodes_that_share_more_work_are_refused(engine, model, tmp_path):
    _, schedule = record(engine, model, tmp_path, TurnsAndSharedWork(2))
    with pytest.raises(
        ValueError, match=r"sample \(0, [01]\) asks for another call for all siblings, which it did not"
    ):
        replay(engine, model, schedule, TurnsAndMoreSharedWork(2))


def test_episodes_that_say_less_are_noticed(engine, model, recorded):
    with pytest.raises(ValueError, match="the samples of ticket 0 are not those of the recorded run"):
        replay(engine, model, recorded[1], Turns(2))
