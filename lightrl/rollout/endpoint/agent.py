"""The workflow for any program that talks to an OpenAI endpoint: it gets a base_url and a key, and returns a reward."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from lightrl.imports import load_object
from lightrl.records import Prompt
from lightrl.rewards.async_scoring import without_exit
from lightrl.rollout.client import EngineClient
from lightrl.rollout.endpoint.server import ENDPOINT_OPTIONS, Endpoint
from lightrl.rollout.endpoint.session import Session
from lightrl.rollout.episode import Episode
from lightrl.rollout.event_loop import LoopThread
from lightrl.rollout.tool_calls import in_daemon_thread
from lightrl.rollout.workflow import Workflow, check_arguments, check_types

_GIVEN = ("data", "base_url", "api_key", "model")
_MAX_THREADS = 256  # for agents that are plain functions and whose episodes have not ended


class EndpointWorkflow(Workflow):
    """Serves the policy to an agent, which plays an episode by sending requests: play()."""

    def __init__(self, **options: Any) -> None:
        """Takes the options of Endpoint."""
        check_arguments("endpoint", Endpoint, options)
        self.endpoint = Endpoint(**options)

    async def play(self, data: Prompt, *, base_url: str, api_key: str, model: str) -> Any:
        """Plays an episode in the endpoint's loop and returns its outcome: see episodes_of()."""
        raise NotImplementedError

    async def arun_episode(self, engine: EngineClient, data: Prompt) -> list[Episode]:
        """Runs play() alongside the driver; its calls become the episode, and its result the reward."""
        self.endpoint.start()
        assert self.endpoint.loop is not None, "start() sets the loop"
        playing = self._play(engine, data, asyncio.get_running_loop())
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(playing, self.endpoint.loop))

    async def _play(self, engine: EngineClient, data: Prompt, driver_loop: asyncio.AbstractEventLoop) -> list[Episode]:
        key, session = self.endpoint.open(engine, data, driver_loop)
        try:
            playing = self.play(data, base_url=self.endpoint.base_url, api_key=key, model=self.endpoint.model)
            outcome = await without_exit(playing)
        finally:
            self.endpoint.close(key)
        return episodes_of(session, outcome)


class AgentWorkflow(EndpointWorkflow):
    """Runs a user's agent: a function that sends requests to base_url with api_key and returns a reward or None."""

    def __init__(self, *, agent: str, **arguments: Any) -> None:
        """Loads the agent.

        Args:
            agent: package.module:NAME or path/to/file.py:NAME: a function, plain or async, or a class whose objects are
                called like one.
            arguments: Settings of the endpoint; all others are passed to the agent.
        """
        super().__init__(**{name: arguments.pop(name) for name in ENDPOINT_OPTIONS if name in arguments})
        self._agent, self._takes = _loaded_agent(agent, arguments)
        self._threads = asyncio.Semaphore(_MAX_THREADS)
        self._loop = LoopThread("agents")  # an agent that blocks the endpoint's would wait for its own request for ever

    async def play(self, data: Prompt, *, base_url: str, api_key: str, model: str) -> Any:
        """Calls the agent with those of data, base_url, api_key and model that it accepts."""
        given = {"data": data, "base_url": base_url, "api_key": api_key, "model": model}
        arguments = {name: given[name] for name in self._takes}
        if _is_async(self._agent):
            return await self._loop.run(self._agent(**arguments))
        async with self._threads:
            return await in_daemon_thread(self._agent, arguments)


def _loaded_agent(name: str, arguments: Mapping[str, Any]) -> tuple[Callable[..., Any], list[str]]:
    """Returns the agent, and which of the given arguments it accepts; raises ValueError if it cannot be called."""
    found = load_object(name, builtin={}, what="agent", example="my_agent")
    if not callable(found):
        raise ValueError(f"The agent {name!r} is a {type(found).__name__}; it must be a function or a class.")
    if inspect.isclass(found):
        check_arguments(f"agent {name!r}", found, arguments)
        found, arguments = _made(name, found, arguments), {}
    signature = inspect.signature(found)
    parameters = signature.parameters.values()
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    takes = [item for item in _GIVEN if takes_all or item in signature.parameters]
    try:
        signature.bind(**dict.fromkeys(takes), **arguments)
    except TypeError as error:
        raise ValueError(
            f"The agent {name!r} cannot be called: {error}. It is given {', '.join(_GIVEN)} by name, as far as it "
            "takes them, and the further --rollout.workflow_args."
        ) from error
    check_types(signature, arguments)
    if "base_url" not in takes or "api_key" not in takes:
        raise ValueError(f"The agent {name!r} must take base_url and api_key, and call the policy with them.")
    call = getattr(found, "__call__", found)  # noqa: B004
    if any(map(inspect.isgeneratorfunction, (found, call))) or any(map(inspect.isasyncgenfunction, (found, call))):
        raise ValueError(f"The agent {name!r} yields, so that nothing of it runs. It must return the reward or None.")
    return (_with(found, arguments) if arguments else found), takes


def _made(name: str, kind: Any, arguments: Mapping[str, Any]) -> Any:
    try:
        made = kind(**arguments)
    except TypeError as error:
        raise ValueError(f"--rollout.workflow_args: the agent {name!r} cannot be built: {error}.") from error
    if not callable(made):
        raise ValueError(f"The agent {name!r} has no __call__(data, base_url, api_key).")
    return made


def _with(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Callable[..., Any]:
    if _is_async(function):

        async def bound(**given: Any) -> Any:
            return await function(**given, **arguments)

        return bound
    return lambda **given: function(**given, **arguments)


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def episodes_of(session: Session, outcome: Any) -> list[Episode]:
    """Returns the conversations of a session, the first with the reward; raises ValueError if there are none.

    Args:
        session: The session with the recorded calls.
        outcome: A number; None, which leaves the reward to the run; or a mapping with "reward" and numbers to count.
    """
    episodes = session.episodes()
    if not episodes:
        raise ValueError(
            "The agent has ended without a call to the policy. It must call base_url with the api_key that it was "
            "given: calls with another key belong to no episode."
        )
    numbers = dict(outcome) if isinstance(outcome, Mapping) else {"reward": outcome}
    if "reward" not in numbers:
        raise ValueError(
            f"The agent returned a mapping of {', '.join(map(str, numbers)) or 'nothing'} without 'reward'. Add the "
            "reward, or 'reward': None to leave it to --reward."
        )
    reward = numbers.pop("reward")
    main = episodes[0]
    main.reward = None if reward is None else _number("reward", reward)
    main.count("calls", len(session.conversations.calls))
    main.count("branches", len(episodes) - 1)
    for name, amount in numbers.items():
        main.count(name, _number(name, amount))
    return episodes


def _number(name: str, value: Any) -> float:
    """Returns a number of an agent as a float, also one of numpy; raises ValueError for anything else."""
    if not isinstance(value, str | bytes):
        with suppress(TypeError, ValueError):
            return float(value)
    raise ValueError(
        f"The agent returned {name} {str(value)[:80]!r} of type {type(value).__name__}: return a number, None, or a "
        "mapping with 'reward' and numbers to count."
    )
