"""Ranks of both roles in threads of one process: who is gone, who has taken leave, and who said what."""

import threading
import time

import pytest
from torch.distributed import HashStore

from lightrl import process_group
from lightrl.engines.peer_watch import PeerWatch
from lightrl.roles import Role

ROLES = [
    Role(name="trainer", rank=0, num_trainers=2, num_rollout=1),
    Role(name="trainer", rank=1, num_trainers=2, num_rollout=1),
    Role(name="rollout", rank=0, num_trainers=2, num_rollout=1),
]


@pytest.fixture
def watches(monkeypatch):
    monkeypatch.setattr(process_group, "_meeting", HashStore())
    found = [PeerWatch(role) for role in ROLES]
    threads = [threading.Thread(target=watch.begin) for watch in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


def test_who_takes_leave_is_not_missed(watches):
    ends = [threading.Thread(target=watch.end) for watch in watches]
    for end in ends:
        end.start()
    for end in ends:
        end.join(20)
    assert [watch.lost for watch in watches] == [[], [], []]
    assert [watch.failure() for watch in watches] == ["", "", ""]


def test_trainers_that_end_without_a_word_are_named(watches):
    trainer, _, rollout = watches
    trainer.lost.append(1)
    assert trainer.failure().startswith("trainer rank 1 is gone: the process has ended and posted no error.")
    rollout.lost.append(0)
    assert rollout.failure().startswith("trainer rank 0 is gone")


def test_what_a_rank_said_says_more_than_that_it_is_gone(watches):
    trainer, second, rollout = watches
    second.report(ValueError("no such file"))
    assert trainer.failure() == ""  # its own world hears of it by its collectives
    trainer.lost.append(1)
    assert trainer.failure().startswith("trainer rank 1 failed:")
    assert "ValueError: no such file" in rollout.failure()


def test_the_end_of_a_process_may_come_after_the_broken_collective(watches):
    trainer = watches[0]
    threading.Timer(0.2, lambda: trainer.lost.append(2)).start()
    assert trainer.failure() == ""
    assert "rollout rank 0 is gone" in trainer.failure_soon()
    started = time.monotonic()
    assert watches[1].failure_soon() == ""
    assert time.monotonic() - started < 10
