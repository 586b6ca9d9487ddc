"""SFT and DPO on images: the training is that of transformers' own forward, on one process and on two ranks."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import plain_offline
import pytest
import torch
from PIL import Image
from tiny_vlm import FAMILIES, IMAGE, VIDEO, frames, save_tiny_vlm
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForImageTextToText, AutoProcessor

from lightrl.config import DPOConfig, SFTConfig
from lightrl.testing import run_program, run_spmd
from lightrl.trainers.dpo import DPOTrainer
from lightrl.trainers.sft import SFTTrainer

SCRIPTS = Path(__file__).parents[2] / "scripts"
ReadMetrics = Callable[[Path], list[dict[str, Any]]]
ROWS = [  # prompt, images, the right and another answer
    (f"{IMAGE}which?", ["red"], "R", "GG"),
    (f"{IMAGE} or {IMAGE}?", ["red", "lime"], "both", "N"),
    ("no image", [], "Y", "no"),
    (f"a{IMAGE}", ["lime"], "G", "R"),
]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp(request.param)
    save_tiny_vlm(made / "model", request.param)
    for place, color in enumerate(("red", "lime")):
        Image.new("RGB", (40 + 30 * place, 90), color).save(made / f"{color}.png")
    responses, pairs = [], []
    for prompt, colors, right, wrong in ROWS:
        given = {"prompt": prompt, "images": [f"{color}.png" for color in colors]}
        responses.append({**given, "response": right})
        pairs.append({**given, "chosen": right, "rejected": wrong})
    parts = [{"type": "image", "image": str(made / "red.png")}, {"type": "text", "text": "which?"}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "R"}]}
    responses[0] = {"messages": [{"role": "user", "content": parts}, answer]}
    pairs[3] = {"prompt": "a<image>", "image": "lime.png", "chosen": "G", "rejected": "R"}
    for name, rows in (("responses", responses), ("pairs", pairs)):
        (made / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


def flags(folder: Path, data: str, output: Path) -> list[str]:
    return [
        *("--model", str(folder / "model"), "--train_data", str(folder / f"{data}.jsonl"), "--lr", "1e-2"),
        *("--batch_size", "4", "--max_steps", "3", "--optim.eps", str(plain_offline.EPS), "--eval.every", "0"),
        *("--checkpoint.every", "0", "--output_dir", str(output)),
    ]


class Plain:
    """A model with its processor, which score an answer by their own forward."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model: Any = AutoModelForImageTextToText.from_pretrained(folder / "model")
        self.processor: Any = AutoProcessor.from_pretrained(folder / "model")

    def logprobs(self, prompt: str, colors: list[str], answer: str) -> Tensor:
        given = f"user:{prompt};assistant:"
        images = [Image.open(self.folder / f"{color}.png") for color in colors] or None
        whole, before = (
            self.processor(text=[text], images=images, return_tensors="pt")
            for text in (f"{given}{answer};<eos>", given)
        )
        length = before["input_ids"].shape[1]
        logprobs = self.model(**whole).logits[0, length - 1 : -1].log_softmax(-1)
        return logprobs.gather(1, whole["input_ids"][0, length:, None])[:, 0]


def test_sft_is_that_of_plain_pytorch(folder: Path, metrics_of: ReadMetrics, tmp_path: Path) -> None:
    plain = Plain(folder)

    def loss_fn() -> Tensor:
        return -torch.cat([plain.logprobs(prompt, colors, right) for prompt, colors, right, _ in ROWS]).mean()

    wanted = plain_offline.train(plain.model, loss_fn, steps=3, lr=1e-2)
    run_program(
        [sys.executable, str(SCRIPTS / "train_sft.py"), *flags(folder, "responses", tmp_path / "one")], timeout_s=120
    )
    run_spmd(
        SCRIPTS / "train_sft.py",
        *flags(folder, "responses", tmp_path / "two"),
        *("--strategy", "fsdp", "--micro_batch_size", "1"),
        world_size=2,
        timeout_s=120,
    )
    for name in ("one", "two"):
        rows = metrics_of(tmp_path / name)
        assert [row["loss"] for row in rows] == pytest.approx(wanted.losses, rel=1e-4)
        assert [row["grad_norm"] for row in rows] == pytest.approx(wanted.norms, rel=1e-3)
        # Answers of 1 + 4 + 1 + 1 characters, each with a semicolon and an end token.
        assert rows[0]["tokens/trained"] == 15
    assert wanted.losses[-1] < wanted.losses[0]


def test_dpo_is_that_of_plain_pytorch(folder: Path, metrics_of: ReadMetrics, tmp_path: Path) -> None:
    policy, reference = Plain(folder), Plain(folder)

    def log_ratio(*row: Any) -> Tensor:
        with torch.no_grad():
            held = reference.logprobs(*row).sum()
        return policy.logprobs(*row).sum() - held

    def loss_fn() -> Tensor:
        found = [
            log_ratio(prompt, colors, right) - log_ratio(prompt, colors, wrong) for prompt, colors, right, wrong in ROWS
        ]
        return -F.logsigmoid(0.5 * torch.stack(found)).mean()

    wanted = plain_offline.train(policy.model, loss_fn, steps=3, lr=1e-2)
    arguments = [*flags(folder, "pairs", tmp_path / "run"), "--beta", "0.5"]
    run_spmd(SCRIPTS / "train_dpo.py", *arguments, "--strategy", "ddp", world_size=2, timeout_s=120)
    rows = metrics_of(tmp_path / "run")
    assert rows[0]["loss"] == pytest.approx(math.log(2), rel=1e-5)
    assert [row["loss"] for row in rows] == pytest.approx(wanted.losses, rel=1e-4)
    assert [row["grad_norm"] for row in rows] == pytest.approx(wanted.norms, rel=1e-3)


QUESTION = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}
ANSWER = {"role": "assistant", "content": "R"}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": IMAGE, "response": "R"}, r"1 image placeholder\(s\) .* and 0 image"),
        ({"prompt": "?", "response": "R", "images": "red.png"}, r"0 image placeholder\(s\) .* and 1 image"),
        ({"prompt": IMAGE, "response": "R", "images": "none.png"}, r"there is no image .*none\.png"),
        (
            {"messages": [QUESTION, ANSWER, QUESTION, ANSWER], "images": ["red.png", "lime.png"]},
            r"an image or a video stands after the first answer .* Use --data\.train_on last",
        ),
        (
            {"messages": [QUESTION, ANSWER, QUESTION], "images": ["red.png", "lime.png"]},
            r"an image or a video stands after the last answer, where nothing is trained",
        ),
        (
            {"messages": [QUESTION, {"role": "assistant", "content": [{"type": "image"}]}], "images": ["red.png"] * 2},
            r"messages\[1\] has an image or a video in its content, where only text is taken",
        ),
    ],
)
def test_a_bad_line_is_told_with_its_place(folder: Path, row: dict[str, Any], problem: str, tmp_path: Path) -> None:
    good = {"prompt": IMAGE, "response": "R", "images": "red.png"}
    (folder / "bad.jsonl").write_text(json.dumps(good) + "\n" + json.dumps(row) + "\n")
    config = SFTConfig(
        model=str(folder / "model"), train_data=str(folder / "bad.jsonl"), output_dir=str(tmp_path / "run")
    )
    with pytest.raises(ValueError, match=rf"bad\.jsonl:2: .*{problem}|bad\.jsonl:2: {problem}"):
        SFTTrainer(config)


def test_conversations_videos_and_lengths(folder: Path, tmp_path: Path) -> None:
    """With train_on last, images may stand in any turn; the length of an example counts the tokens of its images."""
    np.save(folder / "v.npy", frames(3, 50, 40))
    rows = [
        {"messages": [QUESTION, ANSWER, QUESTION, ANSWER], "images": ["red.png", "lime.png"]},
        {"prompt": f"{VIDEO}!", "response": "V", "videos": "v.npy"},
    ]
    (folder / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = SFTConfig(
        model=str(folder / "model"),
        train_data=str(folder / "more.jsonl"),
        output_dir=str(tmp_path / "run"),
        max_steps=1,
    )
    config.data.train_on = "last"
    trainer = SFTTrainer(config)
    trainer.fit()
    assert [answer.images for example in trainer.examples.train for answer in example.answers] == [
        (str(folder / "red.png"), str(folder / "lime.png")),
        (),
    ]
    pairs = DPOConfig(
        model=str(folder / "model"), train_data=str(folder / "pairs.jsonl"), output_dir=str(tmp_path / "d")
    )
    pairs.data.max_tokens = 36  # line 2 has 33 tokens, of which 2 stand for images of 3 and 6
    with pytest.raises(ValueError, match=r"pairs\.jsonl:2: prompt and answer have 40 tokens, and there is room for 36"):
        DPOTrainer(pairs)
