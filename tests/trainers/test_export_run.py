"""`lightrl export`; tests/trainers/test_export.py exports a run."""

import os
from pathlib import Path
from typing import Any

import pytest
from tiny_vlm import save_tiny_vlm
from transformers import AutoProcessor

from lightrl.config import CheckpointConfig, CriticConfig, EvalConfig, LogConfig, PPOConfig, RolloutLogConfig, SFTConfig
from lightrl.trainers.export_run import _template_of, main
from lightrl.trainers.fit import build_trainer
from lightrl.trainers.ppo import PPOTrainer
from lightrl.trainers.sft import SFTTrainer


def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("lightrl.config.log_sections.LOGGERS", ("logger_of_the_cluster",))  # not installed here
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("num_prompts: 2\nlog:\n  to: logger_of_the_cluster\n")
    for words, wanted in (
        (["nowhere"], "nowhere is no folder of a run"),
        ([str(tmp_path / "run")], "has no checkpoint, and no complete final/ of its last step. There is none"),
    ):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 2
        assert wanted in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_refused_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("num_prompts: 2\n")
    (tmp_path / "link").symlink_to("nowhere")
    monkeypatch.setattr("lightrl.trainers.export_run._chosen", lambda *_: ("step-1", 1))
    for name, why in (("link", "it is a broken symbolic link to nowhere"), ("config.yaml/a", "it is below the file")):
        target = tmp_path / name
        with pytest.raises(SystemExit):
            main([str(tmp_path), "--output", str(target)])
        assert f"error: {target} cannot be written: {why}" in capsys.readouterr().err


def test_a_checkpoint_of_a_model_of_images_comes_with_its_processor(tmp_path: Path) -> None:
    save_tiny_vlm(tmp_path / "model", "qwen2_5_vl")
    (tmp_path / "train.jsonl").write_text('{"prompt": "say", "response": "yes"}\n')
    config = SFTConfig(
        model=str(tmp_path / "model"),
        train_data=str(tmp_path / "train.jsonl"),
        output_dir=str(tmp_path / "run"),
        max_steps=1,
        batch_size=1,
        log=LogConfig(tensorboard=False),
    )
    trainer = build_trainer(SFTTrainer, config)
    trainer.fit()
    trainer.close()
    assert main([str(tmp_path / "run"), "--step", "1"]) == 0
    exported = tmp_path / "run" / "exports" / "step-1"
    assert {path.name for path in (tmp_path / "run" / "final").iterdir()} <= {path.name for path in exported.iterdir()}
    assert AutoProcessor.from_pretrained(exported).image_processor is not None


def test_the_chat_template_is_that_of_the_newest_export(tmp_path: Path) -> None:
    assert _template_of(tmp_path, "own.jinja") == "own.jinja"
    for age, name in enumerate(("exports/step-10", "final", "exports/step-9")):
        (tmp_path / name).mkdir(parents=True)
        newest = tmp_path / name / "chat_template.jinja"
        newest.touch()
        os.utime(newest, (age, age))
        assert _template_of(tmp_path, "own.jinja") == str(newest)


def test_a_checkpoint_with_the_critic_on_the_policy_is_refused(
    toy_options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = PPOConfig(
        **toy_options,
        num_prompts=2,
        max_steps=1,
        output_dir=str(tmp_path / "run"),
        eval=EvalConfig(every=0),
        checkpoint=CheckpointConfig(every=1),
        log=RolloutLogConfig(tensorboard=False),
        critic=CriticConfig(shared_backbone=True),
    )
    trainer = build_trainer(PPOTrainer, config)
    trainer.fit()
    trainer.close()
    with pytest.raises(SystemExit):
        main([str(tmp_path / "run"), "--step", "1"])
    assert "--critic.shared_backbone), which cannot be exported. Use final/" in capsys.readouterr().err
    assert not (tmp_path / "run" / "exports").exists()
