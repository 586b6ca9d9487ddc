"""Workflows by name, and the limits of an environment's episode."""

from __future__ import annotations

import ast
import asyncio
import time
from typing import Any

import numpy as np
import pytest
import torch
from test_client import Recorder, client

from lightrl.config import GRPOConfig, WorkflowConfig
from lightrl.data.prompts import build_prompts
from lightrl.records import Prompt
from lightrl.rollout.episode import Episode
from lightrl.rollout.workflow import EnvironmentWorkflow, Workflow, load_workflow

PROMPT = Prompt(index=0, text="1=", token_ids=(3, 13))
HERE = f"{__name__}:"


class Count:
    """Over after `length` turns, each worth 0.25; answers "+"."""

    def __init__(self, *, length: int, opening: str = "") -> None:
        self.length = length
        self.opening = opening

    def reset(self, data: Prompt) -> str:
        assert data is PROMPT
        return self.opening

    def step(self, action: str) -> tuple[str, float, bool]:
        assert action == "3"
        self.length -= 1
        return "+", 0.25, self.length == 0


class Compiled(dict):  # type: ignore[type-arg]
    """Has a constructor whose parameters Python does not know, as classes of compiled modules have."""

    reset, step = Count.reset, Count.step


class NoEnvironment:
    """Has neither reset nor step."""


class WithoutData:
    def reset(self) -> str:
        return ""

    def step(self, action: str) -> tuple[str, float, bool]:
        return "", 0.0, True


class WithInfo(Count):
    def step(self, action: str, info: str) -> tuple[str, float, bool]:  # type: ignore[override]
        return "", 0.0, True


class WithoutEngine(Workflow):
    async def arun_episode(self, data: Prompt) -> Any:  # type: ignore[override]
        raise AssertionError(data)


class Blocking(Workflow):
    def arun_episode(self, engine: Any, data: Any) -> Any:
        return None


class Bonus(Workflow):
    def __init__(self, bonus: float = 0.5, other: Any = None) -> None:
        self.bonus = bonus

    async def arun_episode(self, engine: Any, data: Any) -> Any:
        return None


class Abstract(Workflow):
    """Leaves arun_episode out."""


def play(length: int, opening: str = "", **limits: int) -> Episode:
    workflow = EnvironmentWorkflow(environment=f"{HERE}Count", length=length, opening=opening)
    return asyncio.run(workflow.arun_episode(client(Recorder(), **limits), PROMPT))


def test_an_environment_and_the_policy_take_turns() -> None:
    episode = play(3, opening="=")
    assert episode.prompt_ids == (3, 13)
    assert episode.response_ids == [13, 5, 12, 5, 12, 5]  # "=" heard, then "3" said and "+" heard
    assert episode.turns == [1, 3, 5]
    assert episode.reward == 0.75
    assert episode.turn_rewards == [0.25, 0.25, 0.25]
    assert episode.finish_reason == "stop"  # the environment ended it, though the last turn was cut off


class Begins:
    """An environment whose text is the first thing that the policy reads."""

    def reset(self, data: Prompt) -> str:
        return "2"

    def step(self, action: str) -> tuple[str, float, bool]:
        return "", 1.0, True


@pytest.mark.parametrize(("chat_template", "begun"), [("auto", "+12="), ("never", "12")])
def test_the_first_observation_stands_in_the_users_turn(chat_template: Any, begun: str) -> None:
    """Behind the beginning of the policy's answer the policy would read it as its own words."""
    mine = client(Recorder())
    mine.tokenizer.chat_template = (
        "{% for m in messages %}{{ '+' if m.role == 'user' }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}={% endif %}"
    )
    (data,) = build_prompts(
        [({"prompt": "1"}, "a:1")], mine.tokenizer, max_prompt_tokens=9, chat_template=chat_template
    )
    episode = asyncio.run(EnvironmentWorkflow(environment=f"{HERE}Begins").arun_episode(mine, data))
    assert mine.tokenizer.decode(episode.ids[:-1]) == begun
    assert episode.turns == [len(episode.response_ids) - 1]


def test_the_first_observation_behind_a_message_of_the_system_is_a_users_message() -> None:
    mine = client(Recorder())
    mine.tokenizer.chat_template = "{% for m in messages %}{{ '+' if m.role == 'user' }}{{ m.content }}{% endfor %}="
    records = [({"messages": [{"role": "system", "content": "1"}]}, "a:1")]
    (data,) = build_prompts(records, mine.tokenizer, max_prompt_tokens=9)
    episode = asyncio.run(EnvironmentWorkflow(environment=f"{HERE}Begins").arun_episode(mine, data))
    assert mine.tokenizer.decode(episode.ids[:-1]) == "1+2="


def test_a_message_in_parts_is_left_as_it_is() -> None:
    """Vision-language models read lists of parts, which have no end to add a text to."""
    mine, parts = client(Recorder()), [{"type": "text", "text": "1"}]
    data = Prompt(index=0, text="+1=", token_ids=(12, 3, 13), messages=({"role": "user", "content": parts},))
    episode = asyncio.run(EnvironmentWorkflow(environment=f"{HERE}Begins").arun_episode(mine, data))
    assert episode.ids[:-1] == (12, 3, 13, *mine.encode("2"))


def test_the_number_of_turns_is_limited() -> None:
    episode = play(9, max_turns=2)
    assert episode.response_ids == [5, 12, 5]
    assert episode.finish_reason == "length"  # the last turn was cut off
    assert episode.reward == 0.5


def test_the_context_is_limited() -> None:
    # 2 tokens of the prompt, and 2 for each turn with its answer: behind 6 tokens a fourth turn has no room.
    episode = play(9, max_tokens=6)
    assert episode.ids == (3, 13, 5, 12, 5)
    assert episode.finish_reason == "context"


class Closed(Count):
    """Counts how many of its objects are open."""

    num_made = num_open = 0

    def __init__(self, *, length: int) -> None:
        super().__init__(length=length)
        Closed.num_made, Closed.num_open = Closed.num_made + 1, Closed.num_open + 1

    async def close(self) -> None:
        await asyncio.sleep(0)
        Closed.num_open -= 1


def test_each_environment_is_closed_and_so_is_the_one_that_tries_the_arguments() -> None:
    workflow = EnvironmentWorkflow(environment=f"{HERE}Closed", length=1)
    assert (Closed.num_made, Closed.num_open) == (1, 0)
    asyncio.run(workflow.arun_episode(client(Recorder()), PROMPT))
    assert (Closed.num_made, Closed.num_open) == (2, 0)


class Answers(Count):
    """Answers a turn with what it is given."""

    def __init__(self, answer: Any) -> None:
        super().__init__(length=1)
        self.answer = answer

    def step(self, action: str) -> Any:
        return self.answer


async def forgotten() -> str:
    raise AssertionError


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (("", 1.0), r"step\(action\) returned \('', 1.0\). It must return .*: what the policy reads, a number and"),
        (("", "1", True), r"step\(action\) returned \('', '1', True\)"),
        (("", 1.0, {}), r"step\(action\) returned \('', 1.0, \{\}\)"),
        (("", 1.0, "no"), r"step\(action\) returned \('', 1.0, 'no'\)"),
        (("1", 1.0, None), r"step\(action\) returned \('1', 1.0, None\)"),
        (("", torch.ones(2), True), r"step\(action\) returned \('', tensor"),
        ((3, 1.0, False), r"step\(action\) gave the observation 3\. It must be"),
        (
            ("coroutine", 1.0, False),
            "observation <coroutine object forgotten.*: write `await` before the call",
        ),
    ],
)
def test_what_step_may_not_return_is_told(answer: tuple[Any, ...], text: str) -> None:
    late = forgotten()
    given = (late, *answer[1:]) if answer[0] == "coroutine" else answer
    workflow = EnvironmentWorkflow(environment=f"{HERE}Answers", answer=given)
    with pytest.raises(ValueError, match=text):
        asyncio.run(workflow.arun_episode(client(Recorder()), PROMPT))
    late.close()


class ClosedTooEarly(Count):
    """Cannot be closed before it has been reset."""

    def close(self) -> None:
        raise AttributeError("browser")


def test_an_environment_that_cannot_be_closed_yet_ends_no_start(caplog: pytest.LogCaptureFixture) -> None:
    EnvironmentWorkflow(environment=f"{HERE}ClosedTooEarly", length=1)
    assert "cannot be closed" in caplog.text
    assert "AttributeError: browser" in caplog.text


class Leaks(Count):
    """Fails to close, at the end of an episode that it may have failed before."""

    def close(self) -> None:
        raise OSError("still in use")


def test_an_error_of_close_is_counted_and_keeps_the_episode(caplog: pytest.LogCaptureFixture) -> None:
    workflow = EnvironmentWorkflow(environment=f"{HERE}Leaks", length=1)
    caplog.clear()
    for _ in range(2):
        episode = asyncio.run(workflow.arun_episode(client(Recorder()), PROMPT))
        assert (episode.reward, episode.numbers) == (0.25, {"close_errors": 1.0})
    assert caplog.text.count("could not be closed") == caplog.text.count("OSError: still in use") == 1


class Blocks(Count):
    """Never closes: it waits in the loop, or outside of it."""

    def close(self) -> Any:
        return asyncio.sleep(600) if self.waits else time.sleep(600)

    waits = False


class Waits(Blocks):
    waits = True


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["Blocks", "Waits"])
def test_close_has_a_time_limit(name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("lightrl.rollout.workflow._CLOSING_S", 0.2)
    workflow = EnvironmentWorkflow(environment=f"{HERE}{name}", length=1)
    assert "cannot be closed" in caplog.text
    for _ in range(2):
        episode = asyncio.run(workflow.arun_episode(client(Recorder()), PROMPT))
        assert (episode.reward, episode.numbers) == (0.25, {"close_errors": 1.0})
    assert caplog.text.count(f"The environment {name} could not be closed within 0.2 s") == 1


def test_an_error_of_close_hides_no_error_of_the_episode() -> None:
    workflow = EnvironmentWorkflow(environment=f"{HERE}Leaks", length=1)
    with pytest.raises(AssertionError):
        asyncio.run(workflow.arun_episode(client(Recorder()), Prompt(index=1, text="1=", token_ids=(3, 13))))


class Gymnasium:
    """Returns what it is told to, by default what environments of gymnasium return."""

    def __init__(self, *, begins: str = "('', {})", steps: str = "('+', 1.0, True, False, {})") -> None:
        self.begins, self.steps = ast.literal_eval(begins), ast.literal_eval(steps)

    def reset(self, data: Prompt) -> Any:
        return self.begins

    def step(self, action: str) -> Any:
        return self.steps


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, r"reset\(data\) gave the observation \('', \{\}\)\. It must be a text, an image of PIL or"),
        ({"begins": "''"}, r"step\(action\) returned .*True, False.* It must return \(observation, reward, whether"),
        ({"begins": "''", "steps": "('+', None, False)"}, r"step\(action\) returned \('\+', None, False\)"),
        ({"begins": "''", "steps": "(5, 1.0, False)"}, r"step\(action\) gave the observation 5"),
    ],
)
def test_what_an_environment_may_not_return_is_told(arguments: dict[str, str], told: str) -> None:
    workflow = EnvironmentWorkflow(environment=f"{HERE}Gymnasium", **arguments)
    with pytest.raises(ValueError, match=told):
        asyncio.run(workflow.arun_episode(client(Recorder()), PROMPT))


class Arrays(Gymnasium):
    """Returns arrays, as environments of gymnasium do that are played by numbers."""

    def __init__(self, *, begins: str = "", steps: str = "[3]") -> None:
        self.begins = np.zeros(ast.literal_eval(begins)) if begins else ""
        self.steps = np.zeros(ast.literal_eval(steps), np.uint8), 1.0, False


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            {"begins": "[4]"},
            r"reset\(data\) gave the observation an array, \[4\] float64\. It must be a text, an image",
        ),
        (
            {"begins": "[2, 2, 3]"},
            r"an array, \[2, 2, 3\] float64\. It must be .* \[height, width, 3\] uint8, or a list",
        ),
        ({"begins": "[1]"}, r"reset\(data\) gave the observation an array, \[1\] float64"),
        ({}, r"step\(action\) gave the observation an array, \[3\] uint8\. It must be"),
        ({"steps": "[3, 2, 2]"}, r"step\(action\) gave the observation an array, \[3, 2, 2\] uint8\. It must be"),
        ({"steps": "[2, 2, 3]"}, "An observation shows an image, and the model takes none"),
    ],
)
def test_an_array_that_is_no_image_is_refused(arguments: dict[str, str], told: str) -> None:
    workflow = EnvironmentWorkflow(environment=f"{HERE}Arrays", **arguments)
    with pytest.raises(ValueError, match=told):
        asyncio.run(workflow.arun_episode(client(Recorder()), PROMPT))


def load(**options: Any) -> Workflow:
    return load_workflow(WorkflowConfig(**options))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"workflow": "enviroment"}, "Unknown workflow 'enviroment'. Did you mean environment"),
        ({"workflow": f"{HERE}Count"}, "is no subclass of lightrl.Workflow"),
        ({"workflow": f"{HERE}Abstract"}, r"does not implement arun_episode\(engine, data\)"),
        ({"workflow": f"{HERE}Blocking"}, "is not async: write `async def arun_episode`"),
        (
            {"workflow": f"{HERE}WithoutEngine"},
            r"WithoutEngine.arun_episode\(data.*\) -> .* cannot be called with \(engine, data\): too",
        ),
        ({"workflow": "environment"}, "missing a required argument: 'environment'"),
        (
            {"workflow": "environment", "workflow_args": (f"environment={HERE}NoEnvironment",)},
            r"has no reset\(data\) and step\(action\)",
        ),
        (
            {"workflow": "environment", "workflow_args": (f"environment={HERE}PROMPT",)},
            "PROMPT' is a Prompt: name a class, or a function that makes its object",
        ),
        (
            {"workflow": "environment", "workflow_args": (f"environment={HERE}WithoutData",)},
            r"environment's WithoutData.reset\(\) -> .* cannot be called with \(data\): too many positional",
        ),
        (
            {"workflow": "environment", "workflow_args": (f"environment={HERE}WithInfo", "length=1")},
            r"WithInfo.step\(action: .* cannot be called with \(action\): missing a required argument: 'info'",
        ),
        ({"workflow": "environment", "workflow_args": ("environment",)}, "it must be name=value"),
        (
            {"workflow": "environment", "workflow_args": (f"environment={HERE}Count", "length=1", "opning=a")},
            "the environment '.*Count' cannot be built: got an unexpected keyword argument 'opning'",
        ),
        (
            {"workflow": "environment", "workflow_args": (f"environment={HERE}Count", "length=one")},
            "length is 'one', and it must be int",
        ),
        (
            {"workflow": f"{HERE}Bonus", "workflow_args": ("bonis=1",)},
            "Bonus' cannot be built: got an unexpected keyword argument 'bonis'",
        ),
        ({"workflow": f"{HERE}Bonus", "workflow_args": ("bonus=much",)}, "bonus is 'much', and it must be float"),
        ({"workflow": f"{HERE}Bonus", "workflow_args": ("bonus=true",)}, "bonus is True, and it must be float"),
        ({"workflow": "tools", "workflow_args": ("tools=calculator", "parser=[json]")}, r"\['json'\], .* be a text\.$"),
        ({"workflow": "tools", "workflow_args": ("tools=[[calculator]]",)}, r"it must be a text or a list of texts\.$"),
        ({"workflow": "tools", "workflow_args": ("tools=calculator", "timeout_s=")}, "timeout_s has no value"),
        ({"workflow": "environment", "workflow_args": ("environment=3",)}, "3, and it must be a text; quotes keep it"),
        ({"workflow": "multi_turn", "workflow_args": ("user=true",)}, "user is True, and it must be a text"),
    ],
)
def test_what_is_no_workflow_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        load(**options)


def test_arguments_of_a_workflow_fit_its_declarations() -> None:
    assert load(workflow=f"{HERE}Bonus", workflow_args=("bonus=2", "other=much")).__dict__ == {"bonus": 2}


def test_texts_may_be_empty_or_several_and_a_users_own_may_be_read_as_numbers() -> None:
    load(workflow="tools", workflow_args=("tools=[calculator]", "mcp=", "parser='json'"))
    load(workflow="multi_turn", workflow_args=("user=null", "feedback='5'"))  # in quotes
    arguments = (f"environment={HERE}Count", "length=1", "opening=7")
    assert load(workflow="environment", workflow_args=arguments)._new_environment().opening == 7  # type: ignore[attr-defined]


def test_arguments_of_a_constructor_without_a_signature_are_its_own() -> None:
    arguments = (f"environment={HERE}Compiled", "length=1")
    assert load(workflow="environment", workflow_args=arguments)._new_environment() == {"length": 1}  # type: ignore[attr-defined]


def test_arguments_without_a_workflow_are_refused() -> None:
    with pytest.raises(ValueError, match="--rollout.max_turns does nothing without --rollout.workflow"):
        GRPOConfig(rollout=WorkflowConfig(max_turns=3))
