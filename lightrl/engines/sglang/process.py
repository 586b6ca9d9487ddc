"""An sglang.Engine as a guest in the trainer's process: its changes are undone, and its death raises an error.

SGLang treats the process as its own: it changes the environment, logging and signal handlers, kills the process when a
scheduler ends, and kills all of its children at shutdown. The patches here can go when an Engine can be told that it is
a guest (0.5.23: only the SIGQUIT handler can be given):
https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/entrypoints/engine.py
https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/managers/tokenizer_manager.py
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import importlib
import logging
import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_LOOK_EVERY_S = 1.0  # between checks that the schedulers are alive
_END_TIMEOUT_S = 30.0


def note_death(signum: int, frame: Any) -> None:
    """Does nothing, where SGLang's handler would kill this process: the next call finds the schedulers gone."""


class SGLangProcess:
    """Starts the engine and drives its coroutines on its own event loop, only while a call waits for one."""

    def __init__(self, arguments: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self._signals = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGQUIT)}
        self._is_closed = False
        self._failure: Exception | None = None  # an error of SGLang's own event loop in this process
        with kept_state(environment), _no_orphans():
            from sglang import Engine

            _spare_this_process()
            self.engine = Engine(**arguments, custom_sigquit_handler=note_death)
            atexit.unregister(self.engine.shutdown)  # otherwise it would kill every child of this process
            atexit.register(self.close)
            self._processes = list(self.engine.tokenizer_manager._subprocess_watchdog._processes)
            self._take_signals_back()

    @property
    def manager(self) -> Any:
        """SGLang's tokenizer manager, whose coroutines do everything."""
        return self.engine.tokenizer_manager

    @property
    def max_total_tokens(self) -> int:
        """The number of tokens for which the KV cache has room, over all requests."""
        return int(self.engine._scheduler_init_result.scheduler_infos[0]["max_total_num_tokens"])

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine to its end; raises RuntimeError if the schedulers end first."""
        try:
            self.require_alive()
        except RuntimeError:
            coroutine.close()
            raise
        with _apart_from_other_loops():
            return self.engine.loop.run_until_complete(self._watched(coroutine))  # type: ignore[no-any-return]

    async def _watched(self, coroutine: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(coroutine)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=_LOOK_EVERY_S)
                if not task.done():
                    self.require_alive()
        finally:
            task.cancel()
        return task.result()

    def require_alive(self) -> None:
        """Raises RuntimeError if the engine is closed or one of its processes has ended."""
        if self._is_closed:
            raise RuntimeError("The SGLang engine is closed: make a new one.")
        ended = [process for process in self._processes if not process.is_alive()]
        if ended:
            codes = ", ".join(f"{process.name} with exit code {process.exitcode}" for process in ended)
            raise RuntimeError(
                f"SGLang's processes have ended: {codes}. Their own message stands above; exit code -9 is mostly for "
                "want of memory."
            )
        if self._failure is not None:
            raise RuntimeError(
                f"SGLang could not read an answer of its schedulers: {type(self._failure).__name__}: {self._failure}. "
                "The engine has to be made anew."
            ) from self._failure

    def close(self) -> None:
        """Ends the engine's processes and no other ones."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        manager = self.manager
        manager._subprocess_watchdog.stop()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(_END_TIMEOUT_S)
        # At the end of the program, the loop may already be closed.
        with suppress(RuntimeError), _apart_from_other_loops():
            self.engine.loop.run_until_complete(_cancel_all(self.engine.loop))
        _drop_unsent([self.engine.send_to_rpc, manager.send_to_scheduler, manager.recv_from_detokenizer])
        if manager.mm_processor is not None:
            manager.mm_processor.shutdown()
        if _is_main_thread():
            signal.signal(signal.SIGQUIT, self._signals[signal.SIGQUIT])

    def _take_signals_back(self) -> None:
        """Restores the signal handlers: SGLang's loop would swallow the SIGTERM with which torchrun ends a rank."""
        loop = self.engine.loop
        loop.run_until_complete(self._start_listening())
        if _is_main_thread():
            for number in self._signals:
                loop.remove_signal_handler(number)
            signal.signal(signal.SIGTERM, self._signals[signal.SIGTERM])
            signal.signal(signal.SIGQUIT, note_death)

    async def _start_listening(self) -> None:
        module: Any = importlib.import_module("sglang.srt.managers.tokenizer_manager")
        theirs = module.print_exception_wrapper
        module.print_exception_wrapper = self._noting_failure
        try:
            self.manager.auto_create_handle_loop()
        finally:
            module.print_exception_wrapper = theirs

    async def _noting_failure(self, work: Callable[[], Awaitable[None]]) -> None:
        """Notes an error, where SGLang's wrapper would kill this process; the waiting call raises it."""
        try:
            await work()
        except Exception as error:
            self._failure = error


def _spare_this_process() -> None:
    """Keeps SGLang from killing this process and all of its children when anything goes wrong."""
    for name in ("sglang.srt.entrypoints.engine", "sglang.srt.managers.tokenizer_manager"):
        module: Any = importlib.import_module(name)
        theirs = module.kill_process_tree
        if not hasattr(theirs, "spares_this_process"):  # srt/utils/common.py: kill_process_tree
            module.kill_process_tree = _sparing(theirs)


def _sparing(theirs: Callable[..., None]) -> Callable[..., None]:
    def kill_process_tree(parent_pid: int | None, *args: Any, **options: Any) -> None:
        if parent_pid not in (None, os.getpid()):
            theirs(parent_pid, *args, **options)

    kill_process_tree.spares_this_process = True  # type: ignore[attr-defined]
    return kill_process_tree


def _drop_unsent(sockets: list[Any]) -> None:
    """Closes sockets now; the garbage collector would wait forever for messages to reach dead schedulers."""
    for one in sockets:
        if one is not None:
            one.context.destroy(linger=0)


async def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    tasks = [task for task in asyncio.all_tasks(loop) if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def _apart_from_other_loops() -> Iterator[None]:
    """Hides the caller's running event loop, since asyncio refuses to run one loop inside another."""
    outer = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(outer)


@contextmanager
def kept_state(environment: Mapping[str, str]) -> Iterator[None]:
    """Restores what importing and starting SGLang changes in this process; `environment` applies inside."""
    root, variables = logging.getLogger(), dict(os.environ)
    handlers, level = list(root.handlers), root.level
    start_method = multiprocessing.get_start_method(allow_none=True)
    threshold, draws, torch_draws = gc.get_threshold(), random.getstate(), torch.get_rng_state()
    quiet = logging.getLogger("sglang.srt.entrypoints.engine")
    quiet.addFilter(_is_news)
    _set_environment(environment)
    try:
        yield
    finally:
        quiet.removeFilter(_is_news)
        _set_environment(variables)
        root.handlers[:] = handlers
        root.setLevel(level)
        multiprocessing.set_start_method(start_method, force=True)
        gc.set_threshold(*threshold)
        random.setstate(draws)
        torch.set_rng_state(torch_draws)


@contextmanager
def _no_orphans() -> Iterator[None]:
    """Ends processes that a failed start leaves behind."""
    before = set(multiprocessing.active_children())
    try:
        yield
    except BaseException:
        for process in set(multiprocessing.active_children()) - before:
            process.kill()
        raise


def _set_environment(wanted: Mapping[str, str]) -> None:
    for name in set(os.environ) - set(wanted):
        del os.environ[name]
    os.environ.update(wanted)


def _is_news(record: logging.LogRecord) -> bool:
    return "SIGQUIT handler" not in record.getMessage()  # logged as an error, about the handler that we passed
