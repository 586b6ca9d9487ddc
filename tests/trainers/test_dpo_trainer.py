"""DPO against plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import plain_offline
import pytest
import torch
from torch.nn import functional as F

from lightrl.comm import Comm
from lightrl.config import CheckpointConfig, DPOConfig, ExampleEvalConfig
from lightrl.data.packing import dummy_batch
from lightrl.metrics import Statistics
from lightrl.records import TokenScores
from lightrl.trainers.dpo import DPOTrainer

Options = Callable[[str], dict[str, Any]]
ReadMetrics = Callable[[Path], list[dict[str, Any]]]


@pytest.mark.parametrize(("length_normalized", "nll_coef"), [(False, 0.0), (True, 0.5)])
def test_the_training_is_that_of_plain_pytorch(
    toy: Path,
    offline_flags: Options,
    metrics_of: ReadMetrics,
    tmp_path: Path,
    length_normalized: bool,
    nll_coef: float,
) -> None:
    policy, tokenizer = plain_offline.load(toy / "model")
    reference, _ = plain_offline.load(toy / "model")
    beta, smoothing = 2.0, 0.1
    margins: list[torch.Tensor] = []
    likelihoods: list[float] = []

    def log_ratio(prompt: str, answer: str) -> torch.Tensor:
        with torch.no_grad():
            held = plain_offline.answer_logprobs(reference, tokenizer, prompt, answer)
        ratios = plain_offline.answer_logprobs(policy, tokenizer, prompt, answer) - held
        return ratios.mean() if length_normalized else ratios.sum()

    def loss_fn() -> torch.Tensor:
        found = torch.stack([log_ratio(p, c) - log_ratio(p, r) for p, c, r in plain_offline.PAIRS])
        margins.append(beta * found.detach())
        right, wrong = F.logsigmoid(beta * found), F.logsigmoid(-beta * found)
        preference = -((1 - smoothing) * right + smoothing * wrong).mean()
        chosen = [plain_offline.answer_logprobs(policy, tokenizer, p, c).mean() for p, c, _ in plain_offline.PAIRS]
        likelihoods.append(-float(torch.stack(chosen).detach().mean()))
        return preference - nll_coef * torch.stack(chosen).mean()

    plain = plain_offline.train(policy, loss_fn, steps=3, lr=1e-2)
    config = DPOConfig(
        **offline_flags("dpo"),
        beta=beta,
        label_smoothing=smoothing,
        length_normalized=length_normalized,
        nll_coef=nll_coef,
        micro_batch_size=2,
        output_dir=str(tmp_path / "run"),
        eval=ExampleEvalConfig(every=0),
        checkpoint=CheckpointConfig(every=0),
    )
    DPOTrainer(config).fit()
    rows = metrics_of(tmp_path / "run")
    # policy and reference are one model yet
    assert rows[0]["loss"] == pytest.approx(math.log(2) + nll_coef * likelihoods[0], rel=1e-6)
    if nll_coef:
        assert [row["nll/chosen"] for row in rows] == pytest.approx(likelihoods, rel=1e-5)
    assert [row["loss"] for row in rows] == pytest.approx(plain.losses, rel=1e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx(plain.norms, rel=1e-4)
    assert [row["margin"] for row in rows] == pytest.approx([float(m.mean()) for m in margins], rel=1e-4, abs=1e-6)
    assert rows[-1]["accuracy"] == pytest.approx(float((margins[-1] > 0).float().mean()))
    assert rows[-1]["reward/chosen"] - rows[-1]["reward/rejected"] == pytest.approx(rows[-1]["margin"], rel=1e-5)


@pytest.mark.parametrize(("loss", "first"), [("ipo", 25.0), ("hinge", 1.0)])  # (0 - 1 / (2 * 0.1))^2; 1 - 0
def test_the_other_losses(
    offline_flags: Options, metrics_of: ReadMetrics, tmp_path: Path, loss: Any, first: float
) -> None:
    config = DPOConfig(
        **{**offline_flags("dpo"), "max_steps": 2},
        loss=loss,
        output_dir=str(tmp_path / "run"),
        eval=ExampleEvalConfig(every=0),
        checkpoint=CheckpointConfig(every=0),
    )
    DPOTrainer(config).fit()
    rows = metrics_of(tmp_path / "run")
    assert rows[0]["loss"] == pytest.approx(first, rel=1e-6)
    assert rows[1]["loss"] < first


def test_metrics_are_means_over_the_pairs_of_all_micro_batches() -> None:
    """Each answer has one token; here are the probabilities of policy and reference, the chosen answer's first."""
    statistics = Statistics()
    trainer: Any = SimpleNamespace(config=DPOConfig(beta=2.0, nll_coef=1.0))
    packs = [[(0.5, 0.25), (0.2, 0.2)], [(0.25, 0.25), (0.1, 0.1), (0.125, 0.0625), (0.6, 0.6)]]
    for pairs in packs:
        logprobs, reference = torch.tensor(pairs).log().T
        count = len(pairs)
        batch = replace(
            dummy_batch(temperature=1.0),
            keys=tuple((index // 2, index % 2) for index in range(count)),
            sequence_index=torch.arange(count),
            loss_mask=torch.ones(count, dtype=torch.bool),
            ref_logprobs=reference,
        )
        DPOTrainer.loss(trainer, TokenScores(logprobs=logprobs, entropy=torch.zeros(count)), batch, {}, statistics)
    wanted = {
        "probability/chosen": (0.5 + 0.25 + 0.125) / 3,
        "probability/rejected": (0.2 + 0.1 + 0.6) / 3,
        "nll/chosen": (1 + 2 + 3) * math.log(2) / 3,
        "margin": 2 * (1 + 0 + 1) * math.log(2) / 3,
        "reward/chosen": 2 * (1 + 0 + 1) * math.log(2) / 3,
        "reward/rejected": 0.0,
        "accuracy": 2 / 3,
    }
    assert statistics.reduce(Comm()) == pytest.approx(wanted, abs=1e-6)
