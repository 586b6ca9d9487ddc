"""Episodes on a rollout rank: what a checkpoint has of them goes on at the same token."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lightrl.builtin.model import tiny_model
from lightrl.comm import Comm
from lightrl.config import GRPOConfig, StrategyOptions
from lightrl.engines.base import EngineGroup
from lightrl.engines.colocated import ColocatedEngine
from lightrl.engines.native.engine import build_native_engine
from lightrl.records import Prompt
from lightrl.rewards.episode_reward import episode_reward
from lightrl.rewards.reward_set import RewardSet
from lightrl.rollout.client import EpisodeLimits
from lightrl.rollout.episode import Episode
from lightrl.rollout.episode_collector import EpisodeCollector
from lightrl.rollout.episode_production import EpisodeProduction
from lightrl.rollout.sample_messages import from_bytes, to_bytes
from lightrl.rollout.saved_groups import group_from_state
from lightrl.rollout.workflow import Workflow

PROMPTS = [Prompt(index=index, text="", token_ids=(index + 3, 5)) for index in range(2)]
CONFIG = GRPOConfig(num_prompts=2, group_size=2, max_new_tokens=6, max_steps=1)


class Store:
    """A link of one rank, with itself."""

    def __init__(self):
        self.values, self.counts = {}, {"claims": 0, "continued": 0}
        self.put, self.peek = self.values.__setitem__, self.values.__getitem__

    def claim(self, key, limit):
        if self.counts[key] >= limit:
            return None
        self.counts[key] += 1
        return self.counts[key] - 1

    def count(self, key, add=0):
        self.counts[key] = self.counts.get(key, 0) + add
        return self.counts[key]

    def has_command(self):
        return False

    def require_others(self):
        pass


class ThreeTurns(Workflow):
    """Its reward is the number of its tokens."""

    async def arun_episode(self, engine, data):
        episode = Episode(data.token_ids)
        for _ in range(3):
            episode.say(await engine.generate(episode.ids))
            episode.hear([7])
        episode.reward = float(len(episode.ids))
        return episode


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def production(model, workflow=None, config=CONFIG, link=None, group=None):
    policy, tokenizer = model
    made = build_native_engine(
        source=policy, tokenizer=tokenizer, options=StrategyOptions(), device=torch.device("cpu"), group=EngineGroup()
    )
    engine = ColocatedEngine(made, tokenizer)
    engine.update_weights([(name, value.detach()) for name, value in policy.named_parameters()], 0)
    limits = EpisodeLimits(max_new_tokens=6, max_turns=3, max_tokens=40)
    strategy, rewards = SimpleNamespace(comm=Comm(), tokenizer=tokenizer, media=None), RewardSet.of(episode_reward)
    collector = EpisodeCollector(strategy, rewards, workflow or ThreeTurns(), seed=0, limits=limits)
    link = link or Store()
    parts = {"prompts": PROMPTS, "rewards": RewardSet.of(episode_reward), "collector": collector}
    return EpisodeProduction(config, link, engine, group or EngineGroup(), **parts), link


def begin(made, begun=()):
    made.begin({"step": 0, "first": 0, "used": [], "begun": begun})


def turn(made, count):
    """As many passes of the loop of run()."""
    for _ in range(count):
        for claim in made._next_order().claims:
            made._start(*claim)
        made._step()


def end(made, link):
    for _ in range(200):
        turn(made, 1)
        made.finish_scoring()
        made._hand_over()
        if link.counts.get("finished") == 2:
            return {number: from_bytes(link.peek(f"group/{number}")) for number in range(2)}
    raise AssertionError("the groups did not end")


def test_an_episode_goes_on_at_the_same_token(model):
    undisturbed, link = production(model)
    begin(undisturbed)
    wanted = end(undisturbed, link)
    stopped, _ = production(model)
    begin(stopped)
    turn(stopped, 9)  # in the second turn
    states = from_bytes(to_bytes(stopped.save()))
    assert any(journal["completions"] and journal["partials"] for state in states for journal in state["journals"])
    again, link = production(model)
    begin(again, [(state["ticket"], state["version"]) for state in states])
    link.counts["claims"] = 2
    for number, state in enumerate(states):
        link.put(f"begun/{number}", to_bytes(state))
    found = end(again, link)
    for number, message in wanted.items():
        one, other = (group_from_state(item["groups"][0], PROMPTS) for item in (message, found[number]))
        assert one.rewards == other.rewards
        for mine, yours in zip(one.samples, other.samples, strict=True):
            assert (mine.response_ids, mine.versions, mine.own) == (yours.response_ids, yours.versions, yours.own)
        assert message["calls"] == found[number]["calls"]
    assert end(stopped, _link_of(stopped))[0]["calls"] == wanted[0]["calls"]  # saving disturbs nothing


def _link_of(made):
    return made._link


@pytest.mark.parametrize(("num_ranks", "size", "expected"), [(4, 1, 2), (4, 2, 4), (16, 1, 1), (1, 1, 6)])
def test_each_engine_has_its_share_of_the_groups_at_once(model, num_ranks, size, expected):
    """8 groups are shared among num_ranks / size engines; a step has 6, which caps the share."""
    config = replace(CONFIG, num_prompts=6, rollout=replace(CONFIG.rollout, max_groups=8, max_staleness=1))
    link = Store()
    link.role = SimpleNamespace(num_rollout=num_ranks)
    made, _ = production(model, config=config, link=link, group=SimpleNamespace(rank=0, size=size))
    assert made._most_groups == expected


class Broken(Workflow):
    async def arun_episode(self, engine, data):
        raise RuntimeError("the tool is on fire")


def test_the_trainer_is_told_why_episodes_failed(model):
    made, link = production(model, Broken())
    begin(made)
    message = end(made, link)[0]
    assert "the tool is on fire" in message["failure"]
    group = group_from_state(message["groups"][0], PROMPTS)
    assert [sample.status.value for sample in group.samples] == ["failed", "failed"]
