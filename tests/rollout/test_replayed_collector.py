"""A small engine makes samples under two versions of its weights; the schedule of them makes the same ones again."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from made_samples import made_sample

from lightrl.builtin.model import tiny_model
from lightrl.comm import Comm
from lightrl.config import GRPOConfig, StrategyOptions
from lightrl.engines.base import EngineGroup, SamplingParams
from lightrl.engines.colocated import ColocatedEngine
from lightrl.engines.native.engine import build_native_engine
from lightrl.records import Prompt, ScoredGroup
from lightrl.rollout.production import segments
from lightrl.rollout.recorded_schedule import ScheduleLog, read_schedule
from lightrl.rollout.replayed_collector import ReplayedCollector
from lightrl.seeding import mix_seed

PROMPTS = [Prompt(index=index, text="", token_ids=(index + 3, 5)) for index in range(3)]
CONFIG = GRPOConfig(num_prompts=1, group_size=2, max_new_tokens=6)


def weights(model, version):
    return [(name, parameter.detach() + 0.01 * version) for name, parameter in model.named_parameters()]


@pytest.fixture
def engine():
    model, tokenizer = tiny_model()
    made = build_native_engine(
        source=model, tokenizer=tokenizer, options=StrategyOptions(), device=torch.device("cpu"), group=EngineGroup()
    )
    engine = ColocatedEngine(made, tokenizer)
    engine.update_weights(weights(model, 0), 0)
    return engine, model


def sample_of(position, prompt, completion):
    return made_sample(
        prompt=prompt,
        position=position,
        sample_index=completion.sample_index,
        response_ids=completion.output_token_ids,
        sampler_logprobs=completion.logprobs,
        versions=completion.versions,
        finish_reason=completion.finish_reason,
        ticket=0,
        start_version=0,
    )


def recorded(engine, model):
    """One group, whose samples have tokens of both versions."""
    params = SamplingParams(max_new_tokens=6, n=2, seed=mix_seed(1, CONFIG.seed, 0, 0), ignore_eos=True)
    engine.submit(PROMPTS[0].token_ids, params)
    done = [*engine.step(), *engine.step()]
    engine.update_weights(weights(model, 1), 1)
    while engine.has_unfinished():
        done += engine.step()
    samples = tuple(sample_of(0, PROMPTS[0], item) for item in sorted(done, key=lambda item: item.sample_index))
    return ScoredGroup(samples=samples, rewards=(0.0, 0.0), step=1)


def replayed(engine, folder):
    @contextmanager
    def session():
        yield engine

    strategy = SimpleNamespace(comm=Comm(), serving=SimpleNamespace(session=session))
    collector = SimpleNamespace(
        sample_of=sample_of, score=lambda *_, prefix: [0.5], evaluate=lambda *_, temperature: {}
    )
    return ReplayedCollector(collector, strategy, read_schedule(folder), config=CONFIG, prompts=[PROMPTS[0]])


def test_the_same_tokens_are_made_again(engine, tmp_path):
    engine, model = engine
    group = recorded(engine, model)
    assert any(len(set(sample.versions)) == 2 for sample in group.samples)
    log = ScheduleLog(tmp_path)
    log.append(0, [], [])
    log.append(1, [group], [[[segments(sample.versions, 0)] for sample in group.samples]])
    collector = replayed(engine, tmp_path)
    options = {"group_size": 2, "temperature": 1.0}
    engine.update_weights(weights(model, 0), 0)
    assert collector.sample([], step=0, **options) == []
    engine.update_weights(weights(model, 1), 1)
    samples = collector.sample([], step=1, **options)
    assert [(s.response_ids, s.versions) for s in samples] == [(s.response_ids, s.versions) for s in group.samples]
    assert collector.score(samples) == [0.5]
    assert collector.evaluate(PROMPTS, temperature=1.0) == {}
    with pytest.raises(ValueError, match="The schedule ends after step 2"):
        collector.sample([], step=2, **options)


def test_ranks_make_the_groups_in_turn_whatever_their_tickets():
    schedule = [[SimpleNamespace(ticket=ticket) for ticket in (5, 7, 9)]]
    for rank, expected in enumerate([[(0, 5), (2, 9)], [(1, 7)]]):
        strategy = SimpleNamespace(comm=SimpleNamespace(rank=rank, world=2))
        made = ReplayedCollector(None, strategy, schedule, config=CONFIG, prompts=PROMPTS)
        assert [(position, group.ticket) for position, group in made._batches[0]] == expected


def test_a_sample_without_a_token_is_made_again(engine, tmp_path):
    """An engine cuts a sample before the placeholder of an image; here this is the first token of a sample."""
    engine, model = engine
    engine._placeholder_ids = {recorded(engine, model).samples[0].response_ids[0]}
    engine.update_weights(weights(model, 0), 0)
    group = recorded(engine, model)
    assert group.samples[0].response_ids == ()
    log = ScheduleLog(tmp_path)
    log.append(0, [], [])
    log.append(1, [group], [[[segments(sample.versions, 0)] for sample in group.samples]])
    collector = replayed(engine, tmp_path)
    samples = []
    for step in range(2):
        engine.update_weights(weights(model, step), step)
        samples += collector.sample([], step=step, group_size=2, temperature=1.0)
    assert [(s.response_ids, s.versions) for s in samples] == [(s.response_ids, s.versions) for s in group.samples]


def test_other_weights_are_noticed(engine, tmp_path):
    engine, model = engine
    group = recorded(engine, model)
    log = ScheduleLog(tmp_path)
    log.append(0, [], [])
    log.append(1, [group], [[[segments(sample.versions, 0)] for sample in group.samples]])
    collector = replayed(engine, tmp_path)
    for step in range(2):
        engine.update_weights(weights(model, 60 * step + 90), step)
        if not step:
            collector.sample([], step=step, group_size=2, temperature=1.0)
    with pytest.raises(ValueError, match="Step 2: the samples of ticket 0 are not those of the recorded run"):
        collector.sample([], step=1, group_size=2, temperature=1.0)
