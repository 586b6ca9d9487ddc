"""Runs whose data stay on disk have the numbers of runs that hold them in memory, over a resume too."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightrl.config import (
    DataConfig,
    EvalConfig,
    GRPOConfig,
    LogConfig,
    ResponseDataConfig,
    RolloutLogConfig,
    SFTConfig,
)
from lightrl.config.strategy import CheckpointConfig
from lightrl.data.streamed import Streamed
from lightrl.trainers.grpo import GRPOTrainer
from lightrl.trainers.sft import SFTTrainer

Rows = list[dict[str, Any]]


@pytest.fixture
def numbers_of(metrics_of: Callable[[Path], Rows]) -> Callable[[Path], list[tuple[Any, ...]]]:
    """Returns the numbers of each step that depend on the data."""
    return lambda folder: [
        tuple(row.get(name) for name in ("step", "reward/mean", "loss", "grad_norm")) for row in metrics_of(folder)
    ]


def test_a_grpo_run_has_the_numbers_of_one_in_memory(
    toy: Path, toy_options: dict[str, Any], tmp_path: Path, numbers_of: Callable[[Path], list[tuple[Any, ...]]]
) -> None:
    for part in range(2):
        shutil.copy(toy / "train.jsonl", tmp_path / f"part-{part}.jsonl")

    def run(name: str, num_steps: int, *, stream: bool) -> GRPOTrainer:
        shared = {"num_prompts": 4, "max_new_tokens": 8, "max_steps": num_steps, "lr": 1e-3}
        config = GRPOConfig(
            **{
                **toy_options,
                **shared,
                "train_data": str(tmp_path / "part-*.jsonl"),
                "output_dir": str(tmp_path / name),
            },
            data=DataConfig(stream=stream),
            eval=EvalConfig(every=0),
            log=RolloutLogConfig(tensorboard=False),
            checkpoint=CheckpointConfig(every=2),
        )
        trainer = GRPOTrainer(config)
        trainer.fit()
        trainer.close()
        return trainer

    run("kept", 4, stream=False)
    assert isinstance(run("streamed", 2, stream=True).prompts.train, Streamed)
    run("streamed", 3, stream=False)  # either goes on where the other stopped
    run("streamed", 4, stream=True)
    assert len(numbers_of(tmp_path / "kept")) == 4
    assert numbers_of(tmp_path / "streamed") == numbers_of(tmp_path / "kept")


def test_an_sft_run_has_the_numbers_of_one_in_memory(
    offline_flags: Callable[[str], dict[str, Any]],
    tmp_path: Path,
    numbers_of: Callable[[Path], list[tuple[Any, ...]]],
) -> None:
    for stream in (False, True):
        config = SFTConfig(
            **{
                **offline_flags("sft"),
                "batch_size": 3,
                "output_dir": str(tmp_path / str(stream)),
                "strategy": "single",
            },
            data=ResponseDataConfig(stream=stream),
            log=LogConfig(tensorboard=False),
        )
        trainer = SFTTrainer(config)
        assert isinstance(trainer.examples.train, Streamed) is stream
        trainer.fit()
        trainer.close()
    assert len(numbers_of(tmp_path / "True")) == 3
    assert numbers_of(tmp_path / "True") == numbers_of(tmp_path / "False")
