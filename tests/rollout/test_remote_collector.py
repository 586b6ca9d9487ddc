import json

import pytest
from remote_groups import PROMPTS, group

from lightrl.comm import Comm
from lightrl.data.sampler import PromptSampler
from lightrl.metrics import Statistics
from lightrl.rollout.remote_collector import RemoteCollector
from lightrl.rollout.sample_messages import to_bytes
from lightrl.rollout.saved_groups import group_state


class ScriptedLink:
    def __init__(self, answers):
        self.posted, self._answers = [], answers

    def require_others(self):
        pass

    def post(self, command):
        self.posted.append(command)

    def answers(self):
        return self._answers


def answer(*groups, **statistics):
    return to_bytes({"groups": [group_state(item) for item in groups], "statistics": statistics})


def test_the_rollout_ranks_make_the_samples_of_the_step():
    link = ScriptedLink(
        [
            answer(group(3, 0, 1.0), group(2, 2, 0.5), failures=("sum", 1.0, 0.0), score=("mean", 1.5, 2.0)),
            answer(group(1, 1, 0.0), failures=("sum", 2.0, 0.0), score=("mean", 0.0, 1.0)),
        ]
    )
    sampler = PromptSampler(4, 3, seed=0)
    sampler.draw(6)
    drawn = sampler.draw(3)
    collector = RemoteCollector(Comm(), link, PROMPTS, sampler)
    prompts = [(position, PROMPTS[index]) for position, index in enumerate(drawn)]
    samples = collector.sample(prompts, step=2, group_size=1, temperature=1.0)
    assert link.posted == [{"do": "rollout", "step": 2, "first": 0, "prompts": drawn}]
    assert [(sample.position, sample.prompt.index) for sample in samples] == [(0, 3), (1, 1), (2, 2)]
    statistics = Statistics()
    assert collector.score(samples, statistics) == [1.0, 0.0, 0.5]
    assert statistics.reduce(Comm()) == {"failures": 3.0, "score": 0.5}
    again = Statistics()
    assert collector.score(samples, again) == [1.0, 0.0, 0.5]
    assert again.reduce(Comm()) == {}  # they were counted


def test_a_further_round_of_a_step_goes_on_where_the_first_ended():
    link = ScriptedLink([answer(group(1, 4, 1.0), group(0, 3, 0.5))])
    sampler = PromptSampler(4, 3, seed=0)
    sampler.draw(3)
    drawn = sampler.draw(2)
    prompts = [(position, PROMPTS[index]) for position, index in enumerate(drawn, start=3)]
    samples = RemoteCollector(Comm(), link, PROMPTS, sampler).sample(prompts, step=2, group_size=1, temperature=1.0)
    assert link.posted == [{"do": "rollout", "step": 2, "first": 3, "prompts": drawn}]
    assert [(sample.position, sample.prompt.index) for sample in samples] == [(3, 0), (4, 1)]


def test_the_rollout_ranks_evaluate():
    link = ScriptedLink([json.dumps({"eval/reward": 0.25}).encode(), b""])
    collector = RemoteCollector(Comm(), link, PROMPTS, PromptSampler(4, 1, seed=0))
    assert collector.evaluate(PROMPTS, temperature=0.0) == {"eval/reward": 0.25}
    assert link.posted == [{"do": "evaluate", "settings": {"temperature": 0.0}}]
    assert collector.evaluate([], temperature=0.0) == {}


def test_there_are_no_greedy_responses():
    with pytest.raises(RuntimeError, match="no greedy responses"):
        RemoteCollector(Comm(), None, PROMPTS, PromptSampler(4, 1, seed=0)).sample_greedily([])
