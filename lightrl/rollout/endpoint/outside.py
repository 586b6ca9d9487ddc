"""The workflow for programs outside the run: they fetch an episode over HTTP, play it, and post its reward."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from lightrl.records import Prompt
from lightrl.rollout.endpoint import requests
from lightrl.rollout.endpoint.agent import EndpointWorkflow
from lightrl.rollout.endpoint.errors import RequestError

if TYPE_CHECKING:
    from aiohttp import web

_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class _Offer:
    """An episode that is waiting for a program."""

    data: Prompt
    api_key: str
    outcome: asyncio.Future[Any]


class ServeWorkflow(EndpointWorkflow):
    """Offers each episode of the run at POST /v1/episodes, and ends it when its reward arrives."""

    def __init__(self, **options: Any) -> None:
        """Takes the options of Endpoint."""
        super().__init__(**options)
        self._offers: deque[_Offer] = deque()
        self._taken: dict[str, _Offer] = {}
        self.endpoint.routes += [
            ("POST", "/v1/episodes", self._take),
            ("POST", "/v1/episodes/{episode}", self._finish),
        ]

    async def play(self, data: Prompt, *, base_url: str, api_key: str, model: str) -> Any:
        """Offers the episode, and waits for its outcome."""
        offer = _Offer(data, api_key, asyncio.get_running_loop().create_future())
        self._offers.append(offer)
        try:
            return await offer.outcome
        finally:
            self._taken = {name: item for name, item in self._taken.items() if item is not offer}

    async def _take(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web  # noqa: PLC0415  (an extra)

        self.endpoint.check_operator(request)
        deadline = time.monotonic() + self.endpoint.wait_s
        while not (offer := self._next()):
            if time.monotonic() > deadline:
                raise RequestError(
                    f"No episode has begun within {self.endpoint.wait_s:g} s: the policy trains, or others have taken "
                    "all. Try again.",
                    status=503,
                    code="no_episode",
                    retry_s=5,
                )
            await asyncio.sleep(_POLL_S)
        name = uuid.uuid4().hex
        self._taken[name] = offer
        data = offer.data
        return web.json_response(
            {
                "id": name,
                "api_key": offer.api_key,
                "base_url": self.endpoint.base_url,
                "model": self.endpoint.model,
                "prompt": data.text,
                "messages": [dict(message) for message in data.messages],
                "answer": data.answer,
                "fields": dict(data.fields),
            },
            dumps=partial(json.dumps, default=str),  # a column of a Parquet file may hold dates
        )

    def _next(self) -> _Offer | None:
        while self._offers:
            offer = self._offers.popleft()
            if not offer.outcome.done():  # the episode may have run out of time
                return offer
        return None

    async def _finish(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web  # noqa: PLC0415

        self.endpoint.check_operator(request)
        body = requests.parsed_body(await request.read())
        offer = self._taken.get(request.match_info["episode"])
        if offer is None or offer.outcome.done():
            raise RequestError("There is no such episode, or it has ended.", status=404, code="unknown_episode")
        reward = body.get("reward")
        if isinstance(reward, bool) or not isinstance(reward, int | float | None):
            raise RequestError("'reward' must be a number, or null for the run's own reward.", param="reward")
        if body.get("failed"):
            offer.outcome.set_exception(RuntimeError(f"The program outside failed: {str(body['failed'])[:500]}"))
        else:
            offer.outcome.set_result(reward)
        return web.json_response({"status": "ok"})
