"""A base model whose chat template ends a turn by another token than the model's own."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightrl.builtin.task import EOS, PAD, VOCABULARY
from lightrl.config import GRPOConfig
from lightrl.trainers.policy_step import PromptData
from lightrl.trainers.run import open_run
from lightrl.trainers.turn_end import stop_at, warn_of_unstopped_turns

WARNING = f"ends a turn with {PAD}, at which the model does not stop"


def with_template(toy: Path, folder: Path, end: str) -> str:
    """Returns a copy of the model whose template puts this behind an answer."""
    shutil.copytree(toy / "model", folder)
    marked = "{% if m.role == 'assistant' %}" + end + "{% endif %}"
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}" + marked + "{% endfor %}")
    return str(folder)


def warned(model: str, caplog: pytest.LogCaptureFixture, config: GRPOConfig | None = None) -> str:
    caplog.clear()
    warn_of_unstopped_turns(config or GRPOConfig(), model, AutoTokenizer.from_pretrained(model))
    return caplog.text


def test_a_run_warns_of_turns_that_do_not_stop(toy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = with_template(toy, tmp_path / "model", PAD + "{{ strftime_now('') }}")
    data = str(toy / "train.jsonl")
    config = GRPOConfig(model=model, train_data=data, output_dir=str(tmp_path / "run"), strategy="single")
    run = open_run(config, kind="grpo")
    PromptData(run)
    assert WARNING in caplog.text
    assert f"Give --stop '{PAD}'" in caplog.text
    assert "writes today's date" in caplog.text
    caplog.clear()
    config.data = replace(config.data, chat_template="never")
    PromptData(run)
    assert not caplog.text


def test_a_known_end_is_no_reason_to_warn(toy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = with_template(toy, tmp_path / "model", PAD)
    assert WARNING in warned(model, caplog)
    assert not warned(model, caplog, GRPOConfig(stop=(PAD,)))
    (tmp_path / "model" / "generation_config.json").unlink(missing_ok=True)
    assert WARNING in warned(model, caplog)
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": VOCABULARY.index(PAD)}))
    assert not warned(model, caplog)
    for number, end in enumerate((EOS, "", "{{ raise_exception('no') }}")):
        assert not warned(with_template(toy, tmp_path / f"other{number}", end), caplog)


def test_an_end_that_only_the_tokenizer_names_becomes_the_models(toy: Path) -> None:
    """A base model beside the tokenizer of its instruct version, for example."""
    model = AutoModelForCausalLM.from_pretrained(toy / "model")
    tokenizer = AutoTokenizer.from_pretrained(toy / "model", eos_token=PAD)
    pad, eos = map(VOCABULARY.index, (PAD, EOS))
    assert stop_at({pad}, model, tokenizer) == [PAD]
    assert model.generation_config.eos_token_id == sorted((pad, eos))
    assert stop_at({pad, eos}, model, tokenizer) == []
