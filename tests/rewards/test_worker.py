"""The worker's own end, spoken to over pipes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from reward_samples import (
    answered,
    counting_what_a_program_reads,
    doing_as_told,
    returning_what_is_asked,
)

from lightrl.rewards.messages import packed_for_worker, receive, send


@pytest.fixture
def worker() -> Iterator[tuple[int, int]]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "lightrl.rewards.worker"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as process:
        assert process.stdin
        assert process.stdout
        yield process.stdin.fileno(), process.stdout.fileno()
        process.stdin.close()
        assert process.wait(20) == 0  # the end of its input ends it


def test_it_serves_until_its_input_ends(worker: tuple[int, int]) -> None:
    requests, replies = worker
    send(requests, packed_for_worker(doing_as_told))
    assert not receive(replies, 60).error
    send(requests, (answered("1.5"), 10.0))
    assert receive(replies, 20).value == 1.5
    send(requests, (answered("sleep"), 0.2))
    late = receive(replies, 20)
    assert late.is_stopped
    assert "time.sleep" in late.traceback  # says where it hung
    send(requests, (answered("exit"), 10.0))
    assert receive(replies, 20).error == "SystemExit: 0"
    send(requests, (answered("2"), 10.0))
    assert receive(replies, 20).value == 2.0


def test_it_sends_numbers_as_they_are_and_says_what_is_none(worker: tuple[int, int]) -> None:
    requests, replies = worker
    send(requests, packed_for_worker(returning_what_is_asked))
    assert not receive(replies, 60).error
    for text, value in (
        ("numpy.True_", 1.0),
        ("numpy.float32(0.5)", 0.5),
        ("10 ** 400", 10**400),
        ("None", None),
        ("'1'", "1"),
        ("[1]", "[1]"),
    ):
        send(requests, (answered(text), 10.0))
        reply = receive(replies, 20)
        assert (reply.error, reply.value) == ("", value)
    send(requests, (answered("Unshown()"), 10.0))
    assert receive(replies, 20).error == "RuntimeError: cannot be shown"  # and the process goes on


def test_a_reward_that_cannot_be_loaded_is_told(worker: tuple[int, int]) -> None:
    requests, replies = worker
    send(requests, ("", b"no pickle"))
    assert "UnpicklingError" in receive(replies, 60).error


def test_a_program_that_the_reward_starts_cannot_read_the_requests(worker: tuple[int, int]) -> None:
    requests, replies = worker
    send(requests, packed_for_worker(counting_what_a_program_reads))
    assert not receive(replies, 60).error
    for _ in range(2):
        send(requests, (answered("x"), 10.0))
        assert receive(replies, 20).value == 0.0


def test_it_starts_without_torch() -> None:
    check = "import lightrl.rewards.worker, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)
