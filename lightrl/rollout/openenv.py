"""An environment behind an OpenEnv server: environment=openenv base_url=http://127.0.0.1:8000."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from lightrl.imports import import_extra, load_object
from lightrl.records import Prompt
from lightrl.rollout.event_loop import LoopThread

_CONNECTIONS = LoopThread("openenv")  # servers close a connection whose client does not answer their pings in time


class OpenEnvEnvironment:
    """One session with the server per episode. An action is the policy's text in one field."""

    def __init__(
        self,
        *,
        base_url: str,
        action_field: str = "message",
        observation_field: str = "",
        reset_fields: str | Sequence[str] = (),
        client: str = "",
    ) -> None:
        """Connects at the first reset().

        Args:
            base_url: URL of the server.
            action_field: The field of the environment's action that receives the policy's text.
            observation_field: The field of the observation that the policy reads; empty: the observation as JSON.
            reset_fields: Fields of the prompt's record that are passed to reset(), such as seed. Without a seed of its
                own a prompt has that of its place in the data, so that all its samples play the same episode, if the
                client's reset() takes a seed.
            client: Your own client as package.module:Class or path/to/file.py:Class, a subclass of openenv's EnvClient;
                empty: openenv's client for every environment, which takes actions as dicts.
        """
        self._make = load_object(client, builtin={}, what="client", example="MyEnv") if client else _generic_client()
        self._base_url = base_url
        self._action_field, self._observation_field = action_field, observation_field
        self._reset_fields = (reset_fields,) if isinstance(reset_fields, str) else tuple(reset_fields)
        self._client: Any = None

    async def reset(self, data: Prompt) -> str:
        """Begins a session and returns the first observation."""
        self._client = self._make(base_url=self._base_url)
        await _CONNECTIONS.run(self._client.connect())
        settings = {name: _value_of(name, data) for name in self._reset_fields}
        result = await _CONNECTIONS.run(self._client.reset(**self._taken({"seed": data.index, **settings})))
        return self._text(result.observation)

    async def step(self, action: str) -> tuple[str, float, bool]:
        """Sends the policy's text as an action; returns (observation, reward, whether the episode is over)."""
        result = await _CONNECTIONS.run(self._client.step({self._action_field: action}))
        return self._text(result.observation), float(result.reward or 0.0), bool(result.done)

    async def close(self) -> None:
        """Ends the session."""
        if self._client is not None:
            await _CONNECTIONS.run(self._client.disconnect())

    def _taken(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the settings that the client's reset() takes; raises ValueError if it lacks one of reset_fields."""
        parameters = inspect.signature(self._client.reset).parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return dict(settings)
        if lacking := [name for name in self._reset_fields if name not in parameters]:
            raise ValueError(
                f"reset() of the client {type(self._client).__name__} takes {', '.join(parameters) or 'no arguments'}, "
                f"and not {', '.join(lacking)}, which reset_fields names. Leave that out, or let reset() take it."
            )
        return {name: value for name, value in settings.items() if name in parameters}

    def _text(self, observation: Any) -> str:
        fields = observation if isinstance(observation, Mapping) else observation.model_dump(mode="json")
        if not self._observation_field:
            return json.dumps(fields, ensure_ascii=False)  # as the policy reads it elsewhere
        if self._observation_field not in fields:
            raise ValueError(
                f"The observation has no field {self._observation_field!r}. It has {', '.join(fields)}: name one by "
                "observation_field=..."
            )
        return str(fields[self._observation_field])


def _value_of(name: str, data: Prompt) -> Any:
    values = {"answer": data.answer, **data.fields}
    if name not in values:
        raise ValueError(f"The record has no field {name!r} for reset_fields. It has {', '.join(values)}.")
    return values[name]


def _generic_client() -> Any:
    return import_extra("openenv.core", extra="openenv", needed_by="environment=openenv").GenericEnvClient
