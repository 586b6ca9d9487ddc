from __future__ import annotations

import fcntl
import os
import threading
import time

import pytest

from lightrl.rewards.messages import Reply, receive, send


def test_messages_of_any_size_arrive_whole() -> None:
    reader, writer = os.pipe()
    sent = [Reply(value=0.5), "x" * 3_000_000, None]
    thread = threading.Thread(target=lambda: [send(writer, message) for message in sent])
    thread.start()
    assert [receive(reader, 20) for _ in sent] == sent
    thread.join()
    os.close(writer)
    with pytest.raises(EOFError):
        receive(reader)
    os.close(reader)


def test_a_silent_or_stuck_sender_is_not_waited_for() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"\x10\0\0")  # a message that is never finished
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        receive(reader, 0.2)
    assert time.monotonic() - started < 5
    os.close(reader)
    with pytest.raises(BrokenPipeError):
        send(writer, "nobody")
    os.close(writer)


def test_a_process_with_many_open_files_receives_messages() -> None:
    reader, writer = os.pipe()
    try:
        high = fcntl.fcntl(reader, fcntl.F_DUPFD, 1024)
    except OSError:
        pytest.skip("this system allows no more than 1024 open files")
    send(writer, "hello")
    assert receive(high, 20) == "hello"
    for end in (reader, writer, high):
        os.close(end)
