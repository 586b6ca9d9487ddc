import json
from pathlib import Path

import pytest

from lightrl.data.mixture import Part, parts_of
from lightrl.data.prompts import held_out_of, load_records


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("a.jsonl", [Part("a.jsonl", 1)]),
        ("a.jsonl*2", [Part("a.jsonl", 2)]),
        ("a.jsonl + b.jsonl*3", [Part("a.jsonl", 1), Part("b.jsonl", 3)]),
        ("hf:x/y:train+builtin:addition", [Part("hf:x/y:train", 1), Part("builtin:addition", 1)]),
    ],
)
def test_data_sets_add_up(source: str, parts: list[Part]) -> None:
    assert parts_of(source) == parts


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a.jsonl + ", "has a part without a name"),
        ("*2", "has a part without a name"),
        ("a.jsonl*0", "behind . stands a number above 0, .* not '0'"),
        ("a.jsonl*-1 + b.jsonl", "not '-1'"),
        ("a.jsonl*nan + b.jsonl", "not 'nan'"),
        ("a.jsonl*inf", "not 'inf'"),
        ("data/*.jsonl", "If 'data/.*jsonl' is a pattern, no file matches it"),
    ],
)
def test_bad_sums_are_refused(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parts_of(source)


@pytest.mark.parametrize(("times", "size"), [(0.5, 5), (0.01, 1), (1, 10), (1.25, 13), (2, 20)])
def test_a_share_takes_a_part_of_the_records(times: float, size: int) -> None:
    """1.25 of ten records: all ten, and three of them (2.5, rounded up) again."""
    taken = Part("a.jsonl", times).take(list(range(10)))
    assert len(taken) == size
    assert taken == Part("a.jsonl", times).take(list(range(10)))
    assert all(taken.count(record) in (int(times), int(times) + 1) for record in range(10))
    more = taken[int(times) * 10 :]
    assert more == sorted(more)
    if times != int(times):
        assert more != [*range(len(more))]  # from all of the records, not the first


def test_a_sum_keeps_back_what_its_built_in_parts_do() -> None:
    assert held_out_of("builtin:addition") == "builtin:addition-heldout"
    assert held_out_of("a.jsonl") == ""
    assert held_out_of("builtin:addition*0.5 + a.jsonl*2") == "builtin:addition-heldout"


def test_a_sum_may_be_longer_than_the_name_of_a_file() -> None:
    source = " + ".join(["builtin:addition"] * 20)  # 377 characters, and a name has at most 255
    assert len(load_records(source)) == 20 * len(load_records("builtin:addition"))
    assert len(parts_of(held_out_of(source))) == 20


def test_a_file_may_have_the_signs_in_its_name(tmp_path: Path) -> None:
    path = tmp_path / "a+b*2.jsonl"
    path.write_text("{}")
    assert parts_of(str(path)) == [Part(str(path), 1)]


def test_records_say_where_they_are_from_and_stand_as_often_as_asked(tmp_path: Path) -> None:
    for name, prompts in (("a", "pq"), ("b", "r")):
        sources: dict[str, dict[str, object]] = {"p": {"source": None}, "q": {"source": "own"}, "r": {}}
        lines = [json.dumps({"prompt": prompt, **sources[prompt]}) for prompt in prompts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    a, b = str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")
    p, q, r = {"source": a, "prompt": "p"}, {"source": "own", "prompt": "q"}, {"source": b, "prompt": "r"}
    assert load_records(f"{a} + {b}*3") == [(p, f"{a}:1"), (q, f"{a}:2"), *[(r, f"{b}:1")] * 3]
    assert [record["prompt"] for record, _ in load_records(f"{a}*2")] == ["p", "q", "p", "q"]
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"empty.jsonl is empty"):
        load_records(f"{a} + {tmp_path / 'empty.jsonl'}")
