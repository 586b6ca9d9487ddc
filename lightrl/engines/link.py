"""Link: connects the ranks that train with those that generate; LinkEngine is the trainer's end of it.

Trainer rank 0 and all rollout ranks form a group. Commands and answers go through the store, weights over the group.
The death of a rank is noticed at once, because every rank listens on a connection that carries no data.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lightrl.comm import RankError
from lightrl.engines.base import AnyPrompt, Completion, EnginePart, InferenceEngine, NamedTensors, SamplingParams
from lightrl.engines.peer_watch import PeerWatch
from lightrl.engines.weights.fingerprint import Fingerprint, KnownWeights, fingerprint_of
from lightrl.process_group import link_group, store_of
from lightrl.roles import Role

Command = dict[str, Any]

SIGNAL = "signal"  # key of a signal that a rollout rank has received

_POLL_S = (0.0005, 0.01)  # between two reads of the store: at first, and after a while
_LOOK_S = 0.5  # between two checks for errors of the other role
_MOST_BYTES = 4 << 20  # of a value: torch's store closes the connection above 8 MiB
_IN_PARTS = b"\0in parts: "  # begins a value that stands for several; no message of lightrl begins so
_ALIGNMENT = 16  # bytes: a view into a bucket must begin at a multiple of its element size


class Link:
    """One end of the connection. Trainer rank 0 commands; rollout ranks obey and answer."""

    def __init__(self, role: Role, device: torch.device, timeout: timedelta) -> None:
        self.role = role
        self.num_bytes = 0  # bytes of weights, sent or received
        self._device = device
        self._timeout = timeout
        self._rank = 0 if role.is_trainer else role.rank + 1
        self._size = role.num_rollout + 1
        self._store: Any = store_of("link")
        self.peers = PeerWatch(role)
        self.on_look: Callable[[], None] | None = None  # called at every check for errors of others
        self._num_commands = 0
        self._looked_at = 0.0

    def meet(self) -> None:
        """Waits for the other ranks of the link and connects to them."""
        self._store.set(f"here/{self._rank}", "")
        everyone = [f"here/{rank}" for rank in range(self._size)]
        self.wait(lambda: self._store.check(everyone), "the other role to be ready")
        self._texts = link_group("texts", self._rank, self._size, torch.device("cpu"), self._timeout)
        self._data = self._texts
        if self._device.type == "cuda":
            self._data = link_group("data", self._rank, self._size, self._device, self._timeout)
        self.peers.begin()

    # ---- Waiting -----------------------------------------------------------------------------------------------

    def wait(self, is_done: Callable[[], bool], what: str) -> None:
        """Waits until something is done; raises RankError if the other role has failed, or at the time-out."""
        started = time.monotonic()
        while not is_done():
            self.require_others()
            waited = time.monotonic() - started
            if waited > self._timeout.total_seconds():
                raise RankError(f"The {self.role.name} ranks gave up after {waited:.0f} s of waiting for {what}.")
            time.sleep(min(max(waited / 10, _POLL_S[0]), _POLL_S[1]))

    def require_others(self) -> None:
        """Raises RankError with the report of another rank if one has failed."""
        if self.on_look is not None:
            self.on_look()
        if not self.peers.lost and time.monotonic() - self._looked_at < _LOOK_S:
            return
        self._looked_at = time.monotonic()
        if failure := self.peers.failure():
            raise RankError(failure)

    # ---- Commands and answers ----------------------------------------------------------------------------------

    def post(self, command: Command) -> None:
        """Sends a command to all rollout ranks."""
        self._store.set(f"command/{self._num_commands}", json.dumps(command))
        self._num_commands += 1

    def next_command(self) -> Command:
        """Waits for the next command."""
        self.wait(self.has_command, "the next command of the trainer")
        command: Command = json.loads(self._store.get(f"command/{self._num_commands}"))
        self._num_commands += 1
        return command

    def has_command(self) -> bool:
        """Returns whether next_command() would return at once."""
        return bool(self._store.check([f"command/{self._num_commands}"]))

    def answer(self, content: bytes) -> None:
        """Answers the last command; every rollout rank must do so."""
        self.put(f"answer/{self._num_commands}/{self.role.rank}", content)

    def answers(self) -> list[bytes]:
        """Waits for the answers of all rollout ranks to the last command."""
        keys = [f"answer/{self._num_commands}/{rank}" for rank in range(self.role.num_rollout)]
        self.wait(lambda: self._store.check(keys), "the rollout ranks")
        return [self.take(key) for key in keys]

    # ---- Values of the store -----------------------------------------------------------------------------------

    def put(self, key: str, content: bytes) -> None:
        """Writes a value that any rank of the link can read or take."""
        if len(content) > _MOST_BYTES:
            starts = range(0, len(content), _MOST_BYTES)
            for number, start in enumerate(starts):
                self._store.set(f"{key}/part/{number}", content[start : start + _MOST_BYTES])
            content = _IN_PARTS + str(len(starts)).encode()  # written last: who sees it finds all parts
        self._store.set(key, content)

    def has(self, key: str) -> bool:
        """Returns whether there is a value under the key."""
        return bool(self._store.check([key]))

    def peek(self, key: str) -> bytes:
        """Returns a value without removing it."""
        content: bytes = self._store.get(key)
        return b"".join(map(self._store.get, _parts(key, content))) or content

    def take(self, key: str) -> bytes:
        """Returns a value and removes it."""
        content = self.peek(key)
        for name in (*_parts(key, self._store.get(key)), key):
            self._store.delete_key(name)
        return content

    def count(self, key: str, add: int = 0) -> int:
        """Adds to a counter that all ranks of the link share, and returns its new value."""
        return int(self._store.add(key, add))

    def claim(self, key: str, limit: int) -> int | None:
        """Takes the next number of a counter; None at the limit. No two ranks get the same, even if limits differ.

        Trainer rank 0 must have started the counter with put(key, b"0").
        """
        while True:
            current = self._store.get(key).decode()
            number = int(current.split()[0])
            if number >= limit:
                return None
            wanted = f"{number + 1} {self._rank}"  # unique: nobody else writes the same text
            if self._store.compare_set(key, current, wanted).decode() == wanted:
                return number

    def claimed(self, key: str) -> int:
        """Returns how many numbers of a counter have been taken."""
        return int(self._store.get(key).split()[0])

    # ---- Weights -----------------------------------------------------------------------------------------------

    def send_weights(
        self,
        weights: NamedTensors,
        expected: KnownWeights | None,
        bucket_bytes: int,
    ) -> None:
        """Sends (name, tensor) pairs in buckets of about this size; rollout ranks call receive_weights()."""
        fingerprints = {name: [*fingerprint_of(known)] for name, known in (expected or {}).items()}
        self._send_text(None if expected is None else fingerprints)
        bucket: list[tuple[str, Tensor]] = []
        size = 0
        for name, tensor in weights:
            bucket.append((name, tensor.detach()))
            size += tensor.nbytes
            if size >= bucket_bytes:
                self._send_bucket(bucket)
                bucket, size = [], 0
        if bucket:
            self._send_bucket(bucket)
        self._send_text([])

    def receive_weights(self) -> tuple[dict[str, Fingerprint] | None, Iterator[tuple[str, Tensor]]]:
        """Returns the trainer's fingerprints and the pairs, all of which must be consumed."""
        expected = self._receive_text()
        if expected is not None:
            expected = {name: Fingerprint(*values) for name, values in expected.items()}
        return expected, self._receive_buckets()

    def _send_bucket(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        entries, total = [], 0
        for name, tensor in bucket:
            entries.append((name, [*tensor.shape], str(tensor.dtype).removeprefix("torch."), total))
            total += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._send_text(entries)
        flat = torch.zeros(total, dtype=torch.uint8, device=self._device)
        for (_, tensor), (*_, start) in zip(bucket, entries, strict=True):
            flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        self._broadcast(flat, self._data)

    def _receive_buckets(self) -> Iterator[tuple[str, Tensor]]:
        while entries := self._receive_text():
            tensors = [(name, shape, getattr(torch, dtype), start) for name, shape, dtype, start in entries]
            name, shape, dtype, start = tensors[-1]
            total = start + -(-_num_bytes(shape, dtype) // _ALIGNMENT) * _ALIGNMENT
            flat = torch.empty(total, dtype=torch.uint8, device=self._device)
            self._broadcast(flat, self._data)
            for name, shape, dtype, start in tensors:
                yield name, flat[start : start + _num_bytes(shape, dtype)].view(dtype).view(shape)

    def _send_text(self, content: Any) -> None:
        text = torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)
        self._broadcast(torch.tensor([text.numel()]), self._texts)
        self._broadcast(text, self._texts)

    def _receive_text(self) -> Any:
        length = torch.zeros(1, dtype=torch.int64)
        self._broadcast(length, self._texts)
        text = torch.empty(int(length), dtype=torch.uint8)
        self._broadcast(text, self._texts)
        return json.loads(text.numpy().tobytes())

    def _broadcast(self, tensor: Tensor, group: Any) -> None:
        """Sends trainer rank 0's tensor to all rollout ranks."""
        try:
            group.broadcast([tensor]).wait()
        except RuntimeError as error:
            if failure := self.peers.failure_soon():
                raise RankError(failure) from error
            raise RankError(f"The weight sync between trainer and rollout ranks broke off: {error}") from error
        self.num_bytes += tensor.nbytes


def _parts(key: str, content: bytes) -> list[str]:
    """Returns the keys of the parts of a value, if it was stored in parts."""
    if not content.startswith(_IN_PARTS):
        return []
    return [f"{key}/part/{number}" for number in range(int(content.removeprefix(_IN_PARTS)))]


def _num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return int(torch.Size(shape).numel() * dtype.itemsize)


# ---- The trainer's end -----------------------------------------------------------------------------------------------


class LinkEngine(InferenceEngine):
    """Engine of a trainer whose samples come from other ranks: it passes weights on and generates nothing."""

    sleep_levels = (0, 1, 2)

    def __init__(self, link: Link | None, *, max_model_len: int, vocab_size: int, bucket_bytes: int) -> None:
        """Takes the link; None on all trainer ranks but the first, which only help to gather the weights."""
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.expected: KnownWeights | None = None  # those of the next weights
        self._link = link
        self._bucket_bytes = bucket_bytes

    def load_weights(self, weights: NamedTensors, version: int) -> None:
        """Sends the weights to the rollout ranks, with the fingerprints that prove them."""
        if self._link is None:
            for _ in weights:
                pass
            return
        self._link.post({"do": "weights", "version": version})
        self._link.send_weights(weights, self.expected, self._bucket_bytes)

    def submit(self, prompt: AnyPrompt, params: SamplingParams) -> int:
        """Raises an error, because only rollout ranks generate."""
        raise RuntimeError("With --rollout_ranks a trainer has no engine of its own: ask the collector for samples.")

    def step(self) -> list[Completion]:
        """Returns nothing, as there are no requests."""
        return []

    def has_unfinished(self) -> bool:
        """Returns False, as there are no requests."""
        return False

    def abort(self, request_ids: Iterable[int] | None = None) -> list[Completion]:
        """Returns nothing, as there are no requests."""
        return []

    def sleep(self, level: int = 1) -> int:
        """Frees nothing, since only the trainer uses the device."""
        return 0

    def wake(self, part: EnginePart) -> None:
        """Takes no memory."""

    def close(self) -> None:
        """Does nothing: the link's owner closes it."""
