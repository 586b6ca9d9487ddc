"""Episodes on a real strategy and engine: masks, seeds, failures, and the same samples however ranks are used."""

from __future__ import annotations

import asyncio
import json
import socketserver
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from episode_program import LIMITS, collector_of, prompts_of, row, start
from episodes import OneTurn

from lightrl.comm import Comm
from lightrl.config import GRPOConfig, WorkflowConfig
from lightrl.engines.base import SamplingParams
from lightrl.metrics import Statistics
from lightrl.records import Prompt, Sample, Status
from lightrl.rewards import has_reward
from lightrl.rewards.episode_reward import episode_reward
from lightrl.rewards.reward_set import RewardSet
from lightrl.rewards.scoring import group_reward
from lightrl.rollout.collector import Collector
from lightrl.rollout.driver import EpisodeDriver
from lightrl.rollout.episode import Episode, Turn
from lightrl.rollout.episode_collector import (
    EpisodeCollector,
    EpisodeFailure,
    EpisodeJob,
    _as_episode,
    describe_episodes,
)
from lightrl.rollout.event_loop import run_episodes
from lightrl.rollout.workflow import Workflow, load_workflow
from lightrl.strategy import EngineStatus, StrategyBase
from lightrl.testing import run_spmd

PROGRAMS = Path(__file__).parents[1] / "programs"


@pytest.fixture(scope="module")
def strategy() -> StrategyBase:
    return start(strategy_name="single")


@pytest.fixture(scope="module")
def prompts(strategy: StrategyBase) -> list[tuple[int, Prompt]]:
    return prompts_of(strategy.tokenizer)


def draw(strategy: StrategyBase, prompts: list[tuple[int, Prompt]], **workflow: Any) -> list[Sample]:
    return collector_of(strategy, **workflow).sample(prompts, step=2, group_size=3, temperature=1.0)


def test_one_turn_draws_what_the_plain_collector_draws(
    strategy: StrategyBase, prompts: list[tuple[int, Prompt]]
) -> None:
    plain = Collector(strategy, episode_reward, seed=3, max_new_tokens=LIMITS.max_new_tokens)
    theirs = plain.sample(prompts, step=2, group_size=3, temperature=1.0)
    ours = draw(strategy, prompts, workflow="episodes:OneTurn", workflow_args=())
    assert ours == theirs
    assert strategy.engine is not None
    assert strategy.engine.status is EngineStatus.SLEEPED


def test_a_turn_of_an_evaluation_may_have_a_length_of_its_own(
    strategy: StrategyBase, prompts: list[tuple[int, Prompt]]
) -> None:
    longest = SamplingParams(max_new_tokens=LIMITS.max_new_tokens + 5, min_new_tokens=LIMITS.max_new_tokens + 5)
    rewards = RewardSet.of(lambda sample: 1.0)
    ours = EpisodeCollector(strategy, rewards, OneTurn(), seed=3, limits=LIMITS, evaluation=longest)
    found = ours.evaluate([prompt for _, prompt in prompts], temperature=1.0)
    assert found["eval/response_tokens"] == LIMITS.max_new_tokens + 5


def test_what_was_heard_is_kept_apart_from_what_was_said(
    strategy: StrategyBase, prompts: list[tuple[int, Prompt]]
) -> None:
    for sample in draw(strategy, prompts):
        assert len(sample.response_ids) == len(sample.sampler_logprobs) == len(sample.versions) == len(sample.own)
        assert len(sample.turns) == 3
        assert sample.turns[0] == 0
        heard = [index for index, own in enumerate(sample.own) if not own]
        # two tokens before the second turn and two before the third, the reply that Echo makes of what was said
        assert heard == [sample.turns[1] - 2, sample.turns[1] - 1, sample.turns[2] - 2, sample.turns[2] - 1]
        said = strategy.tokenizer.decode(sample.response_ids[: heard[0]], skip_special_tokens=True)  # type: ignore[union-attr]
        reply = f"{sum(map(ord, said)) % 10}="
        assert strategy.tokenizer.decode(sample.response_ids[heard[0] : heard[1] + 1]) == reply  # type: ignore[union-attr]


def test_a_turn_does_not_depend_on_who_else_runs(strategy: StrategyBase, prompts: list[tuple[int, Prompt]]) -> None:
    everyone = [row(sample) for sample in draw(strategy, prompts)]
    late = draw(strategy, prompts, workflow_args=("environment=episodes:Echo", "max_wait_s=0.03"))
    assert [row(sample) for sample in late] == everyone
    assert [row(sample) for sample in draw(strategy, prompts[3:])] == everyone[9:]
    turns = {tuple(item[2][:4]) for item in everyone}
    assert len(turns) > 10  # 15 samples: they do not repeat each other


def test_tensors_of_another_framework_become_a_sample(
    strategy: StrategyBase, prompts: list[tuple[int, Prompt]]
) -> None:
    for sample in draw(strategy, prompts[:2], workflow="episodes:Tensors", workflow_args=()):
        assert sample.prompt_ids == sample.prompt.token_ids
        assert sample.reward == 0.5
        place = sample.own.index(False)
        assert sample.response_ids[place] == 5
        assert sample.turns == (0, place + 1)
        assert sum(sample.own) == len(sample.response_ids) - 1


def test_a_sample_that_failed_costs_only_itself(
    strategy: StrategyBase, prompts: list[tuple[int, Prompt]], caplog: pytest.LogCaptureFixture
) -> None:
    workflow = load_workflow(WorkflowConfig(workflow="episodes:Moody"))
    collector = EpisodeCollector(strategy, RewardSet.of(episode_reward), workflow, seed=3, limits=LIMITS, timeout_s=0.5)
    samples = collector.sample(prompts[:2], step=0, group_size=5, temperature=1.0)
    completed, filtered, failed = Status.COMPLETED, Status.FILTERED, Status.FAILED
    assert [sample.status for sample in samples] == [completed, filtered, failed, failed, completed] * 2
    statistics = Statistics()
    rewards = collector.score(samples, statistics)
    assert [has_reward(reward) for reward in rewards] == [True, False, False, False, True] * 2
    metrics = statistics.reduce(strategy.comm)
    assert metrics["episode/failed"] == 4
    assert metrics["episode/failed_share"] == pytest.approx(0.4)  # 4 of 10
    assert metrics["episode/filtered"] == 2
    assert metrics["episode/turns"] == 1.0
    assert metrics["episode/calls"] == 8.0
    assert len(caplog.records) == 1  # the first failure, once
    assert "the tool is on fire" in caplog.text


def test_a_sample_that_failed_has_no_length_in_an_evaluation(
    strategy: StrategyBase, prompts: list[tuple[int, Prompt]]
) -> None:
    workflow = load_workflow(WorkflowConfig(workflow="episodes:Moody"))
    longest = SamplingParams(max_new_tokens=LIMITS.max_new_tokens, min_new_tokens=LIMITS.max_new_tokens)
    collector = EpisodeCollector(
        strategy, RewardSet.of(episode_reward), workflow, seed=3, limits=LIMITS, timeout_s=0.5, evaluation=longest
    )
    found = collector.evaluate([prompts[0][1]], temperature=1.0, n=5)
    assert found["eval/episode/failed_share"] == pytest.approx(0.4)
    assert found["eval/response_tokens"] == LIMITS.max_new_tokens


def test_the_share_of_failed_episodes_is_that_of_all_ranks() -> None:
    completed, failed = Status.COMPLETED, Status.FAILED
    statistics = Statistics()
    for statuses, num_turns in (([failed, completed], 5), ([completed, completed, completed], 1)):
        samples: Any = [
            SimpleNamespace(status=status, turns=range(num_turns), numbers={"calls": 1.0}) for status in statuses
        ]
        describe_episodes(samples, statistics)
    found = statistics.reduce(Comm())
    # 1 of 5, where the shares of the ranks are a half and none; turns 5, 1, 1 and 1
    assert (found["episode/failed_share"], found["episode/turns"], found["episode/calls"]) == (0.2, 2.0, 4.0)


class Crowded(OneTurn):
    """Counts the episodes that run at once, and waits for its siblings in each, as a group reward does."""

    running = most = 0

    async def arun_episode(self, engine: Any, data: Prompt) -> Episode:
        self.running += 1
        self.most = max(self.most, self.running)
        made = await super().arun_episode(engine, data)
        made.reward = await engine.reward(made)
        self.running -= 1
        return made


@pytest.mark.parametrize(("max_groups", "most"), [(0, 15), (1, 3), (2, 6), (9, 15)])
def test_only_so_many_groups_of_episodes_run_at_once(
    strategy: StrategyBase, prompts: list[tuple[int, Prompt]], max_groups: int, most: int
) -> None:
    workflow = Crowded()
    rewards = RewardSet.of(group_reward(lambda samples: [float(index) for index, _ in enumerate(samples)]))
    collector = EpisodeCollector(strategy, rewards, workflow, seed=3, limits=LIMITS, max_groups=max_groups)
    samples = collector.sample(prompts, step=2, group_size=3, temperature=1.0)
    assert (len(prompts), workflow.most) == (5, most)
    assert [sample.reward for sample in samples] == [0.0, 1.0, 2.0] * 5
    whole = draw(strategy, prompts, workflow="episodes:OneTurn", workflow_args=())
    assert [sample.response_ids for sample in samples] == [sample.response_ids for sample in whole]


class Waiting(Workflow):
    async def arun_episode(self, engine: Any, data: Prompt) -> None:
        await asyncio.sleep(1 if data.index else 0)
        raise TimeoutError("the tool has gone")


def test_an_episode_that_reaches_its_time_limit_says_so(
    strategy: StrategyBase, prompts: list[tuple[int, Prompt]]
) -> None:
    collector = EpisodeCollector(
        strategy, RewardSet.of(episode_reward), Waiting(), seed=3, limits=LIMITS, timeout_s=0.5
    )

    async def details(prompt: Prompt) -> str:
        made = await collector.play(None, EpisodeJob(0, prompt, 0, 0, SamplingParams(), 1))  # type: ignore[arg-type]
        assert isinstance(made, EpisodeFailure)
        return made.details

    shown = [asyncio.run(details(prompt)) for _, prompt in prompts[:2]]
    assert shown[0].endswith("TimeoutError: the tool has gone\n")
    assert shown[1].endswith("No result after 0.5 s, the time limit (--rollout.episode_timeout_s).\n")


class Late(OneTurn):
    """In sample 0 it goes on after its time, in sample 1 it gives what it has, in sample 2 it waits for a thread."""

    async def arun_episode(self, engine: Any, data: Prompt) -> Episode:
        made = await super().arun_episode(engine, data)
        made.reward = 1.0
        try:
            if engine.sample_index == 2:
                await asyncio.to_thread(time.sleep, 60)
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if engine.sample_index == 2:
                raise
            await asyncio.sleep(0.01 if engine.sample_index else 60)
        return made


def test_an_episode_that_does_not_end_at_its_time_limit_delays_nobody_for_long(
    strategy: StrategyBase,
    prompts: list[tuple[int, Prompt]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("lightrl.rollout.episode_collector._CLOSING_S", 0.5)
    monkeypatch.setattr("lightrl.rollout.event_loop._CLOSING_S", 0.1)
    collector = EpisodeCollector(strategy, RewardSet.of(episode_reward), Late(), seed=3, limits=LIMITS, timeout_s=0.5)
    began = time.monotonic()
    samples = collector.sample(prompts[:1], step=0, group_size=3, temperature=1.0)
    assert time.monotonic() - began < 30
    assert [sample.status for sample in samples] == [Status.FAILED, Status.COMPLETED, Status.FAILED]
    assert "No result after 0.5 s, the time limit (--rollout.episode_timeout_s)." in caplog.text


class KeepsItsConnection(OneTurn):
    """Asks a service in each episode, over a connection that it opens only once, as HTTP clients do."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def arun_episode(self, engine: Any, data: Prompt) -> Episode:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        writer.write(b"a\n")
        assert await reader.readline() == b"a\n"
        return await super().arun_episode(engine, data)


class Echo(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        for line in self.rfile:
            self.wfile.write(line)


def test_a_client_that_a_workflow_keeps_serves_the_episodes_of_every_step(
    strategy: StrategyBase, prompts: list[tuple[int, Prompt]]
) -> None:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads, server.block_on_close = True, False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        workflow = KeepsItsConnection(server.server_address[1])
        collector = EpisodeCollector(strategy, RewardSet.of(episode_reward), workflow, seed=3, limits=LIMITS)
        for step in range(2):
            samples = collector.sample(prompts[:1], step=step, group_size=1, temperature=1.0)
            assert [sample.status for sample in samples] == [Status.COMPLETED]
        server.shutdown()


def test_an_episode_of_training_may_end_while_an_evaluation_has_siblings_at_its_position(
    strategy: StrategyBase, prompts: list[tuple[int, Prompt]]
) -> None:
    class Evaluates(OneTurn):
        async def arun_episode(self, engine: Any, data: Prompt) -> Episode:
            collector._siblings = evaluation
            return Episode(data.token_ids)

    others: Any = object()
    evaluation = {0: others}
    collector = EpisodeCollector(strategy, RewardSet.of(episode_reward), Evaluates(), seed=3, limits=LIMITS)
    training = collector._siblings
    job = EpisodeJob(0, prompts[0][1], 0, 0, SamplingParams(), 1)
    with strategy.serving.session() as engine:
        run_episodes(collector.play(EpisodeDriver(engine, strategy.serving.group), job))
    assert (training, evaluation) == ({}, {0: others})


class Returns(Workflow):
    def __init__(self, given: Any) -> None:
        self.given = given

    async def arun_episode(self, engine: Any, data: Prompt) -> Any:
        return self.given


def rewarded(reward: Any) -> Episode:
    episode = Episode([2])
    episode.reward = reward
    return episode


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (1.0, "arun_episode returned 1.0. It must return an Episode, a list of them, a dict of tensors or None"),
        ((rewarded(1.0), 1.0), "arun_episode returned a tuple of Episode, float. It must return .* set episode.reward"),
        ({"rewards": torch.ones(1)}, "An episode as a dict has no input_ids, loss_mask"),
        (rewarded("1"), "The reward of an episode is the text '1'. It must be a number"),
        ([rewarded(1.0), rewarded([1.0])], r"The reward of an episode is \[1.0\]. It must be a number"),
    ],
)
def test_an_episode_whose_result_is_wrong_fails_with_the_line_of_the_workflow(
    given: Any, told: str, strategy: StrategyBase, prompts: list[tuple[int, Prompt]]
) -> None:
    collector = EpisodeCollector(strategy, RewardSet.of(episode_reward), Returns(given), seed=3, limits=LIMITS)
    line = Returns.arun_episode.__code__.co_firstlineno
    place = rf"Returns.arun_episode returned it, at line {line} of \S*test_episode_collector.py\."
    with pytest.raises(RuntimeError, match=f"(?s)Every episode has failed.*ValueError: {told}.*{place}"):
        collector.sample(prompts[:1], step=0, group_size=1, temperature=1.0)


class Returnless(Workflow):
    """Rejects every episode, as by a `return` that was forgotten; or only the first ones."""

    def __init__(self, num_rejected: int) -> None:
        self.num_left = num_rejected

    async def arun_episode(self, engine: Any, data: Prompt) -> Any:
        self.num_left -= 1
        return Episode(data.token_ids) if self.num_left < 0 else None


@pytest.mark.parametrize(("num_rejected", "warnings"), [(100, 1), (7, 0)])
def test_a_workflow_that_rejects_everything_is_named_once(
    num_rejected: int,
    warnings: int,
    strategy: StrategyBase,
    prompts: list[tuple[int, Prompt]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    rewards = RewardSet.from_config(GRPOConfig(reward=("episode",)))
    collector = EpisodeCollector(strategy, rewards, Returnless(num_rejected), seed=3, limits=LIMITS)
    for step in range(6):
        collector.sample(prompts[:1], step=step, group_size=3, temperature=1.0)
    line = Returnless.arun_episode.__code__.co_firstlineno
    assert [record.message for record in caplog.records] == [
        "The first 8 episodes of this rank were all rejected, because Returnless.arun_episode returned None each time, "
        f"at line {line} of {__file__}. Unless it means to reject them, let it return its Episode."
    ] * warnings


@pytest.mark.parametrize(("label", "warnings"), [("length", 1), ("episode", 0)])
def test_rewards_of_a_workflow_that_nobody_asks_for_are_warned_of_once(
    label: str,
    warnings: int,
    strategy: StrategyBase,
    prompts: list[tuple[int, Prompt]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    workflow = load_workflow(WorkflowConfig(workflow="episodes:Tensors"))
    arguments = ("length.target=5",) if label == "length" else ()
    rewards = RewardSet.from_config(GRPOConfig(reward=(label,), reward_args=arguments))
    collector = EpisodeCollector(strategy, rewards, workflow, seed=3, limits=LIMITS)
    samples = collector.sample(prompts[:1], step=0, group_size=1, temperature=1.0)
    for _ in range(2):
        collector.score(samples)
    assert [record.message for record in caplog.records] == [
        f"The workflow gives its episodes rewards, which --reward {label} does not use. Give --reward episode to learn "
        "from them."
    ] * warnings


def test_an_episode_that_leaves_the_images_of_its_prompt_out_is_refused() -> None:
    prompt = Prompt(index=0, text="", token_ids=(2, 9), images=("a.png",))
    client: Any = SimpleNamespace(has_rewarded=False, placeholder_ids=frozenset((9,)))
    said = {"token_ids": (5,), "logprobs": (0.0,), "versions": (0,), "finish_reason": "stop", "text": "a"}
    kept, rendered, blind = Episode((2, 9)), Episode((7, 2, 9)), Episode((2, 9))
    kept.say(Turn(**said, expanded_ids=(2, 9, 9)))
    rendered.say(Turn(**said, expanded_ids=(7, 2, 9, 9)))
    blind.say(Turn(**said))
    assert _as_episode(kept, client, prompt) is kept
    for episode in (rendered, blind):
        with pytest.raises(ValueError, match=r"begin each of its episodes by Episode\(data.token_ids\)"):
            _as_episode(episode, client, prompt)


@pytest.mark.parametrize(
    ("workflow", "told"),
    [
        ("Broken", "the tool is on fire"),
        ("Leaving", r"it called exit\(0\)"),
        ("Cancelling", "CancelledError"),
        ("CancellingItself", "CancelledError"),
    ],
)
def test_a_workflow_that_always_fails_ends_the_run(
    workflow: str, told: str, strategy: StrategyBase, prompts: list[tuple[int, Prompt]]
) -> None:
    with pytest.raises(RuntimeError, match=rf"(?s)Every episode has failed.*{told}"):
        draw(strategy, prompts, workflow=f"episodes:{workflow}", workflow_args=())
    assert strategy.engine is not None
    assert strategy.engine.status is EngineStatus.SLEEPED


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "group_size"), [(2, 1), (2, 2), (4, 4)])
def test_ranks_make_the_episodes_of_one_process(
    world_size: int, group_size: int, strategy: StrategyBase, prompts: list[tuple[int, Prompt]], tmp_path: Path
) -> None:
    output = tmp_path / "found.json"
    program = PROGRAMS / "episode_program.py"
    shown = run_spmd(program, str(output), str(group_size), "0.02", world_size=world_size, timeout_s=180)
    found = json.loads(output.read_text())
    alone = [json.loads(json.dumps(row(sample))) for sample in draw(strategy, prompts)]
    assert found["samples"] == alone
    assert found["metrics"]["episode/turns"] == 3.0
    # Tools raise and hang on rank 1, which has 2 of the 5 prompts. The first rank of a group runs all of them.
    assert found["metrics"]["tool_errors"] == (4 if group_size == 1 else 0)
    assert shown.count("has raised. The policy reads the error") == (1 if group_size == 1 else 0)
