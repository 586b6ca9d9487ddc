"""SFT against plain PyTorch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import plain_offline
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from lightrl.builtin.task import EOS, PAD, VOCABULARY
from lightrl.config import CheckpointConfig, DPOConfig, ExampleEvalConfig, SFTConfig
from lightrl.trainers.dpo import DPOTrainer
from lightrl.trainers.export_run import main
from lightrl.trainers.sft import SFTTrainer

Options = Callable[[str], dict[str, Any]]
ReadMetrics = Callable[[Path], list[dict[str, Any]]]


def test_the_training_is_that_of_plain_pytorch(
    toy: Path, offline_flags: Options, metrics_of: ReadMetrics, tmp_path: Path
) -> None:
    model, tokenizer = plain_offline.load(toy / "model")

    def loss_fn() -> torch.Tensor:
        """The mean over all tokens of all answers: the longer answer counts for more."""
        parts = [plain_offline.answer_logprobs(model, tokenizer, p, c) for p, c, _ in plain_offline.PAIRS]
        return -torch.cat(parts).mean()

    plain = plain_offline.train(model, loss_fn, steps=3, lr=1e-2)
    options = offline_flags("sft")
    config = SFTConfig(
        **options,
        eval_data=options["train_data"],
        eval=ExampleEvalConfig(every=3),
        micro_batch_size=2,
        output_dir=str(tmp_path / "run"),
        checkpoint=CheckpointConfig(every=0),
    )
    SFTTrainer(config).fit()
    before, *rows = metrics_of(tmp_path / "run")
    assert [row["loss"] for row in rows] == pytest.approx(plain.losses, rel=1e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx(plain.norms, rel=1e-4)
    assert before["eval/loss"] == pytest.approx(plain.losses[0], rel=1e-5)
    # Tokens: 5 answers of 1 + 2 + 2 + 3 + 2 digits and an end token each; prompts of 4 + 6 + 4 + 5 + 4.
    assert (rows[0]["tokens/trained"], rows[0]["tokens/prompt"]) == (15, 23)

    final = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
    with torch.no_grad():
        parts = [plain_offline.answer_logprobs(final, tokenizer, p, c) for p, c, _ in plain_offline.PAIRS]
    assert rows[-1]["eval/loss"] == pytest.approx(-float(torch.cat(parts).mean()), rel=1e-5)
    likelihoods = torch.stack([part.sum().exp() for part in parts])
    assert rows[-1]["eval/probability"] == pytest.approx(float(likelihoods.mean()), rel=1e-5)


def test_a_tokenizer_without_an_end_token_is_told(toy: Path, offline_flags: Options, tmp_path: Path) -> None:
    model = shutil.copytree(toy / "model", tmp_path / "model")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    config = SFTConfig(**{**offline_flags("sft"), "model": str(model)}, output_dir=str(tmp_path / "run"))
    trainer = SFTTrainer(config)
    trainer.close()
    assert trainer.batches.endswith("the tokenizer has no end token (eos_token), so nothing teaches the model to stop")
    for method in (trainer.fit, trainer.step, trainer.evaluate):
        with pytest.raises(RuntimeError, match=r"The trainer is closed: .* Evaluate before close\(\), or make a new"):
            method()
    trainer.close()  # a second time changes nothing


@pytest.mark.parametrize(("trainer", "config"), [(SFTTrainer, SFTConfig), (DPOTrainer, DPOConfig)])
def test_the_trained_model_stops_at_the_end_token_of_its_template(
    trainer: Any,
    config: Any,
    toy: Path,
    offline_flags: Options,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Base models have templates that end a turn by another token than theirs, such as Qwen3-4B-Base."""
    model = shutil.copytree(toy / "model", tmp_path / "model")
    marked = "{% if m.role == 'assistant' %}" + PAD + "{{ strftime_now('') }}{% endif %}"
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content }}" + marked + "{% endfor %}")
    options = {**offline_flags(trainer.kind), "model": str(model), "max_steps": 1}
    run = tmp_path / "run"
    made = config(**options, output_dir=str(run), checkpoint=CheckpointConfig(every=1))
    made.data = replace(made.data, chat_template_file=str(tmp_path / "own.jinja"))
    trainer(made).fit()
    template = (tmp_path / "own.jinja").read_text()
    (tmp_path / "own.jinja").unlink()
    assert main([str(run), "--step", "1"]) == 0  # with the template of final/
    (tmp_path / "own.jinja").write_text(template)
    for saved in ("final", "exports/step-1"):
        ends = GenerationConfig.from_pretrained(run / saved).eos_token_id
        assert ends == sorted(map(VOCABULARY.index, (EOS, PAD)))
        assert (run / saved / "chat_template.jinja").read_text() == template
    assert f"Answers end with {PAD}, at which the trained model will stop" in capsys.readouterr().out
    assert "writes today's date" in caplog.text
    caplog.clear()
    raw = config(**options, output_dir=str(tmp_path / "raw"))
    raw.data = replace(made.data, chat_template="never")  # the strings of this data set are not rendered
    trainer(raw).close()
    assert "writes today's date" not in caplog.text


@pytest.mark.parametrize(("trainer", "config"), [(SFTTrainer, SFTConfig), (DPOTrainer, DPOConfig)])
def test_the_trained_model_stops_at_the_end_token_of_its_tokenizer(
    trainer: Any, config: Any, toy: Path, offline_flags: Options, tmp_path: Path
) -> None:
    """An answer without a template ends with it, whatever token the model stopped at before."""
    model = shutil.copytree(toy / "model", tmp_path / "model")
    AutoTokenizer.from_pretrained(model, eos_token=PAD).save_pretrained(model)
    options = {**offline_flags(trainer.kind), "model": str(model), "max_steps": 1}
    run = tmp_path / "run"
    trainer(config(**options, output_dir=str(run), checkpoint=CheckpointConfig(every=1))).fit()
    assert main([str(run), "--step", "1"]) == 0
    for saved in ("final", "exports/step-1"):
        ends = GenerationConfig.from_pretrained(run / saved).eos_token_id
        assert ends == sorted(map(VOCABULARY.index, (EOS, PAD)))
