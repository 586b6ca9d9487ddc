"""The workflow for environments of the package verifiers, which run unmodified against the endpoint."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from typing import Any

from lightrl.imports import is_installed
from lightrl.records import Prompt
from lightrl.rollout.endpoint.agent import EndpointWorkflow
from lightrl.rollout.endpoint.server import ENDPOINT_OPTIONS

_MAX_TASKS = 1_000_000


class VerifiersWorkflow(EndpointWorkflow):
    """Plays a task of a verifiers environment in each episode. The reward is the sum over its traces.

    A record of the data set names its task in the field `task`; without that field, record n plays task n.
    """

    def __init__(self, *, taskset: str, config: dict[str, Any] | None = None, **options: Any) -> None:
        """Loads the environment and its tasks.

        Args:
            taskset: The id of an installed taskset.
            config: The rest of its configuration, as under [env] in verifiers' own files.
            options: The options of Endpoint.
        """
        unknown = sorted(set(options) - set(ENDPOINT_OPTIONS))
        if unknown:
            raise ValueError(
                f"The workflow verifiers takes taskset, config, {', '.join(ENDPOINT_OPTIONS)}, and not "
                f"{', '.join(unknown)}."
            )
        super().__init__(**options)
        self._environment = _environment(taskset, config or {})
        self._tasks = list(itertools.islice(self._environment.taskset, _MAX_TASKS))
        self._serving: tuple[asyncio.Future[None], asyncio.Task[None]] | None = None

    async def play(self, data: Prompt, *, base_url: str, api_key: str, model: str) -> Any:
        """Runs an episode of the environment; if it fails, the episode fails."""
        from verifiers import v1  # noqa: PLC0415  (an extra)
        from verifiers.v1.clients import ModelContext  # noqa: PLC0415

        await self._served()
        client = v1.EvalClientConfig(
            base_url=base_url, api_key_var="LIGHTRL_NO_KEY", headers={"x-api-key": self.endpoint.shared_key}
        )
        episode = await self._environment.run_episode(
            self._task(data),
            ModelContext(model=model, client=client),
            on_trace=lambda trace: self.endpoint.alias(trace.id, api_key),
        )
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors:
            raise RuntimeError(f"The environment failed: {errors[0].type}: {errors[0].message}")
        return float(sum(trace.reward for trace in episode.traces))

    def _task(self, data: Prompt) -> Any:
        index = data.fields.get("task", data.index)
        if not isinstance(index, int) or not 0 <= index < len(self._tasks):
            raise ValueError(f"The environment has {len(self._tasks)} tasks, and the data set asks for task {index!r}.")
        return self._tasks[index]

    async def _served(self) -> None:
        """Starts the environment's shared resources at the first call; they last as long as the run."""
        if self._serving is None:
            ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._serving = ready, asyncio.ensure_future(self._serve(ready))  # the loop itself keeps no task alive
        await asyncio.shield(self._serving[0])

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        try:
            async with self._environment.serving():
                ready.set_result(None)
                await asyncio.Event().wait()
        except (Exception, SystemExit) as error:  # verifiers ends the process if it wants a login
            if not ready.done():
                ready.set_exception(RuntimeError(f"The environment could not be started: {error}"))


def _environment(taskset: str, config: dict[str, Any]) -> Any:
    if not is_installed("verifiers"):
        raise ImportError("The workflow verifiers needs the package: pip install 'lightrl[verifiers]'.")
    from verifiers.v1.utils import loaders  # noqa: PLC0415

    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    named = {**config, "taskset": {**config.get("taskset", {}), "id": taskset}}
    return loaders.load_environment(loaders.resolve_env_config(named))
