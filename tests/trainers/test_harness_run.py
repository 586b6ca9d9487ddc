"""`lightrl lm-eval`: tasks of the real lm-evaluation-harness on a folder of the built-in model, without a network."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightrl.builtin.model import builtin_model_path
from lightrl.trainers.harness_run import main

TASK = """\
task: two_sums
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{sum}}}}="
doc_to_choice: ["5", "7"]
doc_to_target: label
target_delimiter: ""
metric_list:
  - metric: acc
"""
SUMS = [("2+3", 0), ("3+4", 1), ("1+4", 1), ("5+2", 0)]


def accuracy_by_hand(folder: Path) -> float:
    """Share of the sums after which the token of the label is likelier than that of the other choice."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    five, seven = tokenizer.convert_tokens_to_ids(["5", "7"])
    right = 0
    for text, label in SUMS:
        with torch.no_grad():
            scores = model(**tokenizer(f"{text}=", return_tensors="pt")).logits[0, -1]
        right += int(scores[seven] > scores[five]) == label
    return right / len(SUMS)


def test_mistakes_without_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # an import raises ModuleNotFoundError
    for words, wanted in (
        (["model"], "--tasks"),
        (["model", "--tasks", "a", "--limit", "-1"], "-1 is below 0"),
        (["model", "--tasks", "a", "--include_path", "nowhere"], "--include_path nowhere is not a folder"),
        (["model", "--tasks", "a", "--output", "no/out"], "--output no/out: there is no folder"),
        (["model", "--tasks", "a"], 'lightrl lm-eval needs lm_eval: pip install "lightrl[lm-eval]"'),
    ):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 2
        assert wanted in capsys.readouterr().err


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the harness by one that notes the models it is given, and knows the task `a`."""
    models: list[str] = []

    def simple_evaluate(*, model_args: dict[str, Any], **_: Any) -> dict[str, Any]:
        models.append(model_args["pretrained"])
        return {"results": {"a": {"acc,none": 0.5}}}

    harness, tasks = ModuleType("lm_eval"), ModuleType("lm_eval.tasks")
    vars(harness).update(simple_evaluate=simple_evaluate, __version__="0.4.9")
    vars(tasks).update(TaskManager=lambda include_path: SimpleNamespace(all_tasks=["a"]))
    monkeypatch.setitem(sys.modules, "lm_eval", harness)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", tasks)
    return models


def test_a_model_is_a_folder_or_a_name_on_the_hub(
    evaluated: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["some/model", "--tasks", "a"]) == 0
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--tasks", "a"])
    assert f"{tmp_path} has no config.json" in capsys.readouterr().err
    assert evaluated == ["some/model"]


def test_results_are_printed_even_if_their_file_cannot_be_written(
    evaluated: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lightrl.trainers.harness_run.why_no_output", lambda path: "")  # it is removed meanwhile
    with pytest.raises(SystemExit) as end:
        main(["model", "--tasks", "a", "--output", str(tmp_path / "missing" / "out")])
    assert end.value.code == 2
    said = capsys.readouterr()
    assert json.loads(said.out)["results"] == {"a": {"acc,none": 0.5}}
    assert "missing/out" in said.err


@pytest.mark.slow
def test_a_task_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval", reason='needs lm-evaluation-harness: pip install "lightrl[lm-eval]"')
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps({"sum": s, "label": k}) + "\n" for s, k in SUMS))
    (tmp_path / "two_sums.yaml").write_text(TASK.format(data=tmp_path / "sums.jsonl"))
    own = ["--include_path", str(tmp_path)]
    for words, wanted in (
        (
            ["no/model", "--tasks", "two_sums,two_sum", *own],
            "--tasks two_sum: there is no such task. Did you mean two_sums",
        ),
        (["no/model", "--tasks", ",", *own], "--tasks names no task"),
        ([str(tmp_path), "--tasks", "two_sums", *own], f"{tmp_path} has no config.json"),
    ):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 2
        assert wanted in capsys.readouterr().err
    model = builtin_model_path()
    words = [str(model), "--tasks", "two_sums", "--device", "cpu", "--output", str(tmp_path / "out")]
    assert main([*words, *own]) == 0
    found = json.loads((tmp_path / "out").read_text())
    assert found["results"]["two_sums"]["acc,none"] == accuracy_by_hand(model)
    assert found["n-samples"]["two_sums"]["effective"] == 4
    said = capsys.readouterr().out
    assert json.loads(said[said.index('{\n  "model"') :]) == found
