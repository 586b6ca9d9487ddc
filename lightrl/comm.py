"""Comm: ranks and collectives, the same in a world of one, where no process group exists.

Tensors on a GPU go over the data group (NCCL); numbers, objects and decisions over a gloo control group beside it.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from lightrl.process_group import control_group, join
from lightrl.rank_board import RankBoard, describe
from lightrl.stall_watch import StallWatch, is_wanted

T = TypeVar("T")
# Renamed in torch 2.13, where the old name warns at every call.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
OPERATIONS = ("mean", "sum", "max", "min")
_PEER_LOST = (
    "Connection closed",
    "Connection reset",
    "Timed out",
    "timed out",
    "NCCL",
    "Broken pipe",
    "Socket Timeout",
)


class UnknownReductionError(ValueError, AssertionError):
    """An all_reduce operation that does not exist; also an AssertionError for code that expects one."""


MISTAKES = (ValueError, OSError, ImportError, SyntaxError)  # what a user can cause, and correct, before training


class RankError(RuntimeError):
    """Another rank failed; the message holds its traceback."""

    mistake = ""  # the sentence about what a user can correct, if the failure was one of MISTAKES


_current: Comm | None = None
_in_episode: ContextVar[bool] = ContextVar("in_episode", default=False)


def enter_episode() -> None:
    """Makes collectives an error in the rest of this task: an episode runs on one rank alone."""
    _in_episode.set(True)


def _require_no_episode(what: str) -> None:
    if _in_episode.get():
        raise RuntimeError(
            f"An episode has called {what}, which waits for all ranks, while other ranks run other episodes. Within an "
            "episode use the engine's own calls: generate(), reward(), once()."
        )


def current() -> Comm:
    """Returns the world that this process has joined, or a world of one."""
    return _current or Comm()


def known_world() -> int:
    """Returns the number of ranks: of the group that exists, or of the one that torchrun describes."""
    described = os.environ.get("WORLD_SIZE", "1")
    is_joined = dist.is_available() and dist.is_initialized()
    return dist.get_world_size() if is_joined else int(described) if described.isdecimal() else 1


class Comm:
    """The rank of this process, and every collective that lightrl uses outside a model's own."""

    def __init__(
        self,
        *,
        device: torch.device | None = None,
        timeout: timedelta = timedelta(minutes=30),
        control_group: dist.ProcessGroup | None = None,
        store: Store | None = None,
        owns_group: bool = False,
    ) -> None:
        self.device = device or torch.device("cpu")
        self.timeout = timeout
        self.is_distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if self.is_distributed else 0
        self.world = dist.get_world_size() if self.is_distributed else 1
        self._control = control_group
        self._board = RankBoard(store, self.rank, self.world) if store is not None else None
        self._owns_group = owns_group
        self._watch: StallWatch | None = None
        self.failure_of_others: Callable[[], str] | None = None  # what ended a world beside this one, if there is one

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    # ---- phases and errors -------------------------------------------------------------------------------------

    @property
    def phase_name(self) -> str:
        """The innermost phase that this rank is in."""
        return self._board.phase if self._board is not None else "start"

    def phase(self, name: str, *, local: bool = False) -> AbstractContextManager[None]:
        """Names what this rank is doing, so that a time-out or a failure elsewhere can say it.

        In a process of its own it does nothing: an error there needs no help to be seen.

        Args:
            name: what the body does.
            local: the body holds no collective. Then an error on any rank is raised on every rank when the body ends.
                Otherwise the failing rank posts its traceback before it raises, and the others read it there when
                their collective breaks.
        """
        if self._board is None:
            return nullcontext()
        return self._watched_phase(self._board, name, local)

    @contextmanager
    def _watched_phase(self, board: RankBoard, name: str, local: bool) -> Iterator[None]:
        _require_no_episode(f"phase {name!r}")
        board.enter(name)
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        try:
            if local:
                self._raise_everywhere(board, error)
            elif error is not None:
                self._publish_or_explain(board, error)
                raise error
        finally:
            board.leave()

    def _raise_everywhere(self, board: RankBoard, error: Exception | None) -> None:
        try:
            has_failed = self.any(error is not None)
        except RankError as lost:  # another rank never came to the end of the body
            if error is None:
                raise
            board.post_error(error)
            raise error from lost
        if not has_failed:
            return
        text = None if error is None else (describe(error), str(error) if isinstance(error, MISTAKES) else "")
        reports = {rank: report for rank, report in enumerate(self.all_gather_object(text)) if report}
        if error is not None:
            raise error
        failure = RankError(board.describe_errors({rank: report for rank, (report, _) in reports.items()}))
        if all(mistake for _, mistake in reports.values()):
            failure.mistake = f"rank {min(reports)}: {reports[min(reports)][1]}"
        raise failure

    def _publish_or_explain(self, board: RankBoard, error: Exception) -> None:
        """Posts why this rank leaves, or raises with what the others posted if they left first."""
        if isinstance(error, RankError):
            return
        if not _is_lost_peer(error):
            board.post_error(error)
            return
        raise RankError(self._why_lost(board, str(error))) from error

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Adds rank, phase and the others' phases to the error of a collective that broke."""
        _require_no_episode(what)
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, RankError) or not _is_lost_peer(error):
                raise
            limit = f"time-out {self.timeout.total_seconds():.0f} s"
            text = f"rank {self.rank} gave up in {what} during phase {self.phase_name!r} ({limit}): {error}"
            raise RankError(text if self._board is None else self._why_lost(self._board, text)) from error

    def _why_lost(self, board: RankBoard, text: str) -> str:
        """Returns the errors that the others left with; else the text, and what each of them was doing."""
        if self._watch is not None:
            return self._watch.why_lost(text)
        errors = board.errors_of_others()
        return board.describe_errors(errors) if errors else f"{text}\n{board.describe_phases()}"

    def has_failed_elsewhere(self) -> bool:
        """Returns whether another rank has left with an error; no collective."""
        if self.failure_of_others is not None and self.failure_of_others():
            return True
        if self._watch is not None and self._watch.is_reporting:
            return False  # what this rank has to say comes first
        return self._board is not None and bool(self._board.errors_of_others())

    # ---- decisions ---------------------------------------------------------------------------------------------

    def any(self, flag: bool) -> bool:
        """Returns True on every rank if the flag is true on one."""
        return bool(self._reduced_int(int(flag), "max"))

    def agree(self, flag: bool) -> bool:
        """Returns True on every rank if the flag is true on all."""
        return bool(self._reduced_int(int(flag), "min"))

    def max_int(self, value: int) -> int:
        """Returns the largest of all ranks' values on every rank."""
        return self._reduced_int(value, "max")

    def _reduced_int(self, value: int, op: str) -> int:
        if self.world == 1:
            return value
        number = torch.tensor(value, dtype=torch.int64)
        with self._explained("a decision of all ranks"):
            dist.all_reduce(number, op=_reduce_op(op), group=self._control)
        return int(number)

    def barrier(self) -> None:
        """Waits for every rank, on the control group."""
        self._reduced_int(0, "max")

    # ---- tensors, numbers, dicts -------------------------------------------------------------------------------

    def all_reduce(self, data: T, op: str = "mean", weight: float | Tensor | None = None) -> T:
        """Reduces a tensor, a number or a dict of them over the ranks; the input is left as it was.

        One collective per type. weight (op "mean" only) makes it sum(weight x value) / sum(weight). The mean of
        integers is a float.
        """
        if op not in OPERATIONS:
            raise UnknownReductionError(f"Unknown reduction {op!r}. Choose one of {', '.join(OPERATIONS)}.")
        if weight is not None:
            return self._weighted_mean(data, op, weight)
        if isinstance(data, Mapping):
            return cast(T, self._reduce_tree(data, op))
        return data if self.world == 1 and type(data) is float else cast(T, self._reduce_alike([data], op)[0])

    def _weighted_mean(self, data: T, op: str, weight: float | Tensor) -> T:
        if op != "mean":
            raise UnknownReductionError(f"A weight needs the reduction 'mean', not {op!r}.")
        scaled = _map_leaves(lambda leaf: leaf * weight, data)
        total = self.all_reduce({"data": scaled, "weight": weight}, "sum")
        return cast(T, _map_leaves(lambda leaf: leaf / total["weight"], total["data"]))

    def _reduce_tree(self, data: Any, op: str) -> Any:
        leaves = _leaves(data)
        tensors = [_as_tensor(leaf) for leaf in leaves]
        kinds = [(tensor.device.type, str(tensor.dtype)) for tensor in tensors]
        reduced: list[Any] = list(leaves)
        for kind in sorted(set(kinds)):
            same = [i for i, other in enumerate(kinds) if other == kind]
            for i, leaf in zip(same, self._reduce_alike([leaves[i] for i in same], op), strict=True):
                reduced[i] = leaf
        return _rebuild(data, iter(reduced))

    def _reduce_alike(self, leaves: list[Any], op: str) -> list[Any]:
        """Reduces tensors and numbers of one type by one collective."""
        tensors = [_as_tensor(leaf) for leaf in leaves]
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])  # a copy: the input is never written
        if self.world > 1:
            with self._explained("all_reduce"):
                dist.all_reduce(flat, op=_reduce_op("sum" if op == "mean" else op), group=self._group_for(flat))
        parts = zip(leaves, tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True)
        reduced = [part.reshape(old.shape) if isinstance(leaf, Tensor) else part.item() for leaf, old, part in parts]
        return [leaf / self.world for leaf in reduced] if op == "mean" else reduced

    def all_gather(self, data: T) -> T:
        """Concatenates along dim 0 in rank order; only lengths may differ. Numbers become a tensor [world]."""
        if isinstance(data, Mapping):
            gathered_by_key = {key: self.all_gather(data[key]) for key in sorted(data)}
            return cast(T, {key: gathered_by_key[key] for key in data})
        tensor = _as_tensor(data).detach()
        tensor = tensor.reshape(1) if tensor.dim() == 0 else tensor
        if self.world == 1:
            return cast(T, tensor.clone())
        kinds = self.all_gather_object((tensor.dtype, *tensor.shape))
        if len({(kind[0], kind[2:]) for kind in kinds}) > 1:
            raise ValueError(_describe_unequal(kinds))
        lengths = [kind[1] for kind in kinds]
        padded = tensor.new_zeros((max(lengths), *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        gathered = padded.new_empty((self.world * max(lengths), *tensor.shape[1:]))
        with self._explained("all_gather"):
            all_gather_flat(gathered, padded, group=self._group_for(padded))
        chunks = gathered.split(max(lengths)) if max(lengths) else [padded] * self.world
        return cast(T, torch.cat([chunk[:length] for chunk, length in zip(chunks, lengths, strict=True)]))

    def broadcast_tensor(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrites the tensor on every rank with that of the source rank."""
        if self.world > 1:
            with self._explained("broadcast"):
                dist.broadcast(tensor, src=source, group=self._group_for(tensor))

    # ---- objects -----------------------------------------------------------------------------------------------

    def all_gather_object(self, item: T, group: dist.ProcessGroup | None = None) -> list[T]:
        """Returns the items of all ranks (of the group) in rank order; they travel over gloo."""
        if self.world == 1:
            return [item]
        chosen = group or self._control
        items: list[Any] = [None] * dist.get_world_size(chosen)
        with self._explained("all_gather_object"):
            dist.all_gather_object(items, item, group=chosen)
        return items

    def broadcast_object(self, item: T, source: int = 0) -> T:
        """Returns the source rank's item on every rank."""
        if self.world == 1:
            return item
        box: list[Any] = [item if self.rank == source else None]
        with self._explained("broadcast_object"):
            dist.broadcast_object_list(box, src=source, group=self._control)
        return cast(T, box[0])

    def exchange(self, outgoing: Sequence[Sequence[T]]) -> list[T]:
        """Sends outgoing[r] to rank r; returns what the ranks sent here, in rank order, and moves nothing else."""
        if len(outgoing) != self.world:
            raise ValueError(f"exchange needs one list per rank: {len(outgoing)} lists for {self.world} ranks.")
        if self.world == 1:
            return list(outgoing[0])
        parcels = [pickle.dumps(list(items)) for items in outgoing]
        sizes = torch.tensor([len(parcel) for parcel in parcels])
        incoming = torch.empty_like(sizes)
        with self._explained("exchange"):
            dist.all_to_all_single(incoming, sizes, group=self._control)
            payload = torch.frombuffer(bytearray(b"".join(parcels)), dtype=torch.uint8)
            received = torch.empty(int(incoming.sum()), dtype=torch.uint8)
            dist.all_to_all_single(received, payload, incoming.tolist(), sizes.tolist(), group=self._control)
        parts = received.split(incoming.tolist())
        # Bytes of our own ranks over our own process group, never of a file.
        return [item for part in parts for item in pickle.loads(part.numpy().tobytes())]

    # ---- groups ------------------------------------------------------------------------------------------------

    def _group_for(self, tensor: Tensor) -> dist.ProcessGroup | None:
        return self._control if tensor.device.type == "cpu" else None

    def new_groups(self, size: int) -> dist.ProcessGroup | None:
        """Splits the world into gloo groups of `size` consecutive ranks and returns this rank's; None for size 1."""
        if size < 1 or self.world % size:
            raise ValueError(f"Groups of {size} ranks do not divide a world of {self.world}.")
        if size == 1:
            return None
        ranks = range(self.world)
        groups: list[dist.ProcessGroup] = [  # every rank makes every group, or new_group hangs
            dist.new_group(ranks[start : start + size], timeout=self.timeout, backend="gloo") for start in ranks[::size]
        ]
        return groups[self.rank // size]

    def close(self) -> None:
        """Leaves the process group if connect() made it; rank and world stay readable."""
        if self._watch is not None:
            self._watch.stop()
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_group = False
        self._control = self._board = None


def connect(device: torch.device, timeout: timedelta) -> Comm:
    """Joins the world that torchrun describes, uses an existing one again, or makes a world of one without either."""
    global _current
    is_described = "RANK" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1"
    many = is_described or dist.is_initialized()
    _current = _connect_ranks(device, timeout) if many else Comm(device=device, timeout=timeout)
    return _current


def _connect_ranks(device: torch.device, timeout: timedelta) -> Comm:
    owns_group = not dist.is_initialized()
    # torch has no public name for the store of a group that exists.
    store = join(device, timeout) if owns_group else dist.distributed_c10d._get_default_store()
    group = control_group(timeout)
    comm = Comm(device=device, timeout=timeout, control_group=group, store=store, owns_group=owns_group)
    if comm._board is not None and is_wanted():
        comm._watch = StallWatch(store, comm._board, comm.rank, comm.world)
    return comm


def _reduce_op(op: str) -> Any:
    return {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[op]


def _is_lost_peer(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _PEER_LOST)


def _as_tensor(leaf: Any) -> Tensor:
    if isinstance(leaf, Tensor):
        return leaf
    if not isinstance(leaf, int | float):
        raise TypeError(f"all_reduce takes tensors, numbers and dicts of them, not {type(leaf).__name__}.")
    return torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else torch.int64)


def _describe_unequal(kinds: Sequence[tuple[Any, ...]]) -> str:
    given = "; ".join(f"rank {rank}: {kind[0]} {list(kind[1:])}" for rank, kind in enumerate(kinds))
    return (
        "all_gather concatenates along the first dimension, so types and all other dimensions must be equal on all "
        f"ranks. Given: {given}. Pad the tensors to the same width first."
    )


def _leaves(data: Any) -> list[Any]:
    if isinstance(data, Mapping):
        return [leaf for key in sorted(data) for leaf in _leaves(data[key])]  # any order of insertion on any rank
    return [data]


def _rebuild(data: Any, leaves: Iterator[Any]) -> Any:
    if isinstance(data, Mapping):
        rebuilt = {key: _rebuild(data[key], leaves) for key in sorted(data)}
        return {key: rebuilt[key] for key in data}
    return next(leaves)


def _map_leaves(function: Any, data: Any) -> Any:
    return _rebuild(data, iter([function(leaf) for leaf in _leaves(data)]))


def pick_device(wanted: str, num_gpu_per_node: int) -> torch.device:
    """Returns this process's device: of several GPUs the one of LOCAL_RANK, or else of RANK % num_gpu_per_node."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    return _pick_gpu(num_gpu_per_node)


def _pick_gpu(num_gpu_per_node: int) -> torch.device:
    if not torch.cuda.is_available():
        raise ValueError("The device is set to 'cuda', but torch sees no GPU. Use --distributed.device cpu or auto.")
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", rank % num_gpu_per_node))
    visible = torch.cuda.device_count()
    if local_rank >= visible:
        raise ValueError(
            f"Local rank {local_rank} has no GPU: {visible} usable here. Start at most that many processes."
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
