"""Tools of an MCP server, which is started as a separate process and addressed over pipes."""

from __future__ import annotations

import asyncio
import atexit
import logging
import shlex
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitTimeoutError
from contextlib import suppress
from typing import Any

from lightrl.imports import import_extra
from lightrl.rollout.tool_calls import Tool, in_daemon_thread

logger = logging.getLogger(__name__)

_START_S = 60.0  # limit for the server to start and to list its tools, on a busy machine
_STOP_S = 5.0
_MOST_PAGES = 1000  # a server that repeats its first page would list tools forever
_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 300.0  # before a further try to start a server; each is twice as long
_PING_S = 5.0  # a server that is busy for longer still runs; one that has ended shows it at once


class McpToolError(Exception):
    """The server reported that a call failed; the message is the server's text."""


def mcp_tools(command: str) -> list[Tool]:
    """Starts a server with a command line and returns its tools; raises ValueError if it does not answer."""
    server = McpServer(command)
    return [_tool(server, described) for described in server.described]


class McpServer:
    """A running server, started again if it ends. Its client's event loop outlives those that episodes run on."""

    def __init__(self, command: str) -> None:
        """Starts the server, which ends when this process does."""
        self._library: Any = import_extra("mcp", extra="mcp", needed_by=f"The MCP server {command!r}")
        self._command = command
        self._restarting = threading.Lock()
        self._lost = ""  # why the server could not be started again
        self._pause_s, self._next_try = _PAUSE_S, 0.0
        self._running: tuple[Any, asyncio.AbstractEventLoop]  # the session with the server, and its loop
        self.described = self._start()
        atexit.register(self.close)

    def _start(self) -> list[Any]:
        """Starts the server and returns the descriptions of its tools."""
        self._loop = asyncio.new_event_loop()
        self._is_over: asyncio.Event | None = None
        started: Future[list[Any]] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(self._loop, started), name=f"mcp {self._command}", daemon=True
        )
        self._thread.start()
        try:
            return started.result(_START_S + _STOP_S)
        except (Exception, WaitTimeoutError) as error:
            cause: BaseException = error
            while nested := getattr(cause, "exceptions", None):  # the client's task groups wrap what went wrong
                cause = nested[0]
            reason = f"{type(cause).__name__}: {cause}".rstrip(": ")
            raise ValueError(
                f"The MCP server {self._command!r} does not answer ({reason}). Give the command that starts it and "
                'lets it speak over stdin and stdout, such as mcp="python my_server.py".'
            ) from error

    def _run(self, loop: asyncio.AbstractEventLoop, started: Future[list[Any]]) -> None:
        try:
            loop.run_until_complete(self._serve(started))
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    async def _serve(self, started: Future[list[Any]]) -> None:
        self._is_over = asyncio.Event()
        try:
            program, *arguments = shlex.split(self._command)
            settings = self._library.StdioServerParameters(command=program, args=arguments)
            async with (
                self._library.stdio_client(settings) as (reader, writer),
                self._library.ClientSession(reader, writer) as session,
            ):
                listed = await asyncio.wait_for(self._greeted(session), _START_S)  # else a silent server stays
                self._running = session, self._loop
                started.set_result(listed)
                await self._is_over.wait()
        except BaseException as error:
            if not started.done():
                started.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    async def _greeted(self, session: Any) -> list[Any]:
        await session.initialize()
        return await self._listed(session)

    async def _listed(self, session: Any) -> list[Any]:
        """Returns the descriptions of all tools, which the server may give page by page."""
        page = await session.list_tools()
        tools = list(page.tools)
        for _ in range(_MOST_PAGES):
            if not (cursor := _either(page, "next_cursor", "nextCursor")):
                return tools
            page = await session.list_tools(params=self._library.types.PaginatedRequestParams(cursor=cursor))
            tools += page.tools  # none on a page whose tools the server keeps from this client, for example
        raise ValueError(f"its list of tools does not end; it has given {len(tools)}")

    async def call(self, name: str, arguments: dict[str, Any]) -> str | list[dict[str, Any]]:
        """Returns a tool's result, its text, or parts if it has images; raises McpToolError for the server's errors."""
        session, loop = self._running
        if not loop.is_running():
            await in_daemon_thread(self._revive, {"session": session})
            session, loop = self._running
        try:
            sent = asyncio.run_coroutine_threadsafe(session.call_tool(name, arguments), loop)
            result = await asyncio.wrap_future(sent)
        except Exception:  # the policy reads it; the next call finds a server
            await in_daemon_thread(self._revive, {"session": session})
            raise
        text = "\n".join(part.text for part in result.content if hasattr(part, "text"))
        if _either(result, "is_error", "isError"):
            raise McpToolError(text)
        if not any(part.type == "image" for part in result.content):
            return text
        return [_part(part) for part in result.content if part.type in ("text", "image")]

    def _revive(self, session: Any) -> None:
        """Starts the server again if it has ended, once for all calls that were sent to it.

        After a failed start calls get its error at once, until it is time for the next try.
        """
        with self._restarting:
            if session is not self._running[0] or self._runs():
                return
            if self._lost and time.monotonic() < self._next_try:
                raise McpToolError(self._lost)
            logger.warning("The MCP server %r has ended. It is started again.", self._command)
            self.close()
            try:
                self._start()
            except ValueError as error:
                self._lost, self._next_try = str(error), time.monotonic() + self._pause_s
                self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
                raise McpToolError(self._lost) from error
            self._lost, self._pause_s = "", _PAUSE_S

    def _runs(self) -> bool:
        """Returns whether the server answers, or is only busy."""
        session, loop = self._running
        if not loop.is_running():
            return False
        try:
            asyncio.run_coroutine_threadsafe(session.send_ping(), loop).result(_PING_S)
        except (TimeoutError, WaitTimeoutError):
            return True
        except Exception:  # the library has several for a connection that is gone
            return False
        return True

    def close(self) -> None:
        """Ends the server."""
        if self._is_over is not None and self._thread.is_alive():
            with suppress(RuntimeError):  # the server has ended meanwhile, and closed the loop
                self._loop.call_soon_threadsafe(self._is_over.set)
            self._thread.join(_STOP_S)


def _tool(server: McpServer, described: Any) -> Tool:
    schema = {
        "type": "function",
        "function": {
            "name": described.name,
            "description": described.description or "",
            "parameters": _either(described, "input_schema", "inputSchema"),
        },
    }
    return Tool(name=described.name, schema=schema, function=_caller(server, described.name))


def _part(content: Any) -> dict[str, Any]:
    """Returns a part of a message; the server gives an image in base64."""
    if content.type == "text":
        return {"type": "text", "text": content.text}
    return {"type": "image", "image": {"bytes": content.data}}


def _caller(server: McpServer, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def call(**arguments: Any) -> Any:
        return await server.call(name, arguments)

    return call


def _either(item: Any, *names: str) -> Any:
    """Returns the field under the name that the installed version of the client uses."""
    return next(getattr(item, name) for name in names if hasattr(item, name))
