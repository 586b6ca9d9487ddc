"""Comm: ranks and collectives, in a world of one (Comm) and in a process group (RankComm)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from lightrl.forked import end_child
from lightrl.parcels import exchange_objects, gather_objects, gather_rows
from lightrl.process_group import consecutive_group, control_group, error_of_nccl, is_lost_peer, join, pick_gpu
from lightrl.rank_board import RankBoard, describe
from lightrl.stall_watch import StallWatch, is_wanted
from lightrl.trees import map_by_kind, map_leaves

T = TypeVar("T")
OPERATIONS = ("mean", "sum", "max", "min")
_FAILED = 1 << 62  # sent instead of its number by a rank that failed in a local phase


@dataclass(slots=True)
class Agreed:
    """A number, 0 or more, that each rank sets in the body of a local phase; afterwards all ranks hold the largest."""

    largest: int = 0


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
    return _current or found_world()


def found_world() -> Comm:
    """Returns the world of a process group that somebody else has made, or a world of one."""
    return RankComm() if dist.is_available() and dist.is_initialized() else Comm()


def known_world() -> int:
    """Returns the number of ranks: of the group that exists, or of the one that torchrun describes."""
    described = os.environ.get("WORLD_SIZE", "1")
    is_joined = dist.is_available() and dist.is_initialized()
    return dist.get_world_size() if is_joined else int(described) if described.isdecimal() else 1


class Comm:
    """A world of one, which waits for nobody. RankComm overrides what several ranks do together."""

    board: RankBoard | None = None  # where ranks tell each other what they do, without a collective
    is_distributed = False
    failure_of_others: Callable[[], str] | None = None  # why another world of the same job ended, if any has

    def __init__(self, *, device: torch.device | None = None, timeout: timedelta = timedelta(minutes=30)) -> None:
        self.device = device or torch.device("cpu")
        self.timeout = timeout
        self.rank, self.world, self.process = 0, 1, os.getpid()
        self.on_span: Callable[[str], AbstractContextManager[Any]] = nullcontext  # surrounds each span()

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    # ---- Phases and errors -------------------------------------------------------------------------------------

    @property
    def phase_name(self) -> str:
        """The innermost phase that this rank is in."""
        return "start"

    @contextmanager
    def phase(self, name: str, *, local: bool = False, late: type[Exception] | None = None) -> Iterator[Agreed]:
        """Names what this rank is doing, for the report of a time-out or of a failure on one of several ranks.

        Args:
            name: what the body does.
            local: the body contains no collective. At its end, an error on any rank is raised on every rank, and all
                get the largest of the ranks' numbers. Otherwise the failing rank posts its traceback before it raises,
                and the other ranks read it when their collective breaks.
            late: errors of this type occur only after all collectives of the body, and are raised as with `local`.
        """
        with self.span(name):
            yield Agreed()

    def span(self, name: str) -> AbstractContextManager[Any]:
        """Surrounds named work that takes time: a phase, or what a trainer measures as time/NAME.

        This is the only hook for a profiler, which sets `on_span`.
        """
        if os.getpid() != self.process:
            end_child(self.process)
        return self.on_span(name)

    def has_failed_elsewhere(self) -> bool:
        """Returns whether another rank has left with an error; this is not a collective."""
        return self.failure_of_others is not None and bool(self.failure_of_others())

    # ---- Decisions ---------------------------------------------------------------------------------------------

    def any(self, flag: bool) -> bool:
        """Returns True on every rank if the flag is true on one."""
        return flag

    def agree(self, flag: bool) -> bool:
        """Returns True on every rank if the flag is true on all."""
        return flag

    def max_int(self, value: int) -> int:
        """Returns the largest of all ranks' values on every rank."""
        return value

    def barrier(self) -> None:
        """Waits for every rank, on the control group."""

    # ---- Tensors, numbers, dicts, objects ----------------------------------------------------------------------

    def all_reduce(self, data: T, op: str = "mean", weight: float | Tensor | None = None) -> T:
        """Reduces a tensor, a number or a dict of them over the ranks; the input is not changed.

        There is one collective per type; a number must be of one type on all ranks. A weight (only with op "mean")
        gives sum(weight x value) / sum(weight). The sum of integers or truth values is an int64, their mean a float.
        """
        if op not in OPERATIONS:
            raise UnknownReductionError(f"Unknown reduction {op!r}. Choose one of {', '.join(OPERATIONS)}.")
        if weight is not None:
            return self._weighted_mean(data, op, weight)
        if isinstance(data, Mapping):
            return cast(T, map_by_kind(lambda leaves: self._reduce_alike(leaves, op), _kind_of, data))
        return data if self.world == 1 and type(data) is float else cast(T, self._reduce_alike([data], op)[0])

    def _weighted_mean(self, data: T, op: str, weight: float | Tensor) -> T:
        if op != "mean":
            raise UnknownReductionError(f"A weight needs the reduction 'mean', not {op!r}.")
        scaled = map_leaves(lambda leaf: leaf * weight, data)
        total = self.all_reduce({"data": scaled, "weight": weight}, "sum")
        return cast(T, map_leaves(lambda leaf: leaf / total["weight"], total["data"]))

    def _reduce_alike(self, leaves: list[Any], op: str) -> list[Any]:
        """Reduces tensors and numbers of one type in one collective; a sum of small integers would wrap around."""
        tensors = [_as_tensor(leaf) for leaf in leaves]
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])  # a copy: the input is never written
        flat = flat.long() if op in ("mean", "sum") and not (flat.is_floating_point() or flat.is_complex()) else flat
        self._reduce_in_place(flat, "sum" if op == "mean" else op)
        parts = zip(leaves, tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True)
        reduced = [part.reshape(old.shape) if isinstance(leaf, Tensor) else part.item() for leaf, old, part in parts]
        return [leaf / self.world for leaf in reduced] if op == "mean" else reduced

    def _reduce_in_place(self, flat: Tensor, op: str) -> None:
        """Overwrites a tensor with its sum, maximum or minimum over the ranks."""

    def all_gather(self, data: T) -> T:
        """Concatenates along dim 0 in rank order; only lengths may differ. Numbers become a tensor [world]."""
        if isinstance(data, Mapping):
            return cast(T, map_leaves(self.all_gather, data))
        tensor = _as_tensor(data).detach()
        return cast(T, self._gather_rows(tensor.reshape(1) if tensor.dim() == 0 else tensor))

    def _gather_rows(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def broadcast_tensor(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrites the tensor on every rank with that of the source rank."""

    def all_gather_object(self, item: T, group: dist.ProcessGroup | None = None) -> list[T]:
        """Returns the items of all ranks (of the group) in rank order; they travel over gloo."""
        return [item]

    def broadcast_object(self, item: T, source: int = 0) -> T:
        """Returns the source rank's item on every rank."""
        return item

    def exchange(self, outgoing: Sequence[Sequence[T]]) -> list[T]:
        """Sends outgoing[r] to rank r alone; returns what the ranks sent to this one, in rank order."""
        if len(outgoing) != self.world:
            raise ValueError(f"exchange needs one list per rank: {len(outgoing)} lists for {self.world} ranks.")
        return list(outgoing[0]) if self.world == 1 else self._exchange(outgoing)

    def _exchange(self, outgoing: Sequence[Sequence[T]]) -> list[T]:
        return list(outgoing[0])

    def new_groups(self, size: int) -> dist.ProcessGroup | None:
        """Splits the world into gloo groups of `size` consecutive ranks and returns this rank's; None for size 1."""
        if size < 1 or self.world % size:
            raise ValueError(f"Groups of {size} ranks do not divide a world of {self.world}.")
        return consecutive_group(self.rank, self.world, size, self.timeout) if size > 1 else None

    def close(self) -> None:
        """Leaves the process group if connect() made it; rank and world stay readable."""


class RankComm(Comm):
    """One rank of a process group. GPU tensors travel over that group, everything else over a gloo control group."""

    def __init__(
        self,
        *,
        device: torch.device | None = None,
        timeout: timedelta = timedelta(minutes=30),
        control_group: dist.ProcessGroup | None = None,
        store: Store | None = None,
        owns_group: bool = False,
    ) -> None:
        super().__init__(device=device, timeout=timeout)
        self.is_distributed = True
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._control = control_group
        self._owns_group = owns_group
        self._watch: StallWatch | None = None
        if store is not None:
            self.board = RankBoard(store, self.rank, self.world)
            found = error_of_nccl if self.device.type == "cuda" else None
            self._watch = StallWatch(store, self.board, self.rank, self.world, found) if is_wanted() else None

    # ---- Phases and errors -------------------------------------------------------------------------------------

    @property
    def phase_name(self) -> str:
        return self.board.phase if self.board is not None else super().phase_name

    def phase(  # type: ignore[override]
        self, name: str, *, local: bool = False, late: type[Exception] | None = None
    ) -> AbstractContextManager[Agreed]:
        return self._unwatched(name, local) if self.board is None else self._watched(self.board, name, local, late)

    @contextmanager
    def _unwatched(self, name: str, local: bool) -> Iterator[Agreed]:
        with self.span(name):
            yield (agreed := Agreed())
        if local:
            agreed.largest = self.max_int(agreed.largest)

    @contextmanager
    def _watched(self, board: RankBoard, name: str, local: bool, late: type[Exception] | None) -> Iterator[Agreed]:
        _require_no_episode(f"phase {name!r}")
        board.enter(name)
        error: Exception | None = None
        try:
            with self.span(name):
                yield (agreed := Agreed())
        except Exception as raised:
            error = raised
        try:
            if local or (late is not None and (error is None or isinstance(error, late))):
                self._raise_everywhere(board, error, agreed)
            elif error is not None:
                self._publish_or_explain(board, error)
                raise error
        finally:
            board.leave()

    def _raise_everywhere(self, board: RankBoard, error: Exception | None, agreed: Agreed) -> None:
        try:
            agreed.largest = self.max_int(agreed.largest if error is None else _FAILED)
        except RankError as lost:  # another rank never reached the end of the body
            if error is None:
                raise
            board.post_error(error)
            raise error from lost
        if agreed.largest != _FAILED:
            return
        text = None if error is None else (describe(error), str(error) if isinstance(error, MISTAKES) else "")
        reports = {rank: report for rank, report in enumerate(self.all_gather_object(text)) if report}
        if error is not None:
            raise error
        failure = RankError(board.describe_errors({r: report for r, (report, _) in reports.items()}, are_agreed=True))
        if all(mistake for _, mistake in reports.values()):
            failure.mistake = f"rank {min(reports)}: {reports[min(reports)][1]}"
        raise failure

    def _publish_or_explain(self, board: RankBoard, error: Exception) -> None:
        """Posts why this rank leaves; if others left first, raises an error with what they posted instead."""
        if is_lost_peer(error):
            raise RankError(self._why_lost(board, str(error))) from error
        if not isinstance(error, RankError):
            board.post_error(error)

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Adds this rank, its phase and the phases of the others to the error of a collective that broke."""
        _require_no_episode(what)
        if self.board is not None:
            self.board.go_on()
        try:
            yield
        except RuntimeError as error:
            if not is_lost_peer(error):
                raise
            limit = f" (time-out {self.timeout.total_seconds():.0f} s)" if "time" in str(error).lower() else ""
            text = f"rank {self.rank} gave up in {what} during phase {self.phase_name!r}{limit}: {error}"
            raise RankError(text if self.board is None else self._why_lost(self.board, text)) from error

    def _why_lost(self, board: RankBoard, text: str) -> str:
        """Returns the errors that other ranks left with; if there are none, the text and what each rank was doing."""
        if self._watch is not None:
            return self._watch.why_lost(text)
        errors = board.errors_of_others()
        return board.describe_errors(errors) if errors else f"{text}\n{board.describe_phases()}"

    def has_failed_elsewhere(self) -> bool:
        if super().has_failed_elsewhere():
            return True
        if self._watch is not None and self._watch.is_reporting:
            return False  # this rank's own error comes first
        return self.board is not None and bool(self.board.errors_of_others())

    # ---- Collectives, which are skipped in a group of one ------------------------------------------------------

    def any(self, flag: bool) -> bool:
        return bool(self._reduced_int(int(flag), "max"))

    def agree(self, flag: bool) -> bool:
        return bool(self._reduced_int(int(flag), "min"))

    def max_int(self, value: int) -> int:
        return self._reduced_int(value, "max")

    def barrier(self) -> None:
        self._reduced_int(0, "max")

    def _reduced_int(self, value: int, op: str) -> int:
        if self.world == 1:
            return value
        with self._explained("a decision of all ranks"):
            dist.all_reduce(number := torch.tensor(value, dtype=torch.int64), op=_reduce_op(op), group=self._control)
        return int(number)

    def _reduce_in_place(self, flat: Tensor, op: str) -> None:
        if self.world > 1:
            with self._explained("all_reduce"):
                dist.all_reduce(flat, op=_reduce_op(op), group=self._group_for(flat))

    def _gather_rows(self, tensor: Tensor) -> Tensor:
        if self.world == 1:
            return super()._gather_rows(tensor)
        with self._explained("all_gather"):
            return gather_rows(tensor, self._group_for(tensor), self._control)

    def broadcast_tensor(self, tensor: Tensor, source: int = 0) -> None:
        if self.world > 1:
            with self._explained("broadcast"):
                dist.broadcast(tensor, src=source, group=self._group_for(tensor))

    def all_gather_object(self, item: T, group: dist.ProcessGroup | None = None) -> list[T]:
        if self.world == 1:
            return [item]
        with self._explained("all_gather_object"):
            return gather_objects(item, group or self._control)

    def broadcast_object(self, item: T, source: int = 0) -> T:
        if self.world == 1:
            return item
        box: list[Any] = [item if self.rank == source else None]
        with self._explained("broadcast_object"):
            dist.broadcast_object_list(box, src=source, group=self._control)
        return cast(T, box[0])

    def _exchange(self, outgoing: Sequence[Sequence[T]]) -> list[T]:
        with self._explained("exchange"):
            return exchange_objects(outgoing, self._control)

    def _group_for(self, tensor: Tensor) -> dist.ProcessGroup | None:
        return self._control if tensor.device.type == "cpu" else None

    def close(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_group = False
        self._control = self.board = None


def connect(device: torch.device, timeout: timedelta) -> Comm:
    """Joins the world that torchrun describes, reuses an existing one, or makes a world of one if there is neither."""
    global _current
    many = "RANK" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1" or dist.is_initialized()
    _current = _connect_ranks(device, timeout) if many else Comm(device=device, timeout=timeout)
    return _current


def _connect_ranks(device: torch.device, timeout: timedelta) -> Comm:
    owns_group = not dist.is_initialized()
    # torch has no public name for the store of a group that exists.
    store = join(device, timeout) if owns_group else dist.distributed_c10d._get_default_store()
    group = control_group(timeout)
    return RankComm(device=device, timeout=timeout, control_group=group, store=store, owns_group=owns_group)


def _reduce_op(op: str) -> Any:
    return {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[op]


def _as_tensor(leaf: Any) -> Tensor:
    if isinstance(leaf, Tensor):
        return leaf
    if not isinstance(leaf, int | float):
        raise TypeError(f"all_reduce takes tensors, numbers and dicts of them, not {type(leaf).__name__}.")
    return torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else torch.int64)


def _kind_of(leaf: Any) -> tuple[str, str]:
    tensor = _as_tensor(leaf)
    return tensor.device.type, str(tensor.dtype)


def pick_device(wanted: str, num_gpu_per_node: int) -> torch.device:
    """Returns this process's device; the GPU index is LOCAL_RANK if it is set, otherwise RANK % num_gpu_per_node."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        # After a block of this size is freed, glibc keeps up to 64 MB of what a step frees; Linux would clear it again.
        torch.empty((32 << 20) - (16 << 10), dtype=torch.uint8)
        return torch.device("cpu")
    return pick_gpu(num_gpu_per_node)
