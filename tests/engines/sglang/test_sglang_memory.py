"""Memory of a GPU that SGLang's processes give back and take again, without SGLang and without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightrl.engines.sglang.engine import SGLangEngine

GIB = 1 << 30
SIZES = {"weights": 16 * GIB, "kv_cache": 20 * GIB, "cuda_graph": 0}


class Group:
    """A group of two ranks, of which the other one says the same, or what it is told to."""

    size, rank = 2, 0

    def __init__(self) -> None:
        self.other: Any = None

    def gather(self, item: Any) -> list[Any]:
        return [item, item if self.other is None else self.other]

    def broadcast(self, item: Any) -> Any:
        return item


class Device:
    """A GPU of 80 GiB with an awake engine, and a trainer that caches some memory."""

    def __init__(self) -> None:
        self.cached, self.trainer, self.asleep = 8 * GIB, 20 * GIB, set[str]()
        self.ended = False

    def free(self) -> int:
        engine = sum(size for tag, size in SIZES.items() if tag not in self.asleep)
        return 80 * GIB - engine - self.trainer - self.cached

    def empty_cache(self) -> None:
        self.cached = 0

    def release(self, tags: list[str]) -> None:
        self.asleep |= set(tags)

    def resume(self, tags: list[str]) -> None:
        self.ended |= sum(SIZES[tag] for tag in tags) > self.free()
        self.asleep -= set(tags)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch.cuda, "empty_cache", device.empty_cache)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (device.free(), 80 * GIB))
    monkeypatch.setattr(SGLangEngine, "_release", lambda _, tags: device.release(tags))
    monkeypatch.setattr(SGLangEngine, "_resume", lambda _, tags: device.resume(tags))
    monkeypatch.setattr(SGLangEngine, "_has_backup", False)
    return device


@pytest.fixture
def engine(device: Device) -> SGLangEngine:
    made = SGLangEngine.__new__(SGLangEngine)
    made._device, made._group = torch.device("cuda", 0), Group()  # type: ignore[assignment]
    made._is_closed, made._left, made._released, made._freed = False, {}, set(), {}
    return made


def test_the_bytes_of_both_devices_are_counted_once(engine: SGLangEngine) -> None:
    assert engine.sleep(1) == 2 * 20 * GIB
    assert engine.sleep(2) == 2 * 16 * GIB  # the cache sleeps already
    assert engine.sleep(2) == 0


def test_a_rank_waits_for_its_own_scheduler(
    engine: SGLangEngine, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang answers as soon as the first scheduler has released its memory."""
    free = iter([10 * GIB, 10 * GIB, 10 * GIB, 12 * GIB, 29 * GIB])  # before, after, and three later looks
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (next(free), 80 * GIB))
    monkeypatch.setattr(engine._group, "broadcast", lambda item: 20 * GIB if isinstance(item, int) else item)
    engine._group.other = 20 * GIB  # type: ignore[attr-defined]
    assert engine.sleep(1) == (19 + 20) * GIB


def test_memory_that_the_trainer_has_cached_goes_to_the_engine(engine: SGLangEngine, device: Device) -> None:
    """SGLang's scheduler would end for want of it, and the run with it."""
    engine.sleep(2)
    device.trainer, device.cached = 20 * GIB, 50 * GIB
    engine.wake("weights")
    device.cached = 30 * GIB
    engine.wake("kv_cache")
    assert (device.ended, device.asleep, device.cached) == (False, set(), 0)


def test_a_part_that_does_not_fit_is_an_error_that_can_be_repaired(engine: SGLangEngine, device: Device) -> None:
    engine.sleep(2)
    device.trainer = 50 * GIB
    engine.wake("weights")  # leaves 14 GiB
    with pytest.raises(torch.OutOfMemoryError, match=r"6\.00 GiB more"):
        engine.wake("kv_cache")
    assert (device.ended, device.asleep) == (False, {"cuda_graph", "kv_cache"})
    device.trainer = 20 * GIB
    engine.wake("kv_cache")
    assert (device.ended, device.asleep) == (False, set())


def test_every_rank_refuses_if_the_part_does_not_fit_on_one_device(engine: SGLangEngine, device: Device) -> None:
    engine.sleep(1)
    engine._group.other = 3 * GIB  # type: ignore[attr-defined]
    with pytest.raises(torch.OutOfMemoryError, match=r"3\.00 GiB more"):
        engine.wake("kv_cache")
    assert "kv_cache" in device.asleep
