"""The limits on the shape of the package, and the program that measures it."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from loaded_file import load_file

from lightrl import comm, seeding

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def house() -> ModuleType:
    return load_file(ROOT / "benchmarks" / "house.py")


def test_no_file_is_longer_than_a_reader_can_hold(house: ModuleType) -> None:
    sizes = house.file_sizes()
    assert {path: size for path, size in sizes.items() if size > house.MAX_FILE_LINES} == {}


def test_no_function_is_longer_than_one_explanation(house: ModuleType) -> None:
    assert {name: size for name, size in house.function_sizes().items() if size > house.MAX_FUNCTION_LINES} == {}


def test_the_strategy_stays_a_class_that_one_can_read(house: ModuleType) -> None:
    (base,) = [figures for figures in house.classes_in("lightrl/strategy/") if figures.name == "StrategyBase"]
    assert base.lines <= house.MAX_STRATEGY_LINES
    assert len(base.own_names) <= house.MAX_STRATEGY_NAMES, sorted(base.own_names)


def test_no_modules_import_each_other_not_even_for_types(house: ModuleType) -> None:
    assert house.cycles(house.import_graph()) == []


def test_no_more_passages_are_written_twice(house: ModuleType) -> None:
    pairs = house.duplicates()
    assert len(pairs) <= house.MAX_DUPLICATES, pairs


def test_every_definition_is_used_or_explained(house: ModuleType) -> None:
    assert house.unexplained_names() == []
    assert [pattern for pattern, reason in house.allowed_names().items() if not reason] == []
    assert house.idle_patterns() == []


@pytest.mark.slow
def test_a_plain_run_stays_short_to_read(house: ModuleType) -> None:
    """Options attach where they are asked for; `benchmarks/reach.py --list` prints what a run enters."""
    files, functions, lines = house.reach()
    assert functions > 300, "the run was not measured"
    assert files <= house.MAX_REACHED_FILES
    assert lines <= house.MAX_REACHED_LINES


# ---- The measurements themselves


def test_a_cycle_is_a_group_that_reaches_itself(house: ModuleType) -> None:
    assert house.cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == [["b", "c"]]


def test_functions_are_listed_in_the_order_of_their_first_call() -> None:
    outer, inner, deepest, imported = (
        function.__code__ for function in (seeding.mix_seed, seeding.prefix_state, seeding.uniform_array, comm.connect)
    )
    reach = load_file(ROOT / "benchmarks" / "reach.py")
    lines = reach.in_order({imported: -1, outer: 0, inner: 1, deepest: 2}, deepest=1)
    assert lines == [
        f"mix_seed  seeding.py:{outer.co_firstlineno}",
        f"  prefix_state  seeding.py:{inner.co_firstlineno}",
    ]


def test_equal_passages_are_reported_once(house: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "".join(f"    x{i} = {i}\n" for i in range(7))
    (tmp_path / "lightrl").mkdir()
    (tmp_path / "lightrl" / "one.py").write_text(f'def first():\n    """Says one thing."""\n{body}')
    (tmp_path / "lightrl" / "two.py").write_text(f"import one\n\ndef second():\n{body}    # and more\n    return 1\n")
    monkeypatch.setattr(house, "ROOT", tmp_path)
    monkeypatch.setattr(house, "PACKAGE", tmp_path / "lightrl")
    house.sources.cache_clear()
    assert house.duplicates() == [house.Duplicate("lightrl/one.py:3", "lightrl/two.py:4", 7)]
    house.sources.cache_clear()


def test_the_table_has_its_place_on_the_page(house: ModuleType) -> None:
    page = house.PAGE.read_text()
    assert page.index(house.BEGIN) < page.index("| Figure | Now | Limit or goal |") < page.index(house.END)


def test_the_table_lists_the_classes_that_there_are(house: ModuleType) -> None:
    """A new or renamed class of the strategy asks for `make house`; small classes may wait for the next one."""
    page = house.PAGE.read_text()
    table = page[page.index(house.BEGIN) : page.index(house.END)]
    listed = {name for line in table.splitlines() if line.startswith("| `") for name in [line.split("`")[1]]}
    figures = house.classes_in("lightrl/strategy/")
    assert listed <= {item.name for item in figures}
    assert {item.name for item in figures if item.lines > 60} <= listed
