"""Calls every collective of lightrl.comm on 2 ranks, and shows how errors travel between 2 or 3."""

import pickle
import sys
import time
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.testing import assert_close

from lightrl.comm import RankComm, RankError, UnknownReductionError, connect, found_world
from lightrl.metrics import Statistics


def expect(error_type, text, function):
    try:
        function()
    except error_type as error:
        assert text in str(error), f"{text!r} not in {error}"
        return error
    raise AssertionError(f"no {error_type.__name__}")


def check_all_reduce(comm):
    rank = comm.rank
    tensor = torch.tensor([1.0, 2.0]) + rank
    before = tensor.clone()
    assert_close(comm.all_reduce(tensor, "sum"), torch.tensor([3.0, 5.0]))  # [1, 2] + [2, 3]
    assert_close(comm.all_reduce(tensor), torch.tensor([1.5, 2.5]))
    assert_close(comm.all_reduce(tensor, "max"), torch.tensor([2.0, 3.0]))
    assert_close(comm.all_reduce(tensor, "min"), torch.tensor([1.0, 2.0]))
    assert_close(tensor, before)
    total = comm.all_reduce(rank + 3, "sum")
    assert total == 7
    assert isinstance(total, int)
    assert comm.all_reduce(0.5 * rank, "mean") == 0.25
    assert comm.all_reduce(torch.tensor(rank), "max").shape == ()  # 0-d
    assert comm.all_reduce(torch.tensor([1.0], dtype=torch.bfloat16), "sum").dtype == torch.bfloat16
    flags = torch.tensor([True, rank == 1, False])
    assert comm.all_reduce(flags, "sum").tolist() == [2, 1, 0]
    assert comm.all_reduce(flags).tolist() == [1.0, 0.5, 0.0]
    assert comm.all_reduce(flags, "max").tolist() == [True, True, False]
    assert comm.all_reduce(flags, "max").dtype == torch.bool
    # Ranks that fill their dict in another order still add like to like.
    data = {"a": rank, "b": {"c": torch.ones(2) * rank}, "d": 1.5}
    data = data if rank == 0 else dict(reversed(data.items()))
    reduced = comm.all_reduce(data, "sum")
    assert reduced["a"] == 1
    assert_close(reduced["b"]["c"], torch.ones(2))
    assert reduced["d"] == 3.0
    assert list(reduced) == list(data)
    # (1 x 10 + 3 x 20) / (1 + 3) = 17.5
    assert comm.all_reduce(10.0 * (rank + 1), "mean", weight=1.0 + 2 * rank) == 17.5
    # Also of a dict: (1 x 1 + 3 x 1) / 4 = 1 and (1 x 0 + 3 x 4) / 4 = 3
    values = {"x": 10.0 * (rank + 1), "y": torch.tensor([1.0, 4.0 * rank])}
    weighted = comm.all_reduce(values, weight=1.0 + 2 * rank)
    assert (weighted["x"], weighted["y"].tolist()) == (17.5, [1.0, 3.0])
    expect(UnknownReductionError, "needs the reduction 'mean'", lambda: comm.all_reduce(1.0, "sum", weight=1.0))
    assert comm.all_reduce(rank) == 0.5  # (0 + 1) / 2
    assert comm.all_reduce({"a": torch.tensor([2 * rank + 1]), "b": torch.tensor([2.5])})["a"].tolist() == [2.0]
    assert not comm.all_reduce(torch.ones(1, requires_grad=True), "sum").requires_grad
    expect(TypeError, "not str", lambda: comm.all_reduce("text"))
    error = expect(ValueError, "Choose one of mean, sum, max, min", lambda: comm.all_reduce(1.0, "average"))
    assert isinstance(error, AssertionError)
    assert isinstance(error, UnknownReductionError)


def check_all_gather(comm):
    rank = comm.rank
    rows = torch.full((3 * rank, 2), float(rank))  # none on rank 0, three on rank 1
    assert_close(comm.all_gather(rows), torch.ones(3, 2))
    assert_close(comm.all_gather(torch.tensor(rank)), torch.tensor([0, 1]))
    assert_close(comm.all_gather(rank + 5), torch.tensor([5, 6]))
    other_order = {"a": torch.tensor([1]), "b": torch.tensor([2])}
    other_order = other_order if rank == 0 else dict(reversed(other_order.items()))
    assert {key: value.tolist() for key, value in comm.all_gather(other_order).items()} == {"a": [1, 1], "b": [2, 2]}
    gathered = comm.all_gather({"x": torch.arange(rank + 1)})
    assert gathered["x"].tolist() == [0, 0, 1]
    assert comm.all_gather(torch.zeros(0, 4)).shape == (0, 4)
    assert not comm.all_gather(torch.ones(1, requires_grad=True)).requires_grad


def check_broadcast_and_groups(comm):
    tensor = torch.tensor([comm.rank])
    comm.broadcast_tensor(tensor, source=1)
    assert tensor.tolist() == [1]
    tensor = torch.tensor([comm.rank])
    comm.broadcast_tensor(tensor)
    assert (tensor.tolist(), comm.broadcast_object(comm.rank)) == ([0], 0)  # of rank 0, if nothing else is said
    assert comm.new_groups(1) is None
    assert comm.all_gather_object(comm.rank, comm.new_groups(2)) == [0, 1]
    alone = [dist.new_group([rank], backend="gloo") for rank in range(2)]
    assert comm.all_gather_object(comm.rank, alone[comm.rank]) == [comm.rank]
    expect(ValueError, "Groups of 3 ranks do not divide a world of 2", lambda: comm.new_groups(3))
    expect(ValueError, "Groups of 0 ranks do not divide", lambda: comm.new_groups(0))


def check_errors_of_collectives(comm):
    """An error that no other rank has caused is left as it is."""
    short = torch.ones(1, dtype=torch.int16)  # a type that Gloo does not take
    assert type(expect(RuntimeError, "Invalid scalar type", lambda: comm.all_reduce(short, "max"))) is RuntimeError


def check_a_group_of_somebody_else(comm):
    """It is used again, and left open."""
    again = connect(torch.device("cpu"), timedelta(seconds=60))
    assert again.all_reduce(again.rank + 1, "sum") == 3
    again.close()
    found_world().close()
    assert dist.is_initialized()  # a reduction over a destroyed group still works
    assert comm.all_reduce(1, "sum") == 2


def check_sizes_of_objects(comm):
    """An object of up to 4,096 bytes costs one collective, and a larger one on any rank two."""
    frame = len(pickle.dumps(bytes(4000))) - 4000
    for sizes, num_collectives in {(0, 0): 1, (1, 4096): 1, (4097, 0): 2, (3, 100_000): 2}.items():
        parts = [rank_byte * (size - frame) for rank_byte, size in zip((b"0", b"1"), sizes, strict=True)]
        before = comm._control._get_sequence_number_for_group()
        assert comm.all_gather_object(parts[comm.rank]) == parts
        assert comm._control._get_sequence_number_for_group() - before == num_collectives, sizes


def check_objects(comm):
    rank = comm.rank
    check_sizes_of_objects(comm)
    assert comm.all_gather_object({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
    assert comm.all_gather_object(torch.tensor([rank]))[1].tolist() == [1]
    assert comm.broadcast_object("from 1" if rank else None, source=1) == "from 1"
    outgoing = [[f"{rank}->0"] * rank, [f"{rank}->1"]]
    assert comm.exchange(outgoing) == (["1->0"] if rank == 0 else ["0->1", "1->1"])
    expect(ValueError, "one list per rank", lambda: comm.exchange([[]]))
    assert comm.any(rank == 1)
    assert not comm.agree(rank == 1)
    assert comm.max_int(rank) == 1


def check_statistics(comm):
    """Sums and counts are reduced apart; a key of one rank only counts; a reduction starts anew."""
    statistics = Statistics()
    statistics.mean("loss", 3.0 + comm.rank, 1 + comm.rank)  # (3 + 4) / (1 + 2)
    statistics.maximum("max", comm.rank)
    statistics.add("sum", 2)
    if comm.rank == 1:
        statistics.mean("only_one", 6, 4)
    numbers = statistics.reduce(comm)
    assert numbers == {"loss": 7 / 3, "max": 1.0, "only_one": 1.5, "sum": 4.0}, numbers
    assert statistics.reduce(comm) == {}


def check_mistake(comm):
    """What a user can correct is one sentence on every rank."""

    def body():
        with comm.phase("data", local=True):
            if comm.rank == 1:
                raise FileNotFoundError("There is no such file.")

    error = expect(FileNotFoundError if comm.rank == 1 else RankError, "There is no such file.", body)
    assert comm.rank == 1 or error.mistake == "rank 1: There is no such file."


def check_local_error(comm):
    def body():
        with comm.phase("reward", local=True):
            if comm.rank == 1:
                raise KeyError("lost in the dictionary")

    if comm.rank == 1:
        expect(KeyError, "lost in the dictionary", body)
    else:
        error = expect(RankError, "rank 1 failed in phase 'reward'", body)
        assert "KeyError: 'lost in the dictionary'" in str(error)
        assert "comm_program.py" in str(error)  # the traceback
        assert error.mistake == ""
    check_mistake(comm)
    check_number_of_a_phase(comm)
    check_late_error(comm)
    check_caught_error(comm)
    assert comm.phase_name == "between two phases"
    comm.barrier()  # and the group still works


def check_caught_error(comm):
    """An error of a phase that is not local explains nothing any more once its rank goes on."""
    with suppress(ZeroDivisionError), comm.phase("learn"):
        if comm.rank == 1:
            raise ZeroDivisionError("a loss that the program does without")
    comm.barrier()
    assert comm.board.errors_now() == {}


def check_number_of_a_phase(comm):
    """Ranks agree on the largest number by the collective that tells of errors."""
    before = comm._control._get_sequence_number_for_group()
    with comm.phase("micro-batches", local=True) as agreed:
        agreed.largest = 3 + comm.rank
    assert agreed.largest == 4
    assert comm._control._get_sequence_number_for_group() - before == 1

    def body():
        with comm.phase("micro-batches", local=True) as agreed:
            agreed.largest = 1 << 40
            if comm.rank == 1:
                raise KeyError("too late")

    expect(KeyError if comm.rank == 1 else RankError, "too late", body)
    without_store = RankComm(control_group=comm._control)  # so no errors
    with without_store.phase("micro-batches", local=True) as agreed:
        agreed.largest = 5 + comm.rank
    assert agreed.largest == 6
    check_spans(comm, ["learn", "failing"])
    check_spans(without_store, ["learn", "failing"])


def check_spans(comm, names):
    """Each phase is a span, also one that fails, and is the phase that this rank is in meanwhile."""
    opened, closed = [], []

    @contextmanager
    def listen(name):
        opened.append(name)
        assert comm.board is None or comm.phase_name == name
        try:
            yield
        finally:
            closed.append(name)

    comm.on_span = listen

    def body():
        with comm.phase("failing", local=True):
            raise KeyError("of both ranks")

    with comm.phase("learn") as agreed:
        assert agreed.largest == 0
    expect(KeyError, "of both ranks", body)
    comm.on_span = nullcontext
    assert opened == closed == names


def check_late_error(comm):
    """After its collectives one rank finds what is wrong, and all of them leave."""

    def body():
        with comm.phase("weight sync", late=LookupError):
            assert comm.max_int(comm.rank) == 1
            if comm.rank == 1:
                raise KeyError("what did not arrive")

    if comm.rank == 1:
        expect(KeyError, "what did not arrive", body)
    else:
        expect(RankError, "rank 1 failed in phase 'weight sync'", body)
    with comm.phase("weight sync", late=LookupError):
        comm.barrier()


def check_timeout(comm):
    """Rank 1 dawdles; rank 0 gives up and says where both were."""
    if comm.rank == 1:
        with comm.phase("generate"):
            time.sleep(6)
        return
    time.sleep(0.5)
    with comm.phase("learn"):
        expect(RankError, "rank 0 gave up in a decision of all ranks during phase 'learn'", comm.barrier)
        expect(RankError, "rank 0 gave up in all_gather_object", lambda: comm.all_gather_object(0))  # and from then on


def check_error_in_a_collective(comm):
    """Rank 1 dies while rank 0 waits for it: rank 0 finds the traceback of rank 1 in the store."""

    def body():
        with comm.phase("learn"):
            if comm.rank == 1:
                raise ZeroDivisionError("the loss")
            comm.barrier()

    if comm.rank == 1:
        expect(ZeroDivisionError, "the loss", body)
        time.sleep(0.2)
        comm.close()
    else:
        error = expect(RankError, "rank 1 failed in phase 'learn'", body)
        assert "ZeroDivisionError: the loss" in str(error)
        assert comm.has_failed_elsewhere()
        assert not comm.board._has("lightrl/error/0")  # rank 0 has made no error itself
        check_what_the_other_still_raises(comm)


def check_what_the_other_still_raises(comm):
    """The error of the rank that left, in its phase, unless this rank has one of its own, which it posts."""

    def body(**when):
        with comm.phase("alone", **when):
            pass

    expect(RankError, "rank 1 failed in phase 'learn'", partial(body, local=True))
    expect(RankError, "rank 1 failed in phase 'learn'", partial(body, late=LookupError))

    def failing():
        with comm.phase("alone", local=True):
            raise KeyError("my own")

    error = expect(KeyError, "my own", failing)
    assert "rank 1 failed" in str(error.__cause__)
    assert comm.board._has("lightrl/error/0")


def check_errors_of_two_of_three(comm):
    def fail(*errors):
        with comm.phase("data", local=True):
            if comm.rank:
                raise errors[comm.rank - 1]

    kinds = {1: ValueError, 2: OSError}
    error = expect(kinds.get(comm.rank, RankError), "", lambda: fail(ValueError("no prompt"), OSError("no file")))
    assert comm.rank or error.mistake == "rank 1: no prompt"
    kinds = {1: ValueError, 2: KeyError}
    error = expect(kinds.get(comm.rank, RankError), "", lambda: fail(ValueError("no prompt"), KeyError("a bug")))
    assert comm.rank or "rank 1, 2 failed in phase 'data'" in str(error)
    assert comm.rank or error.mistake == ""  # a bug is nothing that a user can correct


def check_join_again(comm):
    """The ranks leave and join again; rank 1 is late, so only its old address is in the store when rank 0 looks."""
    for number in range(2):
        comm.barrier()
        comm.board.post_error(ZeroDivisionError("an error of an earlier group"))
        earlier = comm
        earlier.close()
        assert not dist.is_initialized()
        time.sleep(comm.rank / 2)
        comm = connect(torch.device("cpu"), timedelta(seconds=20))
        earlier.close()  # has nothing left to close
        assert dist.is_initialized()
        assert comm.all_reduce(comm.rank + number, "sum") == 1 + 2 * number
        assert not comm.has_failed_elsewhere()
    comm.close()


if __name__ == "__main__":
    which = sys.argv[1]
    comm = connect(torch.device("cpu"), timedelta(seconds=2 if which == "timeout" else 60))
    if which == "timeout":
        check_timeout(comm)
    elif which == "error":
        check_error_in_a_collective(comm)
    elif which == "mistakes":
        check_errors_of_two_of_three(comm)
    elif which == "again":
        check_join_again(comm)
    else:
        for check in (
            check_all_reduce,
            check_all_gather,
            check_broadcast_and_groups,
            check_objects,
            check_statistics,
            check_local_error,
            check_errors_of_collectives,
            check_a_group_of_somebody_else,
        ):
            check(comm)
    if comm.is_main:
        print("all checked")
