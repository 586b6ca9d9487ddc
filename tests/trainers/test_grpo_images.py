"""GRPO on images, whole runs: alike on one process and on two ranks, and the engine sees what the trainer trains."""

import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tiny_vlm import FAMILIES, IMAGE, TEMPLATE, VIDEO, frames, save_tiny_vlm, tiny_model
from transformers import AutoModelForImageTextToText, AutoProcessor

from lightrl.imports import is_installed
from lightrl.testing import run_program, run_spmd

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_grpo.py"
NO_VLLM = not is_installed("vllm")
IF_VLLM = pytest.mark.skipif(NO_VLLM, reason="vllm is not installed")
ENGINES = ["native", pytest.param("vllm", marks=[pytest.mark.engine, IF_VLLM])]
COLORS = {"red": "R", "lime": "G", "blue": "B"}
REWARD = '''
def letters(sample):
    """Learnable by a random model: its letter, or else the share of letters."""
    return 1.0 if sample.prompt.answer in sample.text else sum(character.isalpha() for character in sample.text) / 8
'''
LETTER_REWARD = """
def letter(sample):
    return 1.0 if sample.text == sample.prompt.answer else 0.1 * (sample.text in list("RGB"))
"""
Rows = list[dict[str, Any]]
ReadMetrics = Callable[[Path], Rows]


@pytest.fixture(scope="module", params=FAMILIES)
def flags(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of a run of three steps over colored squares of several sizes, a video, and text without an image."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    save_tiny_vlm(folder / "model", request.param)
    (folder / "images").mkdir()
    lines: list[dict[str, Any]] = []
    for place, (color, letter) in enumerate(COLORS.items()):
        Image.new("RGB", (40 + 30 * place, 90), color).save(folder / "images" / f"{color}.png")
        parts = [{"type": "image"}, {"type": "text", "text": "which?"}]
        record = {"messages": [{"role": "user", "content": parts}], "answer": letter}
        lines.append({**record, "images": [f"images/{color}.png"]})
    lines.append({"prompt": "no image: say Y", "answer": "Y"})
    lines.append({"prompt": f"{IMAGE} or {IMAGE}", "images": ["images/red.png", "images/blue.png"], "answer": "P"})
    np.save(folder / "images" / "video.npy", frames(3, 50, 40))
    lines.append({"prompt": f"{VIDEO}!", "videos": "images/video.npy", "answer": "V"})
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "reward.py").write_text(REWARD)
    return [
        *("--model", str(folder / "model"), "--train_data", str(folder / "train.jsonl")),
        *("--reward", f"{folder / 'reward.py'}:letters", "--lr", "1e-3", "--max_new_tokens", "6"),
        *("--num_prompts", "4", "--group_size", "4", "--max_steps", "3", "--canary_every", "1"),
        *("--temperature", "0.8", "--algorithm.kl_coef", "0.05"),
    ]


def samples_of(folder: Path) -> Rows:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_with_images_does_not_depend_on_the_ranks(
    engine: str, flags: list[str], metrics_of: ReadMetrics, tmp_path: Path
) -> None:
    arguments = [*flags, "--engine", engine]
    alone = [sys.executable, str(SCRIPT), *arguments, "--output_dir", str(tmp_path / "one")]
    run_program(alone, timeout_s=200)
    spread = ["--strategy", "fsdp", "--micro_batch_size", "1", "--gradient_checkpointing", "True"]
    run_spmd(SCRIPT, *arguments, *spread, "--output_dir", str(tmp_path / "two"), world_size=2, timeout_s=200)
    one, two = metrics_of(tmp_path / "one"), metrics_of(tmp_path / "two")
    assert [row["step"] for row in one] == [row["step"] for row in two] == [1, 2, 3]
    for row in (*one, *two):
        assert row["mismatch/max_abs"] <= 1e-5
        assert row["sync/canary_max_abs"] <= 1e-5
        assert row["grad_norm"] > 0
    for mine, yours in zip(one, two, strict=True):
        for name in ("tokens/prompt", "tokens/response", "reward/mean"):
            assert mine[name] == yours[name], name
        for name in ("loss", "grad_norm", "entropy", "kl"):
            assert math.isclose(mine[name], yours[name], rel_tol=1e-4, abs_tol=1e-7), (name, mine[name], yours[name])
    responses = [(row["position"], row["sample"], row["response"]) for row in samples_of(tmp_path / "one")]
    assert responses == [(row["position"], row["sample"], row["response"]) for row in samples_of(tmp_path / "two")]
    check_saved_model(tmp_path / "two" / "final", tmp_path / "one" / "final", Path(flags[1]))


ECHO = ["--rollout.workflow", "environment", "--rollout.workflow_args", "environment=tests.programs.episodes:Echo"]
SCREENS = ["--rollout.workflow", "environment", "--rollout.workflow_args", "environment=tests.programs.screens:Screens"]
AGENT = ["--rollout.workflow", "agent", "--rollout.workflow_args", "agent=tests.programs.seeing_agents:show"]
OVER_ISSUE = ["--rollout.over_issue", "0.5", "--rollout.max_staleness", "1", "--rollout.agree_every", "2"]
FROZEN_TOWER = ["--optim.lr_scales", "visual=0"]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "own",
    [ECHO, [*OVER_ISSUE, *FROZEN_TOWER], SCREENS, [*SCREENS, *OVER_ISSUE], AGENT],
    ids=["environment", "schedule", "screens", "screens-schedule", "agent"],
)
def test_every_turn_and_every_part_of_a_sample_sees_the_images(
    own: list[str], flags: list[str], metrics_of: ReadMetrics, tmp_path: Path
) -> None:
    arguments = [*flags, *own]
    alone = [sys.executable, str(SCRIPT), *arguments, "--output_dir", str(tmp_path / "one")]
    run_program(alone, timeout_s=200)
    spread = [*arguments, "--strategy", "fsdp", "--output_dir", str(tmp_path / "two")]
    run_spmd(SCRIPT, *spread, world_size=2, timeout_s=200)
    one, two = metrics_of(tmp_path / "one"), metrics_of(tmp_path / "two")
    assert [row["step"] for row in one] == [row["step"] for row in two] == [1, 2, 3]
    for row in (*one, *two):
        assert row["mismatch/max_abs"] <= 1e-5
        assert row["grad_norm"] > 0
        assert row.get("episode/failed", 0) == 0
        assert row.get("episode/seen", 80) == 80  # calls of an agent: 5 in each of 16 episodes
    assert sum(row["tokens/prompt"] for row in one) == sum(row["tokens/prompt"] for row in two)
    for mine, yours in zip(one, two, strict=True):
        assert math.isclose(mine["grad_norm"], yours["grad_norm"], rel_tol=1e-3)
    start, final = (load_file(folder / "model.safetensors") for folder in (Path(flags[1]), tmp_path / "two" / "final"))
    moved = {name for name in start if not torch.equal(start[name], final[name])}
    assert moved
    assert any("visual" in name for name in moved) == ("visual=0" not in own)
    texts = [
        [(row["ticket"], row["sample"], row["response"]) for row in samples_of(tmp_path / name)]
        for name in ("one", "two")
    ]
    assert sorted(texts[0]) == sorted(texts[1])


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("own", [[*SCREENS, *OVER_ISSUE], AGENT], ids=["screens", "agent"])
def test_episodes_that_have_shown_images_go_on_after_a_resume(
    own: list[str], flags: list[str], metrics_of: ReadMetrics, tmp_path: Path
) -> None:
    arguments = [*flags, *own, "--checkpoint.every", "1", "--checkpoint.keep", "3"]
    command = [sys.executable, str(SCRIPT), *arguments, "--output_dir", str(tmp_path)]
    run_program(command, timeout_s=200)
    wanted, weights = metrics_of(tmp_path), load_file(tmp_path / "final" / "model.safetensors")
    for folder in ("final", "checkpoints/step-000002", "checkpoints/step-000003"):
        shutil.rmtree(tmp_path / folder)
    assert "continuing after step 1" in run_program(command, timeout_s=200)
    # Requests of agents arrive at any time, and the engine rounds by what it computes together.
    rel, atol = (1e-4, 2e-4) if own is AGENT else (0, 0)
    for mine, yours in zip(wanted, metrics_of(tmp_path), strict=True):
        for name in ("loss", "grad_norm"):
            assert mine[name] == pytest.approx(yours[name], rel=rel, abs=rel / 100), name
        assert yours["mismatch/max_abs"] <= 1e-5
    final = load_file(tmp_path / "final" / "model.safetensors")
    for name, value in final.items():
        torch.testing.assert_close(weights[name], value, atol=atol, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("workflow", ["episodes:Calculating", "screens:Looking"], ids=["text", "images"])
def test_tools_are_called_for_prompts_with_images(
    workflow: str, flags: list[str], metrics_of: ReadMetrics, tmp_path: Path
) -> None:
    (tmp_path / "own.jinja").write_text(
        "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}" + TEMPLATE
    )
    own = ["--rollout.workflow", f"tests.programs.{workflow}", "--rollout.max_turns", "2"]
    own += ["--data.chat_template_file", str(tmp_path / "own.jinja"), "--output_dir", str(tmp_path / "run")]
    run_program([sys.executable, str(SCRIPT), *flags, *own], timeout_s=200)
    for row in metrics_of(tmp_path / "run"):
        assert row["mismatch/max_abs"] <= 1e-5
        assert row["episode/failed"] == 0
        assert row["episode/tool_calls"] == 16
        assert row["grad_norm"] > 0
    samples = samples_of(tmp_path / "run")
    assert any(IMAGE in row["prompt"] for row in samples)
    assert all(row["prompt"].startswith("[calculator]user:") for row in samples)
    heard = "tool:42;" if workflow == "episodes:Calculating" else "tool:see 6*7;"
    assert all(f"{heard}assistant:" in row["response"] for row in samples)


def check_saved_model(final: Path, other: Path, start: Path) -> None:
    """transformers loads it with its processor; every part of it was trained, the same on one rank and on two."""
    models = [AutoModelForImageTextToText.from_pretrained(folder) for folder in (final, other, start)]
    spread, alone, first = (dict(model.named_parameters()) for model in models)
    assert set(spread) == set(first) == set(dict(tiny_model(models[0].config.model_type).named_parameters()))
    for name, parameter in spread.items():
        torch.testing.assert_close(parameter, alone[name], atol=2e-4, rtol=0)
    moved = {name for name, parameter in spread.items() if not torch.equal(parameter, first[name])}
    assert any("visual.patch_embed" in name for name in moved)
    assert any("lm_head" in name or "embed_tokens" in name for name in moved)
    processor = AutoProcessor.from_pretrained(final)
    inputs = processor(text=f"a{IMAGE}b", images=[Image.new("RGB", (50, 50), "red")], return_tensors="pt")
    assert models[0].generate(**inputs, max_new_tokens=2).shape[1] == inputs["input_ids"].shape[1] + 2


@pytest.mark.slow
@pytest.mark.long
def test_a_run_learns_what_only_the_image_tells(metrics_of: ReadMetrics, tmp_path: Path) -> None:
    """One prompt for every color: who does not see is right at most once in three."""
    save_tiny_vlm(tmp_path / "model", "qwen2_5_vl")
    lines = []
    for color, letter in COLORS.items():
        Image.new("RGB", (56, 56), color).save(tmp_path / f"{color}.png")
        lines.append(json.dumps({"prompt": f"{IMAGE}?", "images": f"{color}.png", "answer": letter}))
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "reward.py").write_text(LETTER_REWARD)
    flags = ["--model", str(tmp_path / "model"), "--train_data", str(tmp_path / "train.jsonl")]
    flags += ["--reward", f"{tmp_path / 'reward.py'}:letter", "--data.chat_template", "never", "--lr", "1e-3"]
    flags += ["--max_new_tokens", "1", "--num_prompts", "3", "--group_size", "128", "--max_steps", "60"]
    command = [sys.executable, str(SCRIPT), *flags, "--checkpoint.every", "0", "--output_dir", str(tmp_path / "run")]
    run_program(command, timeout_s=150)
    rows = metrics_of(tmp_path / "run")
    assert rows[0]["reward/mean"] < 0.1
    assert rows[-1]["reward/mean"] > 0.55  # blind: (1 + 0.1 + 0.1) / 3 = 0.4


def test_bad_images_end_a_run_before_a_model_is_loaded(flags: list[str], tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(
        '{"prompt": "a", "answer": "R"}\n' + json.dumps({"prompt": IMAGE, "images": "none.png", "answer": "R"}) + "\n"
    )
    command = [sys.executable, str(SCRIPT), *flags, "--train_data", str(tmp_path / "bad.jsonl")]
    output = run_program([*command, "--output_dir", str(tmp_path / "run")], timeout_s=60, expect_failure=True)
    assert f"bad.jsonl:2: there is no image {tmp_path / 'none.png'}" in re.sub(r"\s+", " ", output)
    assert "Traceback" not in output
    assert not (tmp_path / "run").exists()
