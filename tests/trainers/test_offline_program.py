"""Whole runs of SFT, RM and DPO: the same however they are spread, resumed, or split; and what is wrong is told."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from offline_program import KINDS, fit
from safetensors.torch import load_file

from lightrl.builtin.model import builtin_tokenizer
from lightrl.config import (
    CheckpointConfig,
    ExampleEvalConfig,
    LogConfig,
    OptimConfig,
    ResponseDataConfig,
    SFTConfig,
    parse_config,
)
from lightrl.models.reward_model import load_reward_model
from lightrl.testing import run_program, run_spmd
from lightrl.trainers.best import step_of_best
from lightrl.trainers.sft import SFTTrainer

Options = Callable[[str], dict[str, Any]]
Rows = list[dict[str, Any]]
ReadMetrics = Callable[[Path], Rows]
ROOT = Path(__file__).parents[2]
COMPARED = ("loss", "grad_norm", "lr", "eval/loss", "accuracy", "margin", "probability", "epoch")
# Two ranks: 3 examples are 2 and 1, so that one rank has a dummy; ZeRO 3 shards the parameters too.
SPREADS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp", "micro_batch_size": 1},
    "fsdp": {"strategy": "fsdp", "max_tokens_per_microbatch": 22},
    "tensor parallelism": {"strategy": "fsdp", "tp_size": 2},
    "sequence parallelism": {"strategy": "fsdp", "sp_size": 2, "micro_batch_size": 1},
    "deepspeed": {"strategy": "deepspeed", "micro_batch_size": 2, "deepspeed": {"zero_stage": 3}},
}
# The reference of DPO's third step, and of a checkpoint, is neither the policy nor the model that the run starts from.
MORE: dict[str, dict[str, Any]] = {"sft": {}, "rm": {}, "dpo": {"reference": {"sync_every": 2, "mixup": 0.5}}}


def plain(options: dict[str, Any], folder: Path, **others: Any) -> dict[str, Any]:
    """Options for offline_program, in JSON's types."""
    found = {**options, "batch_size": 3, "output_dir": str(folder), "eval_data": options["train_data"], **others}
    return {
        name: dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value for name, value in found.items()
    }


def check_same(ours: Rows, theirs: Rows) -> None:
    assert [row["step"] for row in theirs] == [row["step"] for row in ours]
    for mine, yours in zip(ours, theirs, strict=True):
        for name in COMPARED:
            if name in mine:
                # A later step has the rounding of the earlier ones in it.
                assert yours[name] == pytest.approx(mine[name], rel=1e-5 if mine["step"] < 2 else 1e-4, abs=1e-6), name


@pytest.fixture(scope="module")
def alone(offline_flags: Options, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of each kind's run in this one process, everything in one micro-batch."""
    root = tmp_path_factory.mktemp("alone")
    for kind in KINDS:
        fit(kind, plain(offline_flags(kind), root / kind, **MORE[kind]))
    return {kind: root / kind for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_the_run_does_not_depend_on_the_micro_batch(
    kind: str, offline_flags: Options, alone: dict[str, Path], metrics_of: ReadMetrics, tmp_path: Path
) -> None:
    fit(kind, plain(offline_flags(kind), tmp_path / "run", micro_batch_size=1, **MORE[kind]))
    assert "loss" in metrics_of(alone[kind])[-1]
    check_same(metrics_of(alone[kind]), metrics_of(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("spread", SPREADS)
def test_the_run_is_the_same_on_two_ranks(
    spread: str, offline_flags: Options, alone: dict[str, Path], metrics_of: ReadMetrics, tmp_path: Path
) -> None:
    options = {**SPREADS[spread], "eval": {"best": "eval/loss"}}
    runs = [
        {"kind": kind, "options": plain(offline_flags(kind), tmp_path / kind, **options, **MORE[kind])}
        for kind in KINDS
    ]
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    program = ROOT / "tests" / "programs" / "offline_program.py"
    output = run_spmd(program, str(tmp_path / "runs.json"), world_size=2, timeout_s=280)
    assert "all done" in output
    assert "returned a view" not in output  # which FSDP warns of
    for kind in KINDS:
        rows = metrics_of(tmp_path / kind)
        check_same(metrics_of(alone[kind]), rows)
        lowest = min(row["eval/loss"] for row in rows if "eval/loss" in row)
        assert next(row["step"] for row in rows if row.get("eval/loss") == lowest) == step_of_best(tmp_path / kind)
    if spread == "fsdp":  # one process goes on where the two ranks stopped, as where it stopped itself
        for kind in ("sft", "dpo"):
            stopped = tmp_path / f"alone {kind}"
            shutil.copytree(alone[kind], stopped)
            for folder in (stopped, tmp_path / kind):
                assert fit(kind, plain(offline_flags(kind), folder, max_steps=5, **MORE[kind])).step_index == 5
            check_same(metrics_of(stopped), metrics_of(tmp_path / kind))


# ---- Epochs and resume -------------------------------------------------------------------------------------------


def sft(options: dict[str, Any], folder: Path, **others: Any) -> SFTTrainer:
    settings = {"eval": ExampleEvalConfig(every=0), "log": LogConfig(tensorboard=False), **others}
    return SFTTrainer(SFTConfig(**{**options, "output_dir": str(folder), **settings}))


def test_epochs_use_every_example_once_each(offline_flags: Options, metrics_of: ReadMetrics, tmp_path: Path) -> None:
    options = {**offline_flags("sft"), "max_steps": 0, "num_epochs": 2, "batch_size": 4}
    sft(options, tmp_path / "run", checkpoint=CheckpointConfig(every=0)).fit()
    rows = metrics_of(tmp_path / "run")
    assert [row["epoch"] for row in rows] == pytest.approx([0.8, 1.6, 2.0])  # 10 examples: 4, 4, 2
    assert sum(row["tokens/trained"] for row in rows) == 2 * 15


def test_the_config_of_a_run_of_epochs_gives_the_same_run_again(
    offline_flags: Options, metrics_of: ReadMetrics, tmp_path: Path
) -> None:
    options = {**offline_flags("sft"), "max_steps": 0, "batch_size": 4}  # 5 examples
    sft(options, tmp_path / "run").fit()
    config = ["--config", str(tmp_path / "run" / "config.yaml"), "--output_dir", str(tmp_path / "again")]
    SFTTrainer(parse_config(SFTConfig, config)).fit()
    wanted, found = metrics_of(tmp_path / "run"), metrics_of(tmp_path / "again")
    assert [row["epoch"] for row in found] == pytest.approx([0.8, 1.0])
    assert [(row["loss"], row["tokens/trained"]) for row in found] == [
        (row["loss"], row["tokens/trained"]) for row in wanted
    ]


def test_a_run_that_goes_on_after_its_epochs_leaves_no_example_out(
    offline_flags: Options, metrics_of: ReadMetrics, tmp_path: Path
) -> None:
    options = {**offline_flags("sft"), "batch_size": 4}  # 5 examples
    sft({**options, "max_steps": 0}, tmp_path / "run").fit()
    sft({**options, "max_steps": 4}, tmp_path / "run").fit()
    assert [row["epoch"] for row in metrics_of(tmp_path / "run")] == pytest.approx([0.8, 1.0, 1.8, 2.6])


@pytest.mark.parametrize(
    ("changes", "epochs"),
    [
        ({"batch_size": 2}, [1.2, 1.6, 2.0]),
        ({"batch_size": 5}, [1.8, 2.0]),
        ({"num_epochs": 3}, [1.6, 2.4, 3.0]),
        ({"num_epochs": 1, "batch_size": 2}, [1.0]),
    ],
)
def test_a_run_that_branches_off_learns_from_what_is_left_of_its_epochs(
    changes: dict[str, int], epochs: list[float], offline_flags: Options, metrics_of: ReadMetrics, tmp_path: Path
) -> None:
    """The first run takes 4 of 5 examples in its first step. The rate of the other falls to the end of what is left."""
    optim = OptimConfig(schedule="linear")
    options = {**offline_flags("sft"), "max_steps": 0, "num_epochs": 2, "batch_size": 4, "optim": optim}
    sft({**options, "num_epochs": 1}, tmp_path / "run", checkpoint=CheckpointConfig(every=1)).fit()
    first = tmp_path / "run" / "checkpoints" / "step-000001"
    sft({**options, **changes}, tmp_path / "branch", resume=str(first)).fit()
    rows = metrics_of(tmp_path / "branch")
    assert [row["epoch"] for row in rows] == pytest.approx(epochs)
    assert not any(row["skipped_updates"] for row in rows)
    assert rows[-1]["lr"] == pytest.approx(options["lr"] / (len(rows) + 1))  # of the whole schedule, one step before 0


def test_an_epoch_more_after_a_short_last_batch_is_a_whole_one(
    offline_flags: Options, metrics_of: ReadMetrics, tmp_path: Path
) -> None:
    options = {**offline_flags("sft"), "max_steps": 0, "batch_size": 4}  # 5 examples: 4 and 1
    sft(options, tmp_path / "run").fit()
    sft({**options, "num_epochs": 2}, tmp_path / "more", resume=str(tmp_path / "run")).fit()
    assert [row["epoch"] for row in metrics_of(tmp_path / "more")] == pytest.approx([1.8, 2.0])


def test_a_resumed_run_goes_on_with_the_same_numbers(
    offline_flags: Options, metrics_of: ReadMetrics, tmp_path: Path
) -> None:
    options = {**offline_flags("sft"), "batch_size": 2, "max_steps": 4}  # a batch spans the end of the first epoch
    sft(options, tmp_path / "whole").fit()
    sft({**options, "max_steps": 3}, tmp_path / "parts").fit()
    assert (tmp_path / "parts" / "checkpoints" / "step-000003").is_dir()
    again = sft(options, tmp_path / "parts")
    assert again.step_index == 3
    again.fit()
    wanted, found = metrics_of(tmp_path / "whole"), metrics_of(tmp_path / "parts")
    for name in ("step", "loss", "grad_norm", "lr", "epoch"):
        assert [row[name] for row in found] == [row[name] for row in wanted]
    assert wanted[3]["loss"] != wanted[2]["loss"]


def test_long_lines_are_left_out_if_asked(
    offline_flags: Options, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ResponseDataConfig(max_tokens=8, too_long="skip")  # 12+34=46 and 99+9=108 have 9 with their end token
    trainer = sft(offline_flags("sft"), tmp_path / "run", data=data)
    assert (len(trainer.examples.train), trainer.examples.num_skipped) == (3, 2)
    trainer.fit()
    assert "3 examples (2 too long, left out), 5 a step" in capsys.readouterr().out


# ---- The scripts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"data": ResponseDataConfig(response_field="reply")}, r"responses.jsonl:1: .*--data.response_field"),
        ({"data": ResponseDataConfig(max_tokens=8)}, r"responses.jsonl:2: prompt and answer have 9 tokens"),
        ({"data": ResponseDataConfig(max_tokens=10**6)}, r"more than the model's context of 512 tokens"),
        ({"max_tokens_per_microbatch": 8}, r"cannot hold .*responses.jsonl:2: raise it to at least 9"),
    ],
)
def test_bad_data_is_told_with_file_and_line(
    change: dict[str, Any], text: str, offline_flags: Options, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=text):
        sft(offline_flags("sft"), tmp_path / "run", **change)


@pytest.mark.parametrize("kind", KINDS)
def test_the_scripts_train_on_what_is_built_in(
    kind: str, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = str(ROOT / "scripts" / f"train_{kind}.py")
    flags = ["--model", str(toy / "model"), "--max_steps", "1", "--batch_size", "8", "--eval.max_examples", "8"]
    monkeypatch.setattr(sys, "argv", [script, *flags, "--output_dir", str(tmp_path / "run")])
    runpy.run_path(script, run_name="__main__")
    wanted = "7588 examples, 8 a step, on each of 1 rank(s) about 8 in micro-batches of <= 16384 tokens; 1 step(s)"
    assert wanted in capsys.readouterr().out
    assert (tmp_path / "run" / "final" / "config.json").is_file()


def test_a_script_tells_a_mistake_without_a_traceback(toy: Path, tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "scripts" / "train_dpo.py"), "--model", str(toy / "model")]
    bad = [*script, "--train_data", "builtin:addition", "--output_dir", str(tmp_path / "bad")]
    said = re.sub(r"\s+", " ", run_program(bad, timeout_s=120, expect_failure=True))
    assert "builtin:addition: row 1: the record has no 'chosen', only ['answer', 'prompt']" in said
    assert "Traceback" not in said
    assert not (tmp_path / "bad").exists()


def test_adapters_train_and_the_whole_model_is_saved(
    offline_flags: Options, metrics_of: ReadMetrics, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    for kind in KINDS:
        fit(kind, plain(offline_flags(kind), tmp_path / kind, lora={"rank": 4}))
        rows = metrics_of(tmp_path / kind)[1:]
        assert len({row["loss"] for row in rows}) == 3
        assert (tmp_path / kind / "final" / "model.safetensors").is_file()
    assert rows[0]["loss"] == pytest.approx(math.log(2))  # DPO's reference is the model without its adapters
    scores = load_file(tmp_path / "rm" / "final" / "model.safetensors")["score.weight"]
    start = load_reward_model(
        plain(offline_flags("rm"), tmp_path)["model"], builtin_tokenizer(), materialize=True, seed=3
    )
    assert not torch.equal(scores, start.hf.score.weight)  # the head trains whole beside the adapters
