"""Runs the untrusted program: once as __main__, or loaded to answer the questions of a checker."""

from __future__ import annotations

import atexit
import builtins
import sys
import threading
from types import ModuleType

from lightrl.rewards.sandboxed.peer import PROGRAM_MODULE, AskedStdin, Peer


def run_program(source: str) -> int:
    """Runs the program as __main__ and returns its exit code."""
    try:
        exec(compile(source, "<program>", "exec"), _fresh_module("__main__").__dict__)
    except SystemExit as request:
        if isinstance(request.code, int) or request.code is None:
            return request.code or 0
        sys.stderr.write(f"{request.code}\n")
        return 1
    finally:
        _finish()
    return 0


def _finish() -> None:
    """Runs the last steps of a Python program, because this process ends without them."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()


def serve_program(source: str, reader: int, writer: int) -> int:
    """Loads the program and answers the checker until the checker is gone."""
    module = _fresh_module(PROGRAM_MODULE)
    peer = Peer(reader, writer, names=module.__dict__)
    sys.stdout = peer.output
    sys.stdin = AskedStdin(peer)
    try:
        exec(compile(source, "<response>", "exec"), module.__dict__)
    except BaseException as error:
        peer.fail(error)
        return 1
    peer.serve()
    return 0


def _fresh_module(name: str) -> ModuleType:
    builtins.__dict__.update(exit=sys.exit, quit=sys.exit)  # the module `site` defines them, which is not loaded here
    module = ModuleType(name)
    module.__dict__["__builtins__"] = builtins
    sys.modules[name] = module  # dataclasses, pickle and typing look up the module there
    return module
