import os

import pytest

from lightrl import process_group
from lightrl.roles import Role, split


@pytest.fixture
def torchrun(monkeypatch):
    """Sets what torchrun sets for one rank; roles are forgotten afterwards."""

    def start(rank, world, **variables):
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
        for name, value in {**names, "TORCHELASTIC_USE_AGENT_STORE": "True", **variables}.items():
            monkeypatch.setenv(name, str(value))

    monkeypatch.setattr(process_group, "_role", "")
    return start


@pytest.mark.parametrize(
    ("rank", "expected", "world"),
    [(0, ("trainer", 0), 3), (2, ("trainer", 2), 3), (3, ("rollout", 0), 2), (4, ("rollout", 1), 2)],
)
def test_the_last_ranks_generate_in_a_world_of_their_own(rank, expected, world, torchrun):
    torchrun(rank, 5)
    role = split(2)
    assert (role.name, role.rank) == expected
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(role.rank), str(world))
    assert os.environ["LOCAL_RANK"] == str(rank)  # it names the GPU
    assert process_group._role == role.name


def test_a_role_knows_the_other():
    role = Role(name="trainer", rank=0, num_trainers=3, num_rollout=2)
    assert (role.is_trainer, role.other, role.place) == (True, "rollout", 0)
    role = Role(name="rollout", rank=1, num_trainers=3, num_rollout=2)
    assert (role.is_trainer, role.other, role.place) == (False, "trainer", 4)
    assert [role.name_of(place) for place in (2, 3)] == ["trainer rank 2", "rollout rank 0"]


@pytest.mark.parametrize(("count", "message"), [(2, "2 of 2 ranks leaves none to train"), (-1, "is -1: it must be 0")])
def test_some_ranks_must_train(count, message, torchrun):
    torchrun(0, 2)
    with pytest.raises(ValueError, match=message):
        split(count)
    assert os.environ["WORLD_SIZE"] == "2"


def test_one_process_cannot_be_split(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="1 of 1 rank leaves none to train. Start more ranks"):
        split(1)


def test_engines_have_whole_groups(torchrun):
    torchrun(0, 4)
    with pytest.raises(ValueError, match="--engine_tp_size 2 does not divide --rollout_ranks 3"):
        split(3, engine_tp_size=2)


def test_somebody_must_keep_the_store(torchrun):
    torchrun(0, 2, TORCHELASTIC_USE_AGENT_STORE="False")
    with pytest.raises(ValueError, match="needs torchrun, which keeps the store"):
        split(1)
