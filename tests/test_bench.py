"""The command that compares benchmarks with their baselines."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from loaded_file import load_file

ROOT = Path(__file__).parents[1]
OUTPUTS = {
    "sync": (
        "single    x1      3.2 MB float32 : sync   7.72 ms (7.73 of a core), memcpy  1.22 ms (1.23), ratio   9.0 (6.3)",
        {"sync: 3.2 MB float32": 6.3},
    ),
    "packing": ("packed       0.120     0.118      1.90      2.10\n", {"packing: packed": 2.1}),
    "shared_prompts": (
        "    64     1024 ->   576       0.52 ->    0.31 =  1.66x      1.0 ->     0.5 =  2.00x   1e-7   2e-6",
        {"shared_prompts: 64": 1.66},
    ),
    "learn_floor": ("toy       1.25     50.1   0.0250   0.0500   2.00    0.0400   1.60", {"learn_floor: toy": 2.0}),
    "decode": (
        "toy: equal lengths, 64 requests       4096      600.0     1200.0       6826       3413    2.00x    2.10x",
        {"decode: toy: equal lengths, 64 requests": 2.1},
    ),
    "soak": (
        "from step 100 to 500: RSS +5.2 MiB, Python +0.25 MiB, ratio 1.010",
        {"soak: from step 100 to 500": 1.01},
    ),
}


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_file(ROOT / "benchmarks" / "bench.py")


def test_the_ratio_of_cpu_seconds_is_read_from_each_program(bench: ModuleType) -> None:
    assert set(OUTPUTS) == set(bench.BENCHMARKS)
    for name, (output, expected) in OUTPUTS.items():
        assert bench.ratios_in(name, f"some title\n{output}\n") == expected


def test_slower_is_judged_in_the_direction_of_the_benchmark(bench: ModuleType) -> None:
    known = {"sync: a": {"ratio": 2.0}, "decode: b": {"ratio": 2.0, "tolerance": 0.1}}
    assert bench.verdict("sync: a", 2.5, known) == ""
    assert bench.verdict("sync: a", 2.7, known) == "slower"  # above 2.0 x 1.3
    assert bench.verdict("decode: b", 1.9, known) == ""
    assert bench.verdict("decode: b", 1.8, known) == "slower"  # below 2.0 / 1.1
    assert bench.verdict("decode: c", 9.0, known) == "new"


def test_the_baselines_belong_to_benchmarks(bench: ModuleType) -> None:
    for ratios in json.loads(bench.BASELINES.read_text()).values():
        assert {name.partition(":")[0] for name in ratios} <= set(bench.BENCHMARKS)


def test_baselines_are_compared_on_the_same_processor_only(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "BASELINES", tmp_path / "baselines.json")
    bench.BASELINES.write_text(json.dumps({"another": {"packing: packed": {"ratio": 9.0}}}))
    monkeypatch.setattr(bench, "measure", lambda name: {"packing: packed": 2.0})
    monkeypatch.setattr(sys, "argv", ["bench.py", "--only", "packing"])
    bench.main()
    assert f"no ratios of this processor, {bench.processor()}" in capsys.readouterr().out
    known = {bench.processor(): {"packing: packed": {"ratio": 9.0}}}
    bench.BASELINES.write_text(json.dumps(known))
    with pytest.raises(SystemExit, match="packing: packed"):
        bench.main()
    monkeypatch.setattr(sys, "argv", ["bench.py", "--only", "packing", "--update"])
    bench.main()
    assert json.loads(bench.BASELINES.read_text()) == {bench.processor(): {"packing: packed": {"ratio": 2.0}}}
