"""Reward-model training against plain PyTorch, and what is saved against transformers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plain_offline
import pytest
import torch
from made_samples import made_sample
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lightrl.config import CheckpointConfig, ExampleEvalConfig, MarginPairDataConfig, OptimConfig, RMConfig
from lightrl.models.reward_model import load_reward_model
from lightrl.records import Prompt
from lightrl.rewards.model_reward import ModelReward
from lightrl.trainers.reward_model import RMTrainer

Options = Callable[[str], dict[str, Any]]
ReadMetrics = Callable[[Path], list[dict[str, Any]]]


def score(model: Any, tokenizer: Any, prompt: str, answer: str) -> torch.Tensor:
    ids = torch.tensor([tokenizer(prompt + answer)["input_ids"] + [tokenizer.eos_token_id]])
    found: torch.Tensor = model(ids).logits[0, 0]
    return found


def test_the_training_is_that_of_plain_pytorch(
    toy: Path, offline_flags: Options, metrics_of: ReadMetrics, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(toy / "model")
    load_reward_model(str(toy / "model"), tokenizer, materialize=True, seed=3).hf.save_pretrained(tmp_path / "start")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "start")
    wanted = torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0])

    def scores() -> tuple[torch.Tensor, torch.Tensor]:
        chosen = [score(model, tokenizer, p, c) for p, c, _ in plain_offline.PAIRS]
        rejected = [score(model, tokenizer, p, r) for p, _, r in plain_offline.PAIRS]
        return torch.stack(chosen), torch.stack(rejected)

    def loss_fn() -> torch.Tensor:
        chosen, rejected = scores()
        return (-F.logsigmoid(chosen - rejected - wanted) + 0.1 * (chosen + rejected) ** 2).mean()

    plain = plain_offline.train(model, loss_fn, steps=3, lr=1e-2)
    options = offline_flags("rm")
    config = RMConfig(
        **options,
        eval_data=options["train_data"],
        eval=ExampleEvalConfig(every=3),
        centring_coef=0.1,
        micro_batch_size=2,
        output_dir=str(tmp_path / "run"),
        checkpoint=CheckpointConfig(every=0),
        ema_decay=0.5,
    )
    RMTrainer(config).fit()
    last, average = (load_file(tmp_path / "run" / name / "model.safetensors") for name in ("final", "final_ema"))
    assert sorted(last) == sorted(average)
    assert any(not torch.equal(average[name], value) for name, value in last.items())
    _, *rows = metrics_of(tmp_path / "run")
    assert [row["loss"] for row in rows] == pytest.approx(plain.losses, rel=1e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx(plain.norms, rel=1e-4)

    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "final")
    with torch.no_grad():
        chosen, rejected = scores()
    assert rows[-1]["eval/margin"] == pytest.approx(float((chosen - rejected).mean()), abs=1e-5)
    assert rows[-1]["eval/reward/chosen"] == pytest.approx(float(chosen.mean()), abs=1e-5)
    assert rows[-1]["eval/accuracy"] == pytest.approx(float((chosen > rejected).float().mean()))


def test_the_tokens_of_the_training_are_those_of_the_reward(toy: Path, offline_flags: Options, tmp_path: Path) -> None:
    model = shutil.copytree(toy / "model", tmp_path / "model")
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    options = offline_flags("rm") | {"model": str(model), "output_dir": str(tmp_path / "run")}
    trainer = RMTrainer(RMConfig(**options))
    trainer.export(tmp_path / "rm")
    trainer.close()
    reward = ModelReward(path=str(tmp_path / "rm"))
    question, right, _ = plain_offline.PAIRS[0]
    sample = made_sample(
        prompt=Prompt(index=0, text="", token_ids=(1,), messages=({"role": "user", "content": question},)), text=right
    )
    chosen = trainer.examples.train[0].answers[0]
    assert reward._token_ids(sample) == [*chosen.prompt_ids, *chosen.response_ids]


def test_a_rate_of_no_parameter_is_refused(offline_flags: Options) -> None:
    with pytest.raises(ValueError, match="no parameter that trains has lm_head in its name"):
        RMTrainer(RMConfig(**offline_flags("rm") | {"optim": OptimConfig(lr_scales=("lm_head=0.1",))}))


def test_a_margin_field_that_no_pair_has_is_refused(offline_flags: Options, tmp_path: Path) -> None:
    data = MarginPairDataConfig(margin_field="gap")
    with pytest.raises(ValueError, match=r"No record has the field 'gap' \(--data.margin_field\)"):
        RMTrainer(RMConfig(**offline_flags("rm"), data=data, output_dir=str(tmp_path / "run")))
