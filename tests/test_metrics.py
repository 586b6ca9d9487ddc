import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from lightrl import metrics
from lightrl.comm import Comm
from lightrl.metrics import Statistics, Stopwatch, memory_in_use
from lightrl.testing import run_program


def test_means_are_of_sums_over_calls() -> None:
    statistics = Statistics()
    statistics.mean("loss", 6.0, 2)
    statistics.mean("loss", 0.0, 1)
    statistics.mean("never", 0.0, 0)
    statistics.add("tokens", 3)
    statistics.add("tokens", 4)
    statistics.maximum("longest", 2)
    statistics.maximum("longest", 1)
    statistics.minimum("shortest", 2)
    statistics.minimum("shortest", 3)
    assert statistics.reduce(Comm()) == {
        "loss": 2.0,
        "shortest": 2.0,
        "longest": 2.0,
        "never": 0.0,
        "tokens": 7.0,
    }  # (6 + 0) / (2 + 1)
    assert statistics.reduce(Comm()) == {}


@pytest.mark.parametrize("values", [[math.nan], [math.nan, 1.0], [1.0, math.nan]])
def test_an_extremum_of_nan_is_nan(values: list[float]) -> None:
    statistics = Statistics()
    for value in values:
        statistics.maximum("longest", value)
        statistics.minimum("shortest", value)
    assert all(map(math.isnan, statistics.reduce(Comm()).values()))


def test_what_is_not_to_count_is_forgotten() -> None:
    statistics = Statistics()
    statistics.add("tokens", 3)
    with statistics.kept():
        statistics.add("tokens", 4)
        statistics.maximum("longest", 2)
    statistics.add("tokens", 1)
    assert statistics.reduce(Comm()) == {"tokens": 4.0}


def test_a_stopwatch_adds_up_and_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([1.0, 3.0, 10.0, 14.5])
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: next(moments)))
    watch = Stopwatch()
    for _ in range(2):
        with watch.measure("a"):
            pass
    assert watch.take() == {"a": 6.5}  # 2 + 4.5
    assert watch.take() == {}


@pytest.mark.parametrize("is_used", [True, False])
def test_a_stopwatch_waits_only_for_a_gpu_in_use(is_used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_used)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(True))
    with Stopwatch().measure("a"):
        pass
    assert len(waited) == is_used


def test_what_a_stopwatch_measures_is_a_span() -> None:
    opened: list[str] = []

    @contextmanager
    def span(name: str) -> Iterator[None]:
        opened.append(name)
        yield

    watch = Stopwatch(span)
    with watch.measure("time/learn"):
        assert opened == ["time/learn"]
    assert list(watch.take()) == ["time/learn"]


def test_memory_in_use_is_that_of_this_process_now() -> None:
    # Mapped memory in a process of its own: what an allocator frees after other tests may stay with the allocator.
    program = (
        "import mmap\n"
        "from lightrl import metrics\n"
        "held = mmap.mmap(-1, 200_000_000)\n"
        "held.write(bytes(200_000_000))\n"
        "most = metrics.memory_in_use()['memory/host_gb']\n"
        "held.close()\n"
        "print(most, metrics.memory_in_use()['memory/host_gb'], metrics._peak_bytes() / 1e9)\n"
    )
    most, after, peak = map(float, run_program([sys.executable, "-c", program], timeout_s=120).split())
    assert 0.15 < most - after < 0.25
    assert most < peak + 0.01  # the peak is what is reported where there is no /proc


def test_the_peak_of_memory_is_counted_in_bytes_on_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = metrics._peak_bytes()
    monkeypatch.setattr("os.uname", lambda: SimpleNamespace(sysname="Darwin"))
    assert metrics._peak_bytes() == pytest.approx(peak / 1024, rel=0.01)


def test_memory_in_use_counts_that_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("is_available", True),
        ("memory_allocated", 2_000_000_000),
        ("memory_reserved", 3_000_000_000),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    used = memory_in_use()
    assert (used["memory/device_gb"], used["memory/device_reserved_gb"]) == (2.0, 3.0)


def test_what_one_process_took_another_can_merge() -> None:
    there, here = Statistics(), Statistics()
    for statistics, factor in ((there, 1.0), (here, 3.0)):
        statistics.mean("mean", 4 * factor, 2)
        statistics.add("sum", factor)
        statistics.maximum("max", factor)
        statistics.minimum("min", factor)
    here.merge(there.take())
    assert there.take() == {}
    assert here.take() == {
        "mean": ("mean", 16.0, 4.0),
        "sum": ("sum", 4.0, 0.0),
        "max": ("max", 3.0, 0.0),
        "min": ("min", 1.0, 0.0),
    }


def test_a_name_has_one_kind() -> None:
    statistics = Statistics()
    statistics.mean("loss", 1.0, 1)
    with pytest.raises(ValueError, match="The metric loss is a mean already and no sum: give one of them another name"):
        statistics.add("loss", 1.0)
    assert statistics.reduce(Comm()) == {"loss": 1.0}
