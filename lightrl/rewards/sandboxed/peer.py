"""Calls between a checker and a program in two processes. Values travel as data, objects as numbers.

The two ends differ. The program's end answers any question. The checker's end allows a program only to call functions
that it was given, and to use objects of classes that the test has defined, without their private names.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import struct
import sys
import threading
from collections.abc import Mapping
from typing import Any

from lightrl.rewards.sandboxed.data import UnknownDataError, pack_data, unpack_data
from lightrl.rewards.sandboxed.errors import describe_error, error_class, error_from, lineage
from lightrl.rewards.sandboxed.remote import OPERATIONS, Remote, number_of

TEST_MODULE, PROGRAM_MODULE = "tests", "solution"
_MAX_BYTES = 16 << 20
_LENGTH = struct.Struct("<I")
_MUTABLE = {("builtins", name) for name in ("list", "dict", "set", "bytearray")} | {("numpy", "ndarray")}
_MUTABLE |= {("collections", name) for name in ("deque", "Counter", "OrderedDict", "defaultdict")}

# What a program may do with the objects that a test passes: those of the test's own classes, iterators, and all others.
_OF_OBJECTS = {"call", "getattr", "setattr", "getitem", "setitem", "len", "iter", "next", "bool", "hash", "eq", "lt"}
_OF_FUNCTIONS, _OF_ITERATORS = {"call", "bool", "hash"}, {"iter", "next", "bool", "hash"}


class Peer:
    """One end of the channel."""

    def __init__(self, reader: int, writer: int, *, names: Mapping[str, Any] | None) -> None:
        self._reader, self._writer = reader, writer
        self._names = names  # of the program; None at the checker's end
        self._own: list[Any] = []  # objects that the other end knows by their number
        self._numbers: dict[int, int] = {}  # by id()
        self._remote: dict[int, Any] = {}
        self._lock = threading.RLock()
        self.output = io.StringIO()  # what the program prints, which the checker's end prints in turn

    # ---- Asking --------------------------------------------------------------------------------------------------

    def ask(self, operation: str, *args: Any, **named: Any) -> Any:
        """Has the other end carry out an operation; returns the result or raises the error."""
        with self._lock:
            self._send({"do": operation, "args": self._pack([*args]), "named": self._pack(named)})
            while "do" in (message := self._receive()):
                self._answer(message)
            for original, changed in zip([*args, *named.values()], message.get("changed", ()), strict=False):
                if changed is not None:
                    _replace_content(original, self._unpack(changed))
            if "error" in message:
                described = message["error"]
                raise error_from(described, self._unpack(described["args"]), operation)
            return self._unpack(message["value"])

    def serve(self) -> None:
        """Answers questions until the other end is gone."""
        while True:
            try:
                message = self._receive()
            except (EOFError, BrokenPipeError):
                return
            self._answer(message)

    def fail(self, error: BaseException) -> None:
        """Answers the next question with an error."""
        self._receive()
        self._send({"error": describe_error(error, _pack_plain)})

    # ---- Answering -----------------------------------------------------------------------------------------------

    def _answer(self, message: Mapping[str, Any]) -> None:
        try:
            args, named = self._unpack(message["args"]), self._unpack(message["named"])
            before = [json.dumps(item) for item in self._contents([*args, *named.values()])]
            reply: dict[str, Any]
            try:
                reply = {"value": self._pack(self._carry_out(message["do"], args, named))}
            except BaseException as error:
                reply = {"error": describe_error(error, _pack_plain)}
            after = self._contents([*args, *named.values()])
            reply["changed"] = [new if json.dumps(new) != old else None for old, new in zip(before, after, strict=True)]
        except (UnknownDataError, LookupError, TypeError, ValueError, RecursionError) as error:
            reply = {"error": describe_error(error, _pack_plain)}
        self._send(reply)

    def _contents(self, values: list[Any]) -> list[Any]:
        """Packs the contents of arguments that a call can change in place."""
        return [self._pack(value) if _is_mutable(value) else None for value in values]

    def _carry_out(self, operation: str, args: list[Any], named: dict[str, Any]) -> Any:
        if self._names is None:
            return self._carry_out_for_the_program(operation, args, named)
        if operation == "names":
            return [name for name in self._names if isinstance(name, str)]
        if operation == "name":
            return self._names[args[0]]
        return OPERATIONS[operation](*args, **named)

    def _carry_out_for_the_program(self, operation: str, args: list[Any], named: dict[str, Any]) -> Any:
        if operation == "readline":
            return _readline()
        target = args[0]
        if operation not in _OF_OBJECTS or not any(target is item for item in self._own):
            raise PermissionError(f"a program cannot use {operation} on this")
        if type(target).__module__ != TEST_MODULE:
            if operation not in (_OF_ITERATORS if hasattr(type(target), "__next__") else _OF_FUNCTIONS):
                raise AttributeError(f"a program cannot use {operation} on this")
        elif operation in ("getattr", "setattr"):
            _check_name(type(target), str(args[1]), is_set=operation == "setattr")
        return OPERATIONS[operation](*args, **named)

    # ---- Values --------------------------------------------------------------------------------------------------

    def _pack(self, value: Any) -> Any:
        return pack_data(value, self._pack_object)

    def _unpack(self, data: Any) -> Any:
        return unpack_data(data, self._unpack_object, allow_functions=self._names is not None)

    def _pack_object(self, value: Any) -> dict[str, Any]:
        if isinstance(value, Remote):
            return {"yours": number_of(value)}
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._own)
            self._own.append(value)
        described: dict[str, Any] = {"mine": number}
        for base in (int, float, str, tuple, list, dict):
            if isinstance(value, base):  # an enumeration or a named tuple: compared by its content
                described["content"] = pack_data(_as_base(value, base), self._pack_object)
        if self._names is not None and isinstance(value, type) and issubclass(value, BaseException):
            described["error"] = lineage(value)
        if self._names is not None and type(value).__name__ == "coroutine":
            described["coroutine"] = True
        return described

    def _unpack_object(self, data: Mapping[str, Any]) -> Any:
        if "yours" in data:
            return self._own[data["yours"]]
        number = data["mine"]
        if type(number) is not int:
            raise UnknownDataError("an object without a number")
        if number not in self._remote:
            if "error" in data and self._names is None:
                self._remote[number] = error_class(data["error"])
            elif "coroutine" in data and self._names is None:
                return self._awaited(number)
            else:
                content = (self._unpack(data["content"]),) if "content" in data else ()
                self._remote[number] = Remote(self.ask, number, content)
        return self._remote[number]

    async def _awaited(self, number: int) -> Any:
        return self.ask("await", Remote(self.ask, number, ()))

    # ---- Channel -------------------------------------------------------------------------------------------------

    def _send(self, message: dict[str, Any]) -> None:
        if self._names is not None:
            message["out"] = self.output.getvalue()[:_MAX_BYTES]
            self.output.seek(0)
            self.output.truncate()
        try:
            payload = json.dumps(message).encode()
        except RecursionError:
            payload = json.dumps({"error": {"lineage": ["RecursionError"], "args": []}}).encode()
        if len(payload) > _MAX_BYTES:
            payload = json.dumps({"error": {"lineage": ["OverflowError"], "args": []}}).encode()
        data = memoryview(_LENGTH.pack(len(payload)) + payload)
        while data:
            data = data[os.write(self._writer, data) :]

    def _receive(self) -> dict[str, Any]:
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > _MAX_BYTES:
            raise EOFError
        message = json.loads(self._read(length))
        if not isinstance(message, dict):
            raise EOFError
        if message.get("out"):
            sys.stdout.write(str(message["out"]))
        return message

    def _read(self, count: int) -> bytes:
        parts = []
        while count:
            part = os.read(self._reader, min(count, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            count -= len(part)
        return b"".join(parts)


class AskedStdin(io.TextIOBase):
    """Standard input of the program: reads what the test has put into its own standard input."""

    def __init__(self, peer: Peer) -> None:
        super().__init__()
        self._peer = peer

    def readline(self, _size: int | None = -1, /) -> str:  # type: ignore[override]
        """Returns the next line, or "" at the end."""
        return str(self._peer.ask("readline"))

    def read(self, _size: int | None = -1, /) -> str:
        """Returns all remaining lines."""
        return "".join(iter(self.readline, ""))


def _readline() -> str:
    if builtins.input is not _INPUT:  # a test has replaced it
        return f"{builtins.input()}\n"
    return sys.stdin.readline()


_INPUT = builtins.input


def _check_name(kind: type, name: str, *, is_set: bool) -> None:
    """Refuses private names, and replacing a method that the test may call later."""
    if name.startswith("_") or (is_set and callable(getattr(kind, name, None))):
        raise AttributeError(name)


def _pack_plain(value: Any) -> Any:
    return pack_data(value, _refuse)


def _refuse(value: Any) -> Any:
    raise UnknownDataError(type(value).__name__)


def _as_base(value: Any, base: Any) -> Any:
    return dict(value.items()) if base is dict else base.__new__(base, value) if base in (int, float) else base(value)


def _is_mutable(value: Any) -> bool:
    kind = type(value)
    return (kind.__module__, kind.__name__) in _MUTABLE


def _replace_content(original: Any, changed: Any) -> None:
    if type(original) is not type(changed):
        return
    if isinstance(original, set | dict):
        original.clear()
        original.update(changed)
    elif type(original).__name__ == "deque":
        original.clear()
        original.extend(changed)
    elif _is_mutable(original):
        original[:] = changed
