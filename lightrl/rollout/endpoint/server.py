"""The HTTP server of a rank, in a thread and an event loop of its own, so that it answers while the policy trains.

A key stands for an episode: a request with that key takes a turn in the episode. Keys are random and never logged.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightrl.config.adapters import POLICY
from lightrl.imports import is_installed
from lightrl.records import Prompt
from lightrl.rollout.client import EngineClient
from lightrl.rollout.endpoint import requests
from lightrl.rollout.endpoint.errors import RequestError, asleep, ended
from lightrl.rollout.endpoint.session import Session, Wish
from lightrl.rollout.event_loop import run_to_its_end
from lightrl.rollout.tool_parsers import parser_named

if TYPE_CHECKING:
    from aiohttp import web

logger = logging.getLogger(__name__)

_KEY_PREFIX = "lightrl-episode-"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_POLL_S = 0.05
_BACKLOG = 4096  # connections that wait to be accepted: agents begin all at once, and their clients wait for seconds
ENDPOINT_OPTIONS = ("model", "host", "port", "api_key_env", "wait_s", "max_body_mb", "tool_parser")

Handler = Callable[["web.Request"], Awaitable["web.StreamResponse"]]


class Endpoint:
    """Serves the policy of this rank through OpenAI chat completions and token requests."""

    def __init__(
        self,
        *,
        model: str = "policy",
        host: str = "127.0.0.1",
        port: int = 0,
        api_key_env: str = "",
        wait_s: float = 600.0,
        max_body_mb: float = 32.0,
        tool_parser: str = "hermes",
    ) -> None:
        """Checks the settings; start() opens the port.

        Args:
            model: Name of the policy in requests.
            host: Address to listen on. Any address but loopback requires a key.
            port: 0 chooses a free port; otherwise the n-th rank of a machine takes port + n.
            api_key_env: Environment variable with the key for requests that belong to no episode.
            wait_s: How long a request waits for a sleeping engine before the client is told to retry.
            max_body_mb: Largest body of a request.
            tool_parser: Notation in which the policy writes tool calls, a name in PARSERS.
        """
        require_aiohttp()
        self.model = model
        self._host, self._port = host, port
        self._key = _key_from(api_key_env)
        if not self._key and host not in _LOOPBACK:
            raise ValueError(
                f"host={host} can be reached from other machines: set api_key_env to the name of an environment "
                "variable that holds a key, or leave host at 127.0.0.1."
            )
        if not 0 <= port < 65536 or not wait_s >= 0 or not 0 < max_body_mb < math.inf:
            raise ValueError(
                f"port={port}, wait_s={wait_s}, max_body_mb={max_body_mb}: a port is from 0 to 65535, wait_s 0 or "
                "more, max_body_mb above 0 and finite."
            )
        self.wait_s = wait_s
        self._parser = parser_named(tool_parser)
        self._max_body = int(max_body_mb * 1e6)
        self._sessions: dict[str, Session] = {}
        self._aliases: dict[str, str] = {}  # keys of episodes, by the X-Session-ID of requests with the shared key
        self.shared_key = secrets.token_urlsafe(24)
        self._newest: Session | None = None
        self._max_model_len: int | None = None
        self._others: tuple[str, ...] = ()  # the engine's adapters besides the policy's, offered as models
        self._has_warned = False
        self._warned_of: set[str] = set()  # fields of requests
        self.routes: list[tuple[str, str, Handler]] = []  # further routes: method, path, handler
        self.loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stop: asyncio.Event | None = None
        self.origin = ""  # http://host:port

    @property
    def base_url(self) -> str:
        """The base_url for an OpenAI client."""
        return f"{self.origin}/v1"

    # ---- Episodes ----------------------------------------------------------------------------------------------

    def open(self, engine: EngineClient, task: Prompt, driver_loop: asyncio.AbstractEventLoop) -> tuple[str, Session]:
        """Begins an episode; returns the key for its calls."""
        key = _KEY_PREFIX + secrets.token_urlsafe(24)
        session = Session(engine, driver_loop, task, wait_s=self.wait_s, parser=self._parser)
        self._sessions[key] = self._newest = session
        self._max_model_len = engine.limits.max_tokens
        self._others = tuple(name for name in engine.adapters if name != POLICY)
        return key, session

    def close(self, key: str) -> None:
        """Ends an episode: its key is refused from now on."""
        self._sessions.pop(key).close()
        self._aliases = {name: other for name, other in self._aliases.items() if other != key}

    def alias(self, name: str, key: str) -> None:
        """Assigns requests with the shared key and this X-Session-ID to an episode."""
        self._aliases[name] = key

    # ---- The thread --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Opens the port if it is not open yet; raises OSError if the port is taken."""
        if self._thread is not None:
            return
        ready: Future[None] = Future()
        thread = threading.Thread(target=lambda: run_to_its_end(self._serve(ready)), name="endpoint", daemon=True)
        thread.start()
        ready.result()
        self._thread = thread  # only now: after an error the next episode tries again

    def stop(self) -> None:
        """Closes the port."""
        if self._thread is None or self.loop is None or self._stop is None:
            return
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout=10)
        self._thread = None

    async def _serve(self, ready: Future[None]) -> None:
        from aiohttp import web  # noqa: PLC0415  (an extra)

        self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=self._max_body, middlewares=[self._as_json])
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name}", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/inference/v1/generate", self._generate)
        for method, path, handler in self.routes:
            app.router.add_route(method, path, handler)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        port = self._port + int(os.environ.get("LOCAL_RANK", "0")) if self._port else 0
        try:
            await web.TCPSite(runner, self._host, port, backlog=_BACKLOG).start()
        except (OSError, OverflowError) as error:  # the latter for a port beyond 65535
            ready.set_exception(OSError(f"The endpoint cannot listen on {self._host}:{port}: {error}"))
            await runner.cleanup()
            return
        shown = f"[{self._host}]" if ":" in self._host else self._host
        self.origin = f"http://{shown}:{runner.addresses[0][1]}"
        ready.set_result(None)
        await self._stop.wait()
        await runner.cleanup()

    # ---- Requests ----------------------------------------------------------------------------------------------

    @property
    def _as_json(self) -> Any:
        from aiohttp import web  # noqa: PLC0415

        @web.middleware
        async def as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
            try:
                return await handler(request)
            except RequestError as error:
                refused = error
            except web.HTTPException as error:
                refused = _of_http(error, self._max_body)
            except Exception:
                logger.exception("The endpoint could not answer %s %s", request.method, request.path)
                refused = RequestError("The endpoint has failed; the trainer's log has the traceback.", status=500)
            return web.json_response(refused.body, status=refused.status, headers=refused.headers)

        return as_json

    async def _health(self, request: web.Request) -> web.StreamResponse:
        awake = self._newest is not None and self._newest.is_awake
        return _json({"status": "ok", "engine": "awake" if awake else "asleep"})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self.check_key(request)
        if "name" not in request.match_info:
            return _json({"object": "list", "data": [self._card(name) for name in (self.model, *self._others)]})
        name = request.match_info["name"]
        requests.adapter_of({"model": name}, self.model, self._others)
        return _json(self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        described = {"object": "model", "created": 0, "owned_by": "lightrl"}
        return {"id": name, **described, "max_model_len": self._max_model_len}

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.check_key(request)
        body = requests.parsed_body(await request.read())
        adapter = requests.adapter_of(body, self.model, self._others)
        messages, tools, wish = requests.chat_wish(body)
        self._warn_of_unknown(requests.unknown_fields(body))
        session = await self._session_of(request)
        wish = self._allowed(replace(wish, adapter=adapter), body, session)
        replies = await session.chat(messages, tools, wish)
        answer = requests.chat_answer(replies, body, body.get("model", self.model), session.engine.tokenizer)
        if not requests.flag(body, "stream"):
            return _json(answer)
        return await _streamed(request, requests.chat_events(answer, with_usage=requests.wants_usage(body)))

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self.check_key(request)
        body = requests.parsed_body(await request.read())
        adapter = requests.adapter_of(body, self.model, self._others)
        ids, wish = requests.token_wish(body)
        self._warn_of_unknown(requests.unknown_settings(body))
        session = await self._session_of(request)
        replies = await session.complete(ids, self._allowed(replace(wish, adapter=adapter), body, session))
        return _json(requests.token_answer(replies, body, body.get("model", self.model)))

    def _allowed(self, wish: Wish, body: dict[str, Any], session: Session) -> Wish:
        """Returns the wish, restricted to the run's distribution if the turns are trained on."""
        if session.task is None or wish.adapter != POLICY:
            self._warn_of_unknown(requests.ignored_settings(body, wish.temperature))  # which is its own
            return wish
        ignored = requests.ignored_settings(body, session.engine.temperature)
        if ignored and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "An agent asks for %s, which the run ignores. Turns are drawn at the run's --temperature and from the "
                "whole vocabulary, because the trainer's logprobs are of that distribution.",
                ", ".join(ignored),
            )
        return requests.without_temperature(wish)

    def _warn_of_unknown(self, unknown: list[str]) -> None:
        unknown = [text for text in unknown if text.partition("=")[0] not in self._warned_of]
        if not unknown:
            return
        self._warned_of.update(text.partition("=")[0] for text in unknown)
        logger.warning(
            "An agent's requests have fields that the endpoint ignores: %s. Variables of the chat template, such as "
            "enable_thinking, are given by --data.chat_template_args.",
            ", ".join(unknown),
        )

    # ---- Keys --------------------------------------------------------------------------------------------------

    def check_key(self, request: web.Request) -> None:
        """Raises RequestError for an invalid key; each handler calls it first."""
        key = self._key_of(request)
        if key in self._sessions:
            return
        if key.startswith(_KEY_PREFIX):
            raise ended()
        self.check_operator(request)

    def check_operator(self, request: web.Request) -> None:
        """Raises RequestError if the endpoint has a key and the request lacks it."""
        if self._key and not hmac.compare_digest(_as_bytes(self._key_of(request)), self._key.encode()):
            raise RequestError(
                "Incorrect API key. Give the key of an episode, or the one that the endpoint was started with.",
                status=401,
                code="invalid_api_key",
            )

    def _key_of(self, request: web.Request) -> str:
        """Returns the key of a request; x-api-key takes precedence over a key that a client sets by default."""
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        key = request.headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")
        if hmac.compare_digest(_as_bytes(key), self.shared_key.encode()):
            return self._aliases.get(request.headers.get("X-Session-ID", ""), _KEY_PREFIX)
        return key

    async def _session_of(self, request: web.Request) -> Session:
        key = self._key_of(request)
        if key.startswith(_KEY_PREFIX):
            session = self._sessions.get(key)
            if session is None:
                raise ended()
            return session
        deadline = time.monotonic() + self.wait_s
        while self._newest is None or not self._newest.is_awake:
            if time.monotonic() > deadline:
                raise asleep(self.wait_s)
            await asyncio.sleep(_POLL_S)
        return self._newest.for_visitor()


def require_aiohttp() -> None:
    """Raises an ImportError that says how to install the endpoint's requirements, if they are missing."""
    if not is_installed("aiohttp"):
        raise ImportError("The endpoint needs aiohttp: pip install 'lightrl[serve]'.")


def _key_from(variable: str) -> str:
    key = os.environ.get(variable, "") if variable else ""
    if variable and not key:
        raise ValueError(f"api_key_env={variable}: the environment variable {variable} is not set or empty.")
    return key


def _as_bytes(key: str) -> bytes:
    """Returns the bytes of a request's key; those that are not UTF-8 reach the server as lone surrogates."""
    return key.encode(errors="surrogateescape")


def _of_http(error: web.HTTPException, max_body: int) -> RequestError:
    if error.status == 413:
        return RequestError(f"The body is larger than {max_body} bytes.", status=413, code="body_too_large")
    if error.status in (404, 405):
        return RequestError(
            "There is no such route. There are POST /v1/chat/completions, POST /inference/v1/generate, GET /v1/models "
            "and GET /health.",
            status=error.status,
            code="unknown_route",
        )
    return RequestError(error.reason, status=error.status)


def _json(body: dict[str, Any]) -> web.StreamResponse:
    from aiohttp import web  # noqa: PLC0415

    return web.json_response(body)


async def _streamed(request: web.Request, events: list[bytes]) -> web.StreamResponse:
    from aiohttp import web  # noqa: PLC0415

    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    await response.write(b"".join(events))
    await response.write_eof()
    return response
