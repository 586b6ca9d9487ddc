"""The adapter of OpenEnv's clients: its calls, and the whole way to a real server where the package is installed."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import replace
from datetime import date
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from test_client import Recorder, client

from lightrl.records import Prompt
from lightrl.rollout.openenv import OpenEnvEnvironment
from lightrl.rollout.workflow import EnvironmentWorkflow

PROMPT = Prompt(index=0, text="1=", token_ids=(3, 13), fields={"seed": 4, "other": 1})


class FakeClient:
    """Has the methods of openenv.core.EnvClient that the adapter calls."""

    log: ClassVar[list[Any]] = []

    def __init__(self, *, base_url: str) -> None:
        self.log.append(base_url)

    async def connect(self) -> None:
        self.log.append("connect")

    async def reset(self, **settings: Any) -> Any:
        self.log.append(settings)
        return SimpleNamespace(observation={"text": "+", "n": 0}, reward=None, done=False)

    async def step(self, action: dict[str, str]) -> Any:
        self.log.append(action)
        steps = sum(isinstance(item, dict) and "move" in item for item in self.log)
        return SimpleNamespace(observation={"text": "=", "n": steps}, reward=0.5, done=steps == 2)

    async def disconnect(self) -> None:
        self.log.append("disconnect")


def test_an_episode_is_a_session() -> None:
    FakeClient.log.clear()
    workflow = EnvironmentWorkflow(
        environment="openenv",
        base_url="http://127.0.0.1:8",
        client=f"{__name__}:FakeClient",
        action_field="move",
        observation_field="text",
        reset_fields="seed",
    )
    assert FakeClient.log == []  # nothing is asked of the server before an episode
    episode = asyncio.run(workflow.arun_episode(client(Recorder()), PROMPT))
    assert FakeClient.log == [
        "http://127.0.0.1:8",
        "connect",
        {"seed": 4},
        {"move": "3"},
        {"move": "3"},
        "disconnect",
    ]
    assert episode.response_ids == [12, 5, 13, 5]  # "+" heard, "3" said, "=" heard, "3" said
    assert episode.reward == 1.0


class Connected(FakeClient):
    """Answers the pings of a server, as a client does whose event loop runs."""

    num_answers = 0

    async def connect(self) -> None:
        self.answering = asyncio.ensure_future(self.answer())

    async def answer(self) -> None:
        while True:
            Connected.num_answers += 1
            await asyncio.sleep(0.01)

    async def disconnect(self) -> None:
        self.answering.cancel()


@pytest.mark.timeout(30)
def test_a_connection_is_served_while_the_loop_of_the_episodes_stands_still() -> None:
    async def run() -> None:
        environment = OpenEnvEnvironment(base_url="", client=f"{__name__}:Connected")
        await environment.reset(PROMPT)
        before = Connected.num_answers
        time.sleep(0.5)  # as while the model trains between two turns
        assert Connected.num_answers > before + 5
        await environment.step("3")
        await environment.close()

    asyncio.run(run())


def test_samples_of_a_prompt_play_the_same_episode_unless_its_record_says_otherwise() -> None:
    def settings(*fields: str) -> Any:
        FakeClient.log.clear()
        environment = OpenEnvEnvironment(base_url="", client=f"{__name__}:FakeClient", reset_fields=fields)
        asyncio.run(environment.reset(replace(PROMPT, index=1, answer="4")))
        return FakeClient.log[-1]

    assert settings() == {"seed": 1}  # the prompt's index
    assert settings("seed", "answer") == {"seed": 4, "answer": "4"}
    assert settings("other") == {"seed": 1, "other": 1}
    with pytest.raises(ValueError, match="no field 'sed' for reset_fields. It has answer, seed, other"):
        settings("sed")


class Unseeded(FakeClient):
    """A client of one's own whose environment always begins alike."""

    async def reset(self) -> Any:  # type: ignore[override]
        return await super().reset()


class Levelled(FakeClient):
    """A client of one's own that takes one setting."""

    async def reset(self, level: int = 0) -> Any:  # type: ignore[override]
        return await super().reset(level=level)


def test_a_client_gets_what_its_reset_takes() -> None:
    def settings(kind: str, *fields: str) -> Any:
        FakeClient.log.clear()
        environment = OpenEnvEnvironment(base_url="", client=f"{__name__}:{kind}", reset_fields=fields)
        asyncio.run(environment.reset(replace(PROMPT, fields={"level": 2, "seed": 4})))
        return FakeClient.log[-1]

    assert settings("Unseeded") == {}
    assert settings("Levelled") == {"level": 0}
    assert settings("Levelled", "level") == {"level": 2}
    with pytest.raises(ValueError, match=r"reset\(\) of the client Levelled takes level, and not seed, which reset_f"):
        settings("Levelled", "seed")
    with pytest.raises(ValueError, match="Unseeded takes no arguments, and not level, seed, which reset_fields names"):
        settings("Unseeded", "level", "seed")


def test_the_field_of_an_observation_is_checked_and_may_be_left_out() -> None:
    environment = OpenEnvEnvironment(base_url="", client=f"{__name__}:FakeClient", observation_field="colour")
    with pytest.raises(ValueError, match="no field 'colour'. It has text, n"):
        asyncio.run(environment.reset(PROMPT))
    assert environment._make is FakeClient
    whole = OpenEnvEnvironment(base_url="", client=f"{__name__}:FakeClient")
    assert asyncio.run(whole.reset(PROMPT)) == '{"text": "+", "n": 0}'
    assert whole._text({"text": "\u4e2d"}) == '{"text": "\u4e2d"}'


def test_observations_may_hold_what_json_has_no_type_for() -> None:
    pydantic = pytest.importorskip("pydantic", reason="openenv's observations are pydantic's")

    class Observation(pydantic.BaseModel):
        day: date

    environment = OpenEnvEnvironment(base_url="", client=f"{__name__}:FakeClient")
    assert environment._text(Observation(day=date(2026, 2, 1))) == '{"day": "2026-02-01"}'


def test_a_package_that_is_missing_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openenv", None)
    with pytest.raises(ImportError, match=r'environment=openenv needs openenv: pip install "lightrl\[openenv\]"'):
        OpenEnvEnvironment(base_url="http://127.0.0.1:8")
