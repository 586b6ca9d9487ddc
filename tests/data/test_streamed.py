import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightrl.builtin.model import builtin_tokenizer
from lightrl.data.examples import ExampleBuilder, ExampleFields, keep_fitting
from lightrl.data.json_records import LocatedRecord
from lightrl.data.prompts import build_prompts, load_records, require_field
from lightrl.data.streamed import Streamed, chain, make_each, select, stream_lines


def write(path: Path, *lines: str) -> str:
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def sums(first: int, last: int) -> list[str]:
    return [json.dumps({"prompt": f"{left}+7=", "answer": str(left + 7), "level": left}) for left in range(first, last)]


def test_an_item_is_made_each_time_it_is_asked_for() -> None:
    made: list[int] = []
    items = Streamed(5, lambda index: made.append(index) or 10 * index)
    assert (items[3], items[-1], list(items[1:4]), list(items)) == (30, 40, [10, 20, 30], [0, 10, 20, 30, 40])
    assert made == [3, 4, 1, 2, 3, 0, 1, 2, 3, 4]
    with pytest.raises(IndexError):
        items[5]


def test_the_verbs_keep_lists_as_lists_and_streams_as_streams() -> None:
    stream = Streamed(3, lambda index: "abc"[index])
    for items in (["a", "b", "c"], stream):
        made = make_each(items, lambda index, item: f"{index}{item}")
        chosen, all_parts = select(items, [2, 2, 0]), chain([items, ["x"], [], items])
        assert (list(made), list(chosen)) == (["0a", "1b", "2c"], ["c", "c", "a"])
        assert list(all_parts) == [*"abcxabc"]
        assert all_parts[-2] == "b"
        assert {isinstance(result, Streamed) for result in (made, chosen, all_parts)} == {items is stream}


def test_lines_keep_their_numbers_over_blank_ones_and_the_end_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"\n one\n\n \ntwo\r\n\xc3\xa4")
    lines = stream_lines(path, lambda line, where: (line, where.rpartition(":")[2]))
    assert list(lines) == [(b" one\n", "2"), (b"two\r\n", "5"), (b"\xc3\xa4", "6")]


def test_a_file_that_has_changed_is_named(tmp_path: Path) -> None:
    (path := tmp_path / "lines").write_bytes(b"one\ntwo\n")
    lines = stream_lines(path, lambda line, _: line)
    assert lines[1] == b"two\n"
    path.write_bytes(b"one\nand two\n")
    with pytest.raises(ValueError, match="lines has changed since the run began"):
        lines[1]


@pytest.fixture
def sources(tmp_path: Path) -> list[str]:
    """Data sets of several kinds: a file, a pattern, a sum with shares, and one that is made in memory."""
    first = write(tmp_path / "part-1.jsonl", *sums(1, 9))
    write(tmp_path / "part-0.jsonl", *sums(9, 14), "")
    pattern = str(tmp_path / "part-*.jsonl")
    return [first, pattern, f"{pattern}*1.5 + {first}*0.5", f"{first} + builtin:addition*0.01"]


def test_streamed_prompts_are_those_of_memory_in_the_same_order(sources: list[str]) -> None:
    tokenizer = builtin_tokenizer()
    for source in sources:
        kept, streamed = load_records(source), load_records(source, stream=True)
        assert isinstance(streamed, Streamed)
        assert list(streamed) == kept
        require_field(streamed, "level", "--x")
        prompts = build_prompts(streamed, tokenizer, max_prompt_tokens=20)
        assert isinstance(prompts, Streamed)
        assert list(prompts) == build_prompts(kept, tokenizer, max_prompt_tokens=20)
    shards = [where.rpartition("/")[2] for _, where in load_records(sources[1])]
    assert shards == [*(f"part-0.jsonl:{line}" for line in range(1, 6)), *(f"part-1.jsonl:{n}" for n in range(1, 9))]


def test_a_pattern_that_names_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a pattern, no file matches it"):
        load_records(str(tmp_path / "*.jsonl"), stream=True)
    with pytest.raises(FileNotFoundError, match=r"There is no data set .*part-\?.jsonl"):
        load_records(str(tmp_path / "part-?.jsonl"))


def test_a_bad_line_is_named_when_it_is_read(tmp_path: Path) -> None:
    source = write(tmp_path / "data.jsonl", *sums(1, 3), "{", *sums(3, 5))
    streamed = load_records(source, stream=True)
    assert streamed[3][1] == f"{source}:4"
    with pytest.raises(ValueError, match=r"data\.jsonl:3: not valid JSON"):
        list(build_prompts(streamed, builtin_tokenizer(), max_prompt_tokens=20))


def test_an_array_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.json is one JSON array, which --data.stream cannot read in parts"):
        load_records(write(tmp_path / "data.json", '[{"prompt": "1+1="}]'), stream=True)


def test_rows_of_datasets_stay_in_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = datasets.Dataset.from_list([json.loads(line) for line in sums(1, 6)])
    rows.to_parquet(str(tmp_path / "data.parquet"))
    rows.save_to_disk(str(tmp_path / "saved"))
    for name in ("data.parquet", "saved"):
        source = str(tmp_path / name)
        streamed: object = load_records(source, stream=True)
        assert isinstance(streamed, Streamed)
        assert list(streamed) == load_records(source)
    with pytest.raises(ValueError, match=r"bad\.parquet: not a valid Parquet file"):
        load_records(write(tmp_path / "bad.parquet", "no"), stream=True)


def test_streamed_examples_skip_what_is_too_long(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": "1+1=", "response": "2" * length}) for length in (1, 30, 2)]
    source = write(tmp_path / "data.jsonl", *lines)
    builder = ExampleBuilder(builtin_tokenizer(), ExampleFields())

    def fitting(records: list[LocatedRecord]) -> tuple[list[object], int]:
        kept, num_skipped = keep_fitting(builder.responses(records), max_tokens=20, too_long="skip")
        return list(kept), num_skipped

    assert fitting(load_records(source, stream=True)) == fitting(load_records(source))
    assert fitting(load_records(source, stream=True))[1] == 1


_MEASURE = """
import sys
from pathlib import Path
from lightrl.builtin.model import builtin_tokenizer
from lightrl.data.prompts import build_prompts, load_records

def peak():  # kB; other than ru_maxrss it does not begin with that of the process before
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])

tokenizer, before = builtin_tokenizer(), peak()
prompts = build_prompts(load_records(sys.argv[1], stream=sys.argv[2] == "True"), tokenizer, max_prompt_tokens=20)
assert max(prompt.num_tokens for prompt in prompts) == 5 and len(prompts) == 4000
print(peak() - before)
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory of a process as Linux tells it")
def test_streamed_data_do_not_stay_in_memory(tmp_path: Path) -> None:
    """80 MB of records: of more than 80 MB of memory, a stream takes less than a tenth."""
    text = "x" * 20_000
    lines = [json.dumps({"prompt": f"{line % 90}+7=", "note": text}) for line in range(4000)]
    source = write(tmp_path / "data.jsonl", *lines)
    grown = {}
    for stream in (False, True):
        command = [sys.executable, "-c", _MEASURE, source, str(stream)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        grown[stream] = int(done.stdout) * 1024
    assert grown[False] > 80_000_000
    assert grown[True] < 8_000_000
