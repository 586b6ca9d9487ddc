"""Both ends of a link in threads of one process, over a store and gloo groups as between processes."""

import threading
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore, TCPStore
from torch.testing import assert_close

from lightrl import process_group
from lightrl.comm import RankError
from lightrl.engines.base import SamplingParams
from lightrl.engines.colocated import ColocatedEngine
from lightrl.engines.link import _MOST_BYTES, Link, LinkEngine
from lightrl.engines.weights.fingerprint import fingerprint
from lightrl.roles import Role

CPU = torch.device("cpu")
WEIGHTS = {
    "matrix": torch.arange(6.0).reshape(2, 3),
    "half": torch.tensor([1.5, -2.0, 0.25], dtype=torch.bfloat16),
    "number": torch.tensor(7.0),
    "turned": torch.arange(8.0).reshape(2, 4).t(),
    "strided": torch.arange(8.0)[::5][:1],  # contiguous, since it has one element, but with a stride of 5
}


@pytest.fixture
def make_link(monkeypatch):
    monkeypatch.setattr(process_group, "_meeting", HashStore())

    def make(name, rank, num_rollout=1, timeout_s=20):
        role = Role(name=name, rank=rank, num_trainers=1, num_rollout=num_rollout)
        return Link(role, CPU, timedelta(seconds=timeout_s))

    return make


def together(*functions):
    """Runs the functions at once; returns what they returned, or raises the first error."""
    results, errors = [None] * len(functions), []

    def run(index):
        try:
            results[index] = functions[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]
    return results


def test_weights_commands_and_answers_travel(make_link):
    trainer, *servers = make_link("trainer", 0, 2), make_link("rollout", 0, 2), make_link("rollout", 1, 2)

    def train():
        trainer.meet()
        engine = LinkEngine(trainer, max_model_len=9, vocab_size=5, bucket_bytes=30)  # several buckets
        engine.expected = {name: fingerprint(tensor) for name, tensor in WEIGHTS.items()}
        ColocatedEngine(engine).update_weights(WEIGHTS.items(), 3, expected=engine.expected)
        trainer.post({"do": "think", "of": 1.5})
        answers = trainer.answers()
        trainer.peers.end()
        return answers

    def serve(link):
        link.meet()
        assert link.next_command() == {"do": "weights", "version": 3}
        expected, pairs = link.receive_weights()
        received = {name: tensor.clone() for name, tensor in pairs}
        command = link.next_command()
        link.answer(f"{command} by {link.role.rank}".encode())
        link.peers.end()
        return expected, received

    answers, *received = together(train, *(lambda link=link: serve(link) for link in servers))
    assert answers == [b"{'do': 'think', 'of': 1.5} by 0", b"{'do': 'think', 'of': 1.5} by 1"]
    for expected, tensors in received:
        assert expected == {name: fingerprint(tensor) for name, tensor in WEIGHTS.items()}
        assert list(tensors) == list(WEIGHTS)
        for name, tensor in tensors.items():
            assert_close(tensor, WEIGHTS[name], atol=0, rtol=0)


def test_an_error_of_the_other_role_ends_a_wait_with_its_traceback(make_link):
    trainer, server = make_link("trainer", 0), make_link("rollout", 0)
    server.peers.report(ValueError("the reward is odd"))
    with pytest.raises(RankError, match=r"(?s)rollout rank 0 failed:.*ValueError: the reward is odd"):
        trainer.wait(lambda: False, "samples")
    assert "the reward is odd" in trainer.peers.failure()
    assert server.peers.failure() == ""


def test_a_wait_has_an_end(make_link):
    with pytest.raises(RankError, match="The trainer ranks gave up after 0 s of waiting for samples"):
        make_link("trainer", 0, timeout_s=0).wait(lambda: False, "samples")


def test_values_are_taken_once(make_link):
    trainer, server = make_link("trainer", 0), make_link("rollout", 0)
    server.put("group/3", b"\x00text")
    assert trainer.has("group/3")
    assert trainer.take("group/3") == b"\x00text"
    assert not trainer.has("group/3")
    assert (server.count("started", 2), trainer.count("started"), trainer.count("started", -1)) == (2, 2, 1)


def test_numbers_are_claimed_once_and_below_a_limit(make_link):
    trainer, *servers = make_link("trainer", 0, 2), make_link("rollout", 0, 2), make_link("rollout", 1, 2)
    trainer.put("claims", b"0")

    def claim_all(link):
        claimed = []
        while (number := link.claim("claims", 50)) is not None:
            claimed.append(number)
        return claimed

    claimed = together(*(lambda link=link: claim_all(link) for link in servers))
    assert sorted(claimed[0] + claimed[1]) == list(range(50))
    assert trainer.claimed("claims") == 50


def test_a_trainer_that_is_not_first_only_gathers():
    gathered = []
    engine = LinkEngine(None, max_model_len=9, vocab_size=5, bucket_bytes=1)
    engine.load_weights((gathered.append(item) or item for item in WEIGHTS.items()), 0)
    assert len(gathered) == len(WEIGHTS)
    assert (engine.step(), engine.has_unfinished(), engine.abort(), engine.sleep(1)) == ([], False, [], 0)
    engine.wake("weights")
    engine.close()
    with pytest.raises(RuntimeError, match="a trainer has no engine of its own"):
        engine.submit([1], SamplingParams())


def test_a_value_of_any_size_travels(monkeypatch):
    """torch's TCPStore ends the connection above 8 MiB, unlike the HashStore of the other tests."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ends = []
    for name in ("trainer", "rollout"):
        client = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=20))
        monkeypatch.setattr(process_group, "_meeting", client)
        ends.append(Link(Role(name=name, rank=0, num_trainers=1, num_rollout=1), CPU, timedelta(seconds=20)))
    trainer, rollout = ends
    num_keys = server.num_keys()
    for size in (0, 1, _MOST_BYTES, _MOST_BYTES + 1, 5 * _MOST_BYTES + 3):
        content = torch.arange(size).to(torch.uint8).numpy().tobytes()
        rollout.put("group/7", content)
        trainer.wait(lambda: trainer.has("group/7"), "the value")
        assert trainer.peek("group/7") == content
        assert trainer.take("group/7") == content
        assert server.num_keys() == num_keys  # nothing is left
