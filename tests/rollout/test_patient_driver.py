"""An engine that waits for tools and agents: what finishes first does not depend on how long they take."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence

import pytest
import torch
from made_samples import made_sample

from lightrl.builtin.model import tiny_model
from lightrl.config import WorkflowConfig
from lightrl.engines.base import EngineGroup, SamplingParams
from lightrl.engines.colocated import ColocatedEngine
from lightrl.engines.native.engine import NativeEngine
from lightrl.records import Prompt, Sample
from lightrl.rewards.reward_set import RewardSet, WeightedReward
from lightrl.rewards.scoring import group_reward
from lightrl.rollout.journal import Journal
from lightrl.rollout.patient_driver import PatientDriver, driver_of
from lightrl.rollout.phases import PhasedDriver
from lightrl.rollout.siblings import Siblings

_MADE: list[PhasedDriver] = []
LONG_S = 120.0


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """Closes the event loops of a test's drivers."""
    yield
    while _MADE:
        _MADE.pop().close()


def driver(wait_s: float) -> PhasedDriver:
    torch.manual_seed(0)
    engine = ColocatedEngine(NativeEngine(tiny_model()[0], eos_token_ids=[], device=torch.device("cpu")))
    engine.version = 0
    options = WorkflowConfig(workflow="agent", over_issue=1.0, max_staleness=1, turn_wait_s=wait_s)
    _MADE.append(driver_of(options)(engine, EngineGroup()))
    return _MADE[-1]


async def turns(made: PhasedDriver, length: int, tool_s: float = 0.0) -> str:
    """Two turns of a length, with a tool between them."""
    for turn in range(2):
        await made.generate([1, 5, 6, turn], SamplingParams(max_new_tokens=length, seed=1, ignore_eos=True))
        await asyncio.sleep(tool_s)
    return "ended"


@group_reward
def place(group: Sequence[Sample]) -> list[float]:
    return [float(index) for index in range(len(group))]


def sample_of(index: int) -> Sample:
    return made_sample(prompt=Prompt(index=0, text="1=", token_ids=(3, 13)), sample_index=index, response_ids=(1,))


def begin_both(made: PhasedDriver) -> None:
    made.begin(Journal(0, 0, 0), lambda: turns(made, 60))
    made.begin(Journal(1, 0, 0), lambda: turns(made, 3, tool_s=0.2))


def test_the_engine_waits_for_a_tool() -> None:
    """Without it, the long episode takes all its steps before the other's tool has answered."""
    made = driver(LONG_S)
    begin_both(made)
    made.step(2 * 3)
    assert made.take_ended() == {(1, 0): "ended"}
    assert list(made.under_way) == [(0, 0)]


def test_a_plain_driver_does_not_wait() -> None:
    made = driver(0.0)
    assert type(made) is PhasedDriver
    begin_both(made)
    made.step(2 * 3)
    assert made.take_ended() == {}


def test_what_takes_longer_than_the_limit_is_left_behind_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    made = driver(0.01)
    begin_both(made)
    made.begin(Journal(2, 0, 0), lambda: turns(made, 3, tool_s=0.2))
    with caplog.at_level(logging.WARNING, "lightrl.rollout.patient_driver"):
        made.step(2 * 3)
    assert made.take_ended() == {}
    assert [record.getMessage() for record in caplog.records] == [
        "An episode has been between two turns for more than 0.01 s (--rollout.turn_wait_s). The engine goes on "
        "without it, so that the batches of this run depend on time."
    ]


def test_who_waits_for_siblings_does_not_hold_up_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    made, siblings = driver(20.0), Siblings(2)

    async def plays() -> str:
        await siblings.once("work", lambda: turns(made, 3))
        return "shared"

    async def is_compared(index: int, length: int) -> float:
        await turns(made, length)
        return await compared.reward(sample_of(index))

    compared = Siblings(2, RewardSet([WeightedReward(label="place", weight=1.0, reward=place)]))
    for index in range(2):
        made.begin(Journal(0, index, 0), plays)
        made.begin(Journal(1, index, 0), lambda index=index: is_compared(index, 2 + 2 * index))
    with caplog.at_level(logging.WARNING, "lightrl.rollout.patient_driver"):
        made.step(2 * 4)
    assert made.take_ended() == {(0, 0): "shared", (0, 1): "shared", (1, 0): 0.0, (1, 1): 1.0}
    assert not caplog.records


def test_requests_go_to_the_engine_in_the_order_of_their_episodes() -> None:
    made = driver(LONG_S)
    assert isinstance(made, PatientDriver)
    taken: list[list[int]] = []
    take = made._take_wishes

    async def late(key: int) -> None:
        await asyncio.sleep(0.01 * (3 - key))
        await turns(made, 2)

    for key in range(3):
        made.begin(Journal(key, 0, 0), lambda key=key: late(key))
    made._loop.run_until_complete(made._let_episodes_go_on())
    taken.append([wish.ticket for wish in take()])
    assert taken == [[0, 1, 2]]
