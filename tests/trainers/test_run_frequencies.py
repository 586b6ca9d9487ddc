"""A run on a model whose rope follows the length fixes it for its own longest sequence, in trainer and engine alike."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from lightrl.config import CheckpointConfig, GRPOConfig
from lightrl.models.fixed_rope import fixed_length
from lightrl.trainers.grpo import GRPOTrainer


@pytest.mark.parametrize(("max_new_tokens", "original"), [(6, 16), (12, 12)])
def test_a_run_fixes_the_frequencies_for_its_longest_sequence(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], max_new_tokens: int, original: int
) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0, 4.0, 8.0, 16.0],
        "original_max_position_embeddings": original,
    }
    small = json.loads((toy / "model" / "config.json").read_text())
    config = transformers.Phi3Config(
        **{name: small[name] for name in ("vocab_size", "pad_token_id", "eos_token_id", "bos_token_id")},
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        rope_parameters=rope,
        original_max_position_embeddings=original,
    )
    torch.manual_seed(0)
    shutil.copytree(toy / "model", tmp_path / "model")
    transformers.Phi3ForCausalLM(config).save_pretrained(tmp_path / "model")
    trainer = GRPOTrainer(
        GRPOConfig(
            model=str(tmp_path / "model"),
            train_data=str(toy / "train.jsonl"),
            reward=(f"{toy / 'reward.py'}:odd_digits",),
            num_prompts=5,
            group_size=4,
            max_new_tokens=max_new_tokens,
            output_dir=str(tmp_path / "run"),
            checkpoint=CheckpointConfig(every=0),
        )
    )
    longest = max(len(prompt.token_ids) for prompt in trainer.prompts.train) + max_new_tokens
    assert fixed_length(trainer.policy) == longest
    assert f"fixed for sequences of up to {longest} tokens" in capsys.readouterr().out
    assert trainer.step().metrics["mismatch/max_abs"] < 1e-5
    trainer.close()
