"""Ranks and collectives. Works the same in a world of one, where no process group exists.

Tensors on a GPU go over the data group (NCCL); numbers, objects and decisions over a gloo control group beside it.
"""

from __future__ import annotations

import logging
import os
import pickle
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

logger = logging.getLogger(__name__)

T = TypeVar("T")
# Renamed in torch 2.13, where the old name warns at every call.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
OPERATIONS = ("mean", "sum", "max", "min")
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
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
    """An all_reduce operation that does not exist; also an AssertionError for code written against that."""


class RankError(RuntimeError):
    """Another rank failed; the message holds its traceback."""


_current: Comm | None = None


def current() -> Comm:
    """The world this process has joined, or a world of one."""
    return _current or Comm()


class Comm:
    """This process's place in the world, and every collective that lightrl uses outside a model's own."""

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
        self._store = store
        self._owns_group = owns_group
        self._phases = ["start"]

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    # ---- phases and errors -------------------------------------------------------------------------------------

    @property
    def phase_name(self) -> str:
        return self._phases[-1]

    @contextmanager
    def phase(self, name: str, *, local: bool = False) -> Iterator[None]:
        """Names what this rank is doing, so that a time-out or a failure elsewhere can say it.

        local: the body holds no collective. Then an error on any rank is raised on every rank when the body ends.
        Otherwise the failing rank tells the others through the store before it raises, and they find its traceback
        there when their collective breaks.
        """
        self._enter(name)
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        try:
            if local:
                self._raise_everywhere(error)
            elif error is not None:
                self._publish_or_explain(error)
                raise error
        finally:
            self._phases.pop()
            self._tell_phase()

    def _enter(self, name: str) -> None:
        self._phases.append(name)
        self._tell_phase()

    def _tell_phase(self) -> None:
        self._tell(f"lightrl/phase/{self.rank}", f"{self.phase_name}|{time.time():.1f}")

    def _tell(self, key: str, text: str) -> None:
        if self._store is not None:
            with suppress(RuntimeError):  # the store's host is gone: the error that this rank has says more
                self._store.set(key, text)

    def _raise_everywhere(self, error: Exception | None) -> None:
        try:
            has_failed = self.any(error is not None)
        except RankError as lost:  # another rank never came to the end of the body
            if error is None:
                raise
            self._tell(f"lightrl/error/{self.rank}", _describe(error))
            raise error from lost
        if not has_failed:
            return
        text = None if error is None else _describe(error)
        failures = {rank: report for rank, report in enumerate(self.all_gather_object(text)) if report}
        if error is not None:
            raise error
        raise RankError(self._other_rank_failed(failures))

    def _other_rank_failed(self, failures: Mapping[int, str]) -> str:
        reports = "\n".join(f"--- rank {rank} ---\n{report}" for rank, report in sorted(failures.items()))
        return f"rank {', '.join(map(str, sorted(failures)))} failed in phase {self.phase_name!r}:\n{reports}"

    def _publish_or_explain(self, error: Exception) -> None:
        """Tells the other ranks why this one leaves, or raises with what they told if they left first."""
        if self._store is None or isinstance(error, RankError):
            return
        if not _is_lost_peer(error):
            self._tell(f"lightrl/error/{self.rank}", _describe(error))
            return
        failures = self._published_errors()
        if failures:
            raise RankError(self._other_rank_failed(failures)) from error
        raise RankError(f"{error}\n{self._where_is_everyone()}") from error

    def _published_errors(self) -> dict[int, str]:
        """What other ranks said before they left; a short wait, since a broken connection travels faster."""
        assert self._store is not None
        for _ in range(10):
            keys = {rank: f"lightrl/error/{rank}" for rank in range(self.world) if rank != self.rank}
            failures = {
                rank: self._store.get(key).decode() for rank, key in keys.items() if self._store_has(self._store, key)
            }
            if failures:
                return failures
            time.sleep(0.1)
        return {}

    @staticmethod
    def _store_has(store: Store, key: str) -> bool:
        try:
            return bool(store.check([key]))
        except RuntimeError:  # the store's host is gone too
            return False

    def _where_is_everyone(self) -> str:
        if self._store is None:
            return ""
        lines = [f"rank {self.rank} was in phase {self.phase_name!r}. Last word of the others:"]
        now = time.time()
        for rank in range(self.world):
            key = f"lightrl/phase/{rank}"
            if rank != self.rank and self._store_has(self._store, key):
                name, since = self._store.get(key).decode().rsplit("|", 1)
                lines.append(f"rank {rank} is in phase {name!r} since {now - float(since):.0f} s")
        return "\n".join(lines)

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Adds rank, phase and the others' phases to a collective that broke."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, RankError) or not _is_lost_peer(error):
                raise
            failures = self._published_errors() if self._store is not None else {}
            if failures:
                raise RankError(self._other_rank_failed(failures)) from error
            raise RankError(
                f"rank {self.rank} gave up in {what} during phase {self.phase_name!r} "
                f"(time-out {self.timeout.total_seconds():.0f} s): {error}\n{self._where_is_everyone()}"
            ) from error

    # ---- decisions ---------------------------------------------------------------------------------------------

    def any(self, flag: bool) -> bool:
        """True on every rank if it is true on one."""
        return bool(self._agreed_int(int(flag), "max"))

    def agree(self, flag: bool) -> bool:
        """True on every rank only if it is true on all."""
        return bool(self._agreed_int(int(flag), "min"))

    def max_int(self, value: int) -> int:
        return self._agreed_int(value, "max")

    def _agreed_int(self, value: int, op: str) -> int:
        if self.world == 1:
            return value
        number = torch.tensor(value, dtype=torch.int64)
        with self._explained("a decision of all ranks"):
            dist.all_reduce(number, op=_reduce_op(op), group=self._control)
        return int(number)

    def barrier(self) -> None:
        """Waits for every rank, on the control group."""
        self._agreed_int(0, "max")

    # ---- tensors, numbers, dicts -------------------------------------------------------------------------------

    def all_reduce(self, data: T, op: str = "mean", weight: float | Tensor | None = None) -> T:
        """Reduces a tensor, a number or a dict of them over the ranks; the input is left as it was.

        One collective per type. weight (op "mean" only) makes it sum(weight x value) / sum(weight). The mean of
        integers is a float.
        """
        if op not in OPERATIONS:
            raise UnknownReductionError(f"Unknown reduction {op!r}. Choose one of {', '.join(OPERATIONS)}.")
        if weight is not None and op != "mean":
            raise UnknownReductionError(f"A weight needs the reduction 'mean', not {op!r}.")
        if weight is not None:
            scaled = _map_leaves(lambda leaf: leaf * weight, data)
            total = self.all_reduce({"data": scaled, "weight": weight}, "sum")
            return cast(T, _map_leaves(lambda leaf: leaf / total["weight"], total["data"]))
        leaves = _leaves(data)
        reduced = self._reduce_leaves(leaves, "sum" if op == "mean" else op)
        if op == "mean":
            reduced = [leaf / self.world for leaf in reduced]
        return cast(T, _rebuild(data, iter(reduced)))

    def _reduce_leaves(self, leaves: list[Any], op: str) -> list[Any]:
        tensors = [_as_tensor(leaf) for leaf in leaves]
        kinds = sorted({(tensor.device.type, str(tensor.dtype)) for tensor in tensors})
        out: list[Any] = list(leaves)
        for kind in kinds:
            places = [i for i, tensor in enumerate(tensors) if (tensor.device.type, str(tensor.dtype)) == kind]
            flat = torch.cat([tensors[i].detach().reshape(-1) for i in places])  # a copy: the input is never written
            if self.world > 1:
                with self._explained("all_reduce"):
                    dist.all_reduce(flat, op=_reduce_op(op), group=self._group_for(flat))
            for i, part in zip(places, flat.split([tensors[i].numel() for i in places]), strict=True):
                out[i] = part.reshape(tensors[i].shape) if isinstance(leaves[i], Tensor) else part.item()
        return out

    def all_gather(self, data: T) -> T:
        """Concatenates along dim 0 in rank order; lengths may differ. Numbers become a tensor [world]."""
        if isinstance(data, Mapping):
            gathered_by_key = {key: self.all_gather(data[key]) for key in sorted(data)}
            return cast(T, {key: gathered_by_key[key] for key in data})
        tensor = _as_tensor(data).detach()
        tensor = tensor.reshape(1) if tensor.dim() == 0 else tensor
        if self.world == 1:
            return cast(T, tensor.clone())
        lengths = self.all_gather_object(tensor.shape[0])
        padded = tensor.new_zeros((max(lengths), *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        gathered = padded.new_empty((self.world * max(lengths), *tensor.shape[1:]))
        with self._explained("all_gather"):
            all_gather_flat(gathered, padded, group=self._group_for(padded))
        chunks = gathered.split(max(lengths)) if max(lengths) else [padded] * self.world
        return cast(T, torch.cat([chunk[:length] for chunk, length in zip(chunks, lengths, strict=True)]))

    def broadcast_tensor(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrites tensor on every rank with that of the source."""
        if self.world > 1:
            with self._explained("broadcast"):
                dist.broadcast(tensor, src=source, group=self._group_for(tensor))

    # ---- objects -----------------------------------------------------------------------------------------------

    def all_gather_object(self, item: T, group: dist.ProcessGroup | None = None) -> list[T]:
        """One item from every rank (of the group), in rank order, over gloo."""
        if self.world == 1:
            return [item]
        chosen = group or self._control
        items: list[Any] = [None] * dist.get_world_size(chosen)
        with self._explained("all_gather_object"):
            dist.all_gather_object(items, item, group=chosen)
        return items

    def broadcast_object(self, item: T, source: int = 0) -> T:
        if self.world == 1:
            return item
        box: list[Any] = [item if self.rank == source else None]
        with self._explained("broadcast_object"):
            dist.broadcast_object_list(box, src=source, group=self._control)
        return cast(T, box[0])

    def exchange(self, outgoing: Sequence[Sequence[T]]) -> list[T]:
        """outgoing[r] goes to rank r; returns what the ranks sent here, in rank order. Only what moves is moved."""
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
        mine = None
        if size > 1:
            for start in range(0, self.world, size):  # every rank makes every group, or new_group hangs
                ranks = list(range(start, start + size))
                group = dist.new_group(ranks, timeout=self.timeout, backend="gloo")
                mine = group if self.rank in ranks else mine
        return mine

    def close(self) -> None:
        """Leaves the process group if connect() made it; who this rank was stays known."""
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_group = False
        self._control = self._store = None


def connect(device: torch.device, timeout: timedelta) -> Comm:
    """Joins the world that torchrun describes, re-uses one that exists, or is a world of one without either."""
    global _current
    _current = _connect(device, timeout)
    return _current


def _connect(device: torch.device, timeout: timedelta) -> Comm:
    if dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()  # torch has no public name for it
        return Comm(device=device, timeout=timeout, control_group=_control_group(timeout), store=store)
    missing = [name for name in _TORCHRUN_VARIABLES if name not in os.environ]
    if missing:
        if os.environ.get("WORLD_SIZE", "1") != "1" or "RANK" in os.environ:
            raise RuntimeError(
                f"Environment variables missing for a distributed run: {', '.join(missing)}. Start it with torchrun "
                "or set them all; without any of them lightrl runs as one process."
            )
        return Comm(device=device, timeout=timeout)
    store = _join(device, timeout)
    return Comm(device=device, timeout=timeout, control_group=_control_group(timeout), store=store, owns_group=True)


def _join(device: torch.device, timeout: timedelta) -> Store:
    # Sub-groups of a device mesh take this default and would otherwise wait 30 minutes whatever was asked.
    dist.distributed_c10d.default_pg_timeout = timeout
    meeting = rendezvous("env://", int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timeout=timeout)
    store, rank, world = next(iter(meeting))
    store.set_timeout(timeout)
    # After an elastic restart the agent's store still holds the addresses of the ranks that died.
    store = PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    dist.init_process_group(
        backend_for(device),
        store=store,
        rank=rank,
        world_size=world,
        timeout=timeout,
        **options,
    )
    return store


def backend_for(device: torch.device) -> str:
    """Both on a GPU: with offload to the host, FSDP's collectives are of CPU tensors."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _control_group(timeout: timedelta) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(timeout=timeout, backend="gloo")
    return group


def _reduce_op(op: str) -> Any:
    return {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[op]


def _describe(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _is_lost_peer(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _PEER_LOST)


def _as_tensor(leaf: Any) -> Tensor:
    if isinstance(leaf, Tensor):
        return leaf
    if isinstance(leaf, bool | int):
        return torch.tensor(int(leaf), dtype=torch.int64)
    if isinstance(leaf, float):
        return torch.tensor(leaf, dtype=torch.float64)
    raise TypeError(f"all_reduce takes tensors, numbers and dicts of them, not {type(leaf).__name__}.")


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
