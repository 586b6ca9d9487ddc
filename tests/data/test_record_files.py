from __future__ import annotations

import gzip
import sys
from pathlib import Path

import pytest

from lightrl.data import record_files
from lightrl.data.prompts import load_records


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_json_lines_keep_their_line_numbers_over_blank_lines(tmp_path: Path) -> None:
    source = write(tmp_path / "data.jsonl", '{"prompt": "a"}\n\n{"prompt": "\u00e9", "answer": 2}\n')
    assert load_records(source) == [
        ({"prompt": "a"}, f"{source}:1"),
        ({"prompt": "\u00e9", "answer": 2}, f"{source}:3"),
    ]


def test_a_json_file_holds_lines_or_an_array(tmp_path: Path) -> None:
    lines = write(tmp_path / "lines.json", '{"prompt": "a"}\n{"prompt": "b"}')
    array = write(tmp_path / "array.json", '\n [{"prompt": "a"},\n {"prompt": "b"}]')
    assert [record for record, _ in load_records(lines)] == [{"prompt": "a"}, {"prompt": "b"}]
    assert load_records(array) == [({"prompt": "a"}, f"{array}: row 1"), ({"prompt": "b"}, f"{array}: row 2")]


TEXTS = {
    "a.jsonl": '{"prompt": "a", "answer": "1"}\n\n{"prompt": "b", "answer": "2"}\n',
    "a.ndjson": '{"prompt": "a", "answer": "1"}\n\n{"prompt": "b", "answer": "2"}',
    "a.json": '[{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]',
    "a.csv": "prompt,answer\na,1\nb,2\n",
    "a.tsv": "prompt\tanswer\r\na\t1\r\nb\t2\r\n",
}


@pytest.mark.parametrize("name", list(TEXTS))
@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_a_text_file_may_be_compressed(name: str, ending: str, tmp_path: Path) -> None:
    path, text = tmp_path / f"{name}{ending}", TEXTS[name].encode()
    if ending == ".zst":
        pa = pytest.importorskip("pyarrow")
        with pa.output_stream(path, compression="zstd") as file:
            file.write(text)
    else:
        path.write_bytes(gzip.compress(text) if ending else text)
    wheres = [f"{path}:1", f"{path}:3"] if name in ("a.jsonl", "a.ndjson") else [f"{path}: row 1", f"{path}: row 2"]
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    assert load_records(str(path)) == list(zip(rows, wheres, strict=True))
    if name == "a.ndjson" and not ending:
        assert list(load_records(str(path), stream=True)) == load_records(str(path))
    if ending:
        path.write_bytes(path.read_bytes()[:-4])
        with pytest.raises(ValueError, match=rf"{name}{ending}: not a whole compressed file \(.*\)\."):
            load_records(str(path))
        path.write_bytes(text)
        with pytest.raises(ValueError, match=rf"{name}{ending}: not a whole compressed file"):
            load_records(str(path))


def test_a_compressed_file_is_not_streamed(tmp_path: Path) -> None:
    (path := tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(TEXTS["a.jsonl"].encode()))
    with pytest.raises(
        ValueError, match=r"a\.jsonl\.gz is compressed, and --data.stream cannot read that in parts: unpack"
    ):
        load_records(str(path), stream=True)


def test_a_byte_order_mark_is_not_part_of_the_data(tmp_path: Path) -> None:
    for name in ("data.jsonl", "data.json"):
        source = write(tmp_path / name, '\ufeff{"prompt": "a"}' if name == "data.jsonl" else '\ufeff[{"prompt": "a"}]')
        assert [record for record, _ in load_records(source)] == [{"prompt": "a"}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', r"data.jsonl:2: not valid JSON \(.*\). Each line must be one JSON object."),
        ('["a"]', "data.jsonl:2: a record is of type list. It must be a JSON object"),
        ("3", "data.jsonl:2: a record is of type int"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    source = write(tmp_path / "data.jsonl", '{"prompt": "a"}\n' + line + '\n{"prompt": "c"}\n')
    with pytest.raises(ValueError, match=message):
        load_records(source)


def test_a_bad_row_of_an_array_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="data.json: row 2: a record is of type str"):
        load_records(write(tmp_path / "data.json", '[{"prompt": "a"}, "b"]'))
    with pytest.raises(ValueError, match="data.json: not valid JSON"):
        load_records(write(tmp_path / "data.json", '[{"prompt": "a"}'))


def test_bytes_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(ValueError, match="data.jsonl:1: not UTF-8 text .*Save the file as UTF-8"):
        load_records(str(path))


def test_a_missing_file_names_what_is_accepted(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"no.jsonl: there is no such file. A data set is a .jsonl, .*builtin:addition-heldout"
    ):
        load_records(str(tmp_path / "no.jsonl"))


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ends in '.xlsx'. A data set is"):
        load_records(write(tmp_path / "data.xlsx", "prompt"))


@pytest.mark.parametrize(
    ("name", "text"),
    [("data.jsonl", "\n \n"), ("data.json", "[]"), ("data.json", ""), ("data.csv", ""), ("data.csv", "prompt\n")],
)
def test_an_empty_data_set_is_refused(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(ValueError, match="is empty"):
        load_records(write(tmp_path / name, text))


def test_parquet(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "data.parquet"
    records = [{"messages": [{"role": "user", "content": "add"}], "prompt": None}, {"messages": None, "prompt": "two"}]
    parquet.write_table(pa.Table.from_pylist(records), path)
    assert load_records(str(path)) == [(records[0], f"{path}: row 1"), (records[1], f"{path}: row 2")]
    with pytest.raises(ValueError, match="bad.parquet: not a valid Parquet file"):
        load_records(write(tmp_path / "bad.parquet", "not parquet"))


def test_a_table_names_its_fields_in_the_first_row(tmp_path: Path) -> None:
    """A quoted value keeps its commas, quotes and line breaks; an empty one is left out; a blank line is no row."""
    text = 'prompt,answer\r\n"1, 2\nand ""3""?",6\r\n\r\n4+4=,\r\n'
    source = write(tmp_path / "data.csv", "\ufeff" + text)
    assert load_records(source) == [
        ({"prompt": '1, 2\nand "3"?', "answer": "6"}, f"{source}: row 1"),
        ({"prompt": "4+4=", "answer": None}, f"{source}: row 2"),
    ]
    tabs = write(tmp_path / "data.tsv", "prompt\tanswer\n1,2\t3\n")
    assert load_records(tabs) == [({"prompt": "1,2", "answer": "3"}, f"{tabs}: row 1")]
    long = "a" * 200_000
    assert load_records(write(tmp_path / "long.csv", f"prompt\n{long}\n"))[0][0] == {"prompt": long}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt,answer\n1+1=,2,3\n", r"data\.csv: row 1 has 3 values for 2 fields\."),
        ("prompt,answer\n1+1=,2\n2+2=\n", r"data\.csv: row 2 has 1 values for 2 fields\."),
        ("prompt,prompt\n1,2\n", r"the first row must name each field once, and it is \['prompt', 'prompt'\]\."),
        ("prompt,\n1,2\n", r"the first row must name each field once"),
        ('prompt\n"1+1=\n', r"data\.csv: not a valid table \(unexpected end of data\)\. Check the quotes"),
        ("prompt\n\udcff\n", r"data\.csv: not UTF-8 text .*Save the file as UTF-8"),
    ],
)
def test_a_table_that_cannot_be_read_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ValueError, match=message):
        load_records(str(tmp_path / "data.csv"))


def test_a_table_is_not_streamed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.csv is a table in text, which --data.stream cannot read in parts"):
        load_records(write(tmp_path / "data.csv", "prompt\n1+1=\n"), stream=True)


def test_a_directory_saved_by_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}])
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=data, test=data.select([0])).save_to_disk(tmp_path / "splits")
    datasets.DatasetDict(dev=data, test=data).save_to_disk(tmp_path / "no_train")
    for name in ("one", "splits"):
        source = str(tmp_path / name)
        assert load_records(source) == [
            ({"prompt": "a", "answer": "1"}, f"{source}: row 1"),
            ({"prompt": "b", "answer": "2"}, f"{source}: row 2"),
        ]
    with pytest.raises(ValueError, match="has the splits dev, test and none is train"):
        load_records(str(tmp_path / "no_train"))


@pytest.mark.parametrize("kind", ["torch", "numpy", "pandas"])
def test_the_format_that_a_saved_data_set_has_changes_nothing(tmp_path: Path, kind: str) -> None:
    datasets = pytest.importorskip("datasets")
    if kind == "pandas":
        pytest.importorskip("pandas")
    record = {"prompt": "a", "answer": 7, "tests": ["x"]}
    datasets.Dataset.from_list([record]).with_format(kind, columns=["answer"]).save_to_disk(tmp_path / "saved")
    for stream in (False, True):
        ((loaded, _),) = list(load_records(str(tmp_path / "saved"), stream=stream))
        assert loaded == record
        assert [type(value) for value in loaded.values()] == [str, int, list]


def test_a_directory_of_data_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    with pytest.raises(ValueError, match="holds no data set that datasets can read"):
        load_records(str(tmp_path / "data"))
    write(tmp_path / "data" / "train.jsonl", '{"prompt": "a"}\n')
    assert [record for record, _ in load_records(str(tmp_path / "data"))] == [{"prompt": "a"}]
    (tmp_path / "mixed").mkdir()
    write(tmp_path / "mixed" / "a.jsonl", '{"prompt": "a"}\n')
    write(tmp_path / "mixed" / "b.jsonl", '{"question": "b"}\n')
    with pytest.raises(
        ValueError, match=r"generating the dataset: Couldn't cast question: string .*names don't match\.$"
    ):
        load_records(str(tmp_path / "mixed"))


@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        ("hf:openai/gsm8k/main:test", ("openai/gsm8k", "main", "test")),
        ("hf:openai/gsm8k", ("openai/gsm8k", None, "train")),
        ("hf:squad:validation[:10]", ("squad", None, "validation[:10]")),
    ],
)
def test_a_hub_name_is_taken_apart(
    monkeypatch: pytest.MonkeyPatch, source: str, arguments: tuple[str, str | None, str]
) -> None:
    datasets = pytest.importorskip("datasets")
    calls = []

    def load_dataset(name: str, config: str | None, split: str) -> object:
        calls.append((name, config, split))
        return datasets.Dataset.from_list([{"prompt": "a"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_records(source) == [({"prompt": "a"}, f"{source}: row 1")]
    assert calls == [arguments]


@pytest.mark.parametrize(
    ("name", "header", "told"),
    [
        ("a.csv", "prompt;answer", "those of a .csv file are separated by ','"),
        ("a.tsv", "prompt,answer", "those of a .tsv file are separated by '\\t'"),
        ("a.csv", "prompt", ""),
        ("a.csv", "prompt,answer; or none", ""),
        ("a.csv", '"prompt, with a comma"', ""),
    ],
)
def test_a_table_that_something_else_separates_is_read_with_a_warning(
    name: str, header: str, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cells = header.replace("prompt", "1").replace("answer", "2")
    records = load_records(write(tmp_path / name, f"{header}\n{cells}\n"))
    assert told in caplog.text
    assert bool(caplog.text) == bool(told)
    assert len(records) == 1


@pytest.mark.parametrize("reason", ["", "no route"])
def test_without_a_network_a_hub_name_is_looked_for_in_the_cache_at_once(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(record_files, "why_unreachable", lambda: reason)
    seen = []

    def load_dataset(*args: object, **kwargs: object) -> object:
        seen.append(datasets.config.HF_HUB_OFFLINE)
        return datasets.Dataset.from_list([{"prompt": "1+1="}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(load_records("hf:me/data")) == 1
    assert (seen, datasets.config.HF_HUB_OFFLINE) == ([bool(reason)], False)


@pytest.mark.parametrize("end", ["", "."])
def test_a_hub_name_that_does_not_load_says_how_it_is_written(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    datasets = pytest.importorskip("datasets")

    def load_dataset(*args: object, **kwargs: object) -> None:
        raise FileNotFoundError(f"Dataset 'nobody/nothing' doesn't exist{end}")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=r"Cannot load hf:nobody/nothing: Dataset .* exist\. The form is hf:OWNER"):
        load_records("hf:nobody/nothing")
    with pytest.raises(ValueError, match="hf: names no data set"):
        load_records("hf:")


@pytest.mark.parametrize(
    ("module", "source"),
    [("pyarrow", "data.parquet"), ("pyarrow", "data.json.zst"), ("datasets", "."), ("datasets", "hf:squad")],
)
def test_without_the_library_the_error_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, source: str
) -> None:
    write(tmp_path / "data.parquet", "")
    write(tmp_path / "data.json.zst", "")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r'pip install "lightrl\[datasets\]"'):
        load_records(source)
