from __future__ import annotations

from pathlib import Path

import pytest

from lightrl.data.class_labels import features_of, labelled_in, with_names
from lightrl.data.prompts import load_records

LABEL = {"names": ["A", "B"], "_type": "ClassLabel"}


def test_labels_are_named_wherever_they_are() -> None:
    features = {
        "answer": LABEL,
        "all": {"feature": LABEL, "_type": "List"},
        "old": [LABEL],
        "inner": {"kind": LABEL, "text": {"dtype": "string", "_type": "Value"}},
        "many": {"feature": {"kind": LABEL}, "_type": "Sequence"},
        "number": {"dtype": "int64", "_type": "Value"},
    }
    labelled = labelled_in(features)
    assert list(labelled) == ["answer", "all", "old", "inner", "many"]
    record = {
        "answer": 1, "all": [0, 1, None], "old": [1], "inner": {"kind": 0, "text": "t"}, "many": {"kind": [1, 0]},
        "number": 1,
    }  # fmt: skip
    assert with_names(record, labelled) == {
        "answer": "B", "all": ["A", "B", None], "old": ["B"], "inner": {"kind": "A", "text": "t"},
        "many": {"kind": ["B", "A"]}, "number": 1,
    }  # fmt: skip
    assert with_names({"answer": -1}, labelled) == {"answer": None}
    assert with_names({"many": [{"kind": 1}], "inner": None}, labelled) == {"many": [{"kind": "B"}], "inner": None}


@pytest.mark.parametrize("metadata", [None, {}, {b"huggingface": b"{"}, {b"huggingface": b"[]"}, {b"pandas": b"{}"}])
def test_other_files_have_no_features(metadata: dict[bytes, bytes] | None) -> None:
    assert features_of(metadata) == {}


def test_a_data_set_of_any_form_gives_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    features = datasets.Features(prompt=datasets.Value("string"), answer=datasets.ClassLabel(names=["no", "yes"]))
    data = datasets.Dataset.from_dict({"prompt": ["a", "b", "c"], "answer": [1, 0, None]}, features=features)
    data.save_to_disk(tmp_path / "saved")
    data.to_parquet(tmp_path / "a.parquet")
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **named: data)
    for source in (str(tmp_path / "saved"), str(tmp_path / "a.parquet"), "hf:me/data"):
        for stream in (False, True):
            records = [record for record, _ in load_records(source, stream=stream)]
            assert [record["answer"] for record in records] == ["yes", "no", None]
