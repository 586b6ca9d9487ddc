"""What options say of the records' fields is checked when the data is read."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightrl.config import EvalConfig, EvaluateConfig, GRPOConfig
from lightrl.data.prompts import load_records
from lightrl.trainers.record_checks import check_fields

REWARDS = ("exact_match", "contains")
BOTH = ("exact_match.data_source=gsm8k", "contains.data_source=apps")


def checked(
    folder: Path, *sources: str, evaluation: tuple[str, ...] = (), stream: bool = False, **options: Any
) -> None:
    """Checks data whose records name these sources."""
    records = []
    for name, values in (("train", sources), ("eval", evaluation)):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"prompt": "1+1=", "answer": "2", "data_source": s}) + "\n" for s in values))
        records.append(load_records(str(path), stream=stream and name == "train") if values else [])
    made: Any = options.pop("kind", GRPOConfig)
    config = made(train_data="train.jsonl", reward=options.pop("reward", REWARDS), **options)
    check_fields(SimpleNamespace(config=config, train_records=records[0], eval_records=records[1]))  # type: ignore[arg-type]


def test_a_mixed_data_set_passes(tmp_path: Path) -> None:
    checked(tmp_path, "gsm8k", "apps", evaluation=("apps",), reward_for=BOTH)
    checked(tmp_path, "gsm8k", "apps", "other", reward_for=BOTH[:1])


def test_a_record_without_a_reward_is_named_by_its_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train.jsonl:3: no reward is for this record"):
        checked(tmp_path, "gsm8k", "apps", "other", reward_for=BOTH)
    with pytest.raises(ValueError, match=r"eval.jsonl:1: no reward is for this record"):
        checked(tmp_path, "gsm8k", "apps", evaluation=("other",), reward_for=BOTH)
    with pytest.raises(ValueError, match=r"eval.jsonl:1: no reward is for this record"):
        checked(tmp_path, "other", evaluation=("other",), stream=True, reward_for=BOTH)


def test_a_field_or_value_that_no_record_has_is_refused(tmp_path: Path) -> None:
    for stream in (False, True):
        with pytest.raises(
            ValueError, match=r"No record has the field 'source' \(--reward_for exact_match.source\). They have answer"
        ):
            checked(tmp_path, "gsm8k", stream=stream, reward_for=("exact_match.source=gsm8k",))
    with pytest.raises(ValueError, match="data_source=gsm9k: no record has this value. There are 'gsm8k', 'apps'"):
        checked(tmp_path, "gsm8k", "apps", reward_for=("exact_match.data_source=gsm9k",))
    with pytest.raises(ValueError, match="exact_match.answer: the field holds the prompt or the answer"):
        checked(tmp_path, "gsm8k", reward_for=("exact_match.answer=2",))
    checked(tmp_path, "gsm8k", stream=True, reward_for=BOTH)  # not every line is read
    checked(tmp_path, "gsm8k", kind=EvaluateConfig, reward_for=BOTH)  # the options of a training


def test_a_source_of_the_evaluation_is_a_field(tmp_path: Path) -> None:
    checked(tmp_path, "gsm8k", evaluation=("gsm8k",), eval=EvalConfig(source_field="data_source"))
    with pytest.raises(ValueError, match=r"No record has the field 'kind' \(--eval.source_field\)"):
        checked(tmp_path, "gsm8k", evaluation=("gsm8k",), eval=EvalConfig(source_field="kind"))
