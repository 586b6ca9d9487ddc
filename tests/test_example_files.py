"""Each example of the documents runs: a user's own strategy on two ranks, a user's own reward."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from made_samples import made_sample

from lightrl import GRPOConfig, create_strategy
from lightrl.builtin.model import tiny_model
from lightrl.records import Prompt
from lightrl.rewards import load_reward, score
from lightrl.testing import StrategyContract, run_spmd

ROOT = Path(__file__).resolve().parents[1]
TRAIN = ROOT / "scripts" / "train_grpo.py"
PROGRAMS = {  # each with arguments that it accepts
    "custom_trainer": "", "loop": "", "own_loop": "", "remax": "", "rollouts": "3", "small_models": "lcm folder",
    "smollm2": "folder",
}  # fmt: skip


@pytest.mark.parametrize(
    ("response", "reward"),
    [("127", 1.0), (" 127\n", 1.0), ("128", 2 / 3), ("271", 0.0), ("1", 1 / 3), ("1270", 3 / 4), ("", 0.0)],
)
def test_digit_reward_counts_characters_in_place(response: str, reward: float) -> None:
    prompt = Prompt(index=0, text="63+64=", token_ids=(1,), answer=127)
    sample = made_sample(prompt=prompt, text=response)  # fmt: skip
    digit_reward = load_reward(f"{ROOT}/examples/digit_reward.py:digit_reward")
    assert score(digit_reward, [sample]) == pytest.approx([reward], abs=1e-12)


@pytest.mark.parametrize(
    ("example", "arguments", "code", "wanted"),
    [
        *((name, "--help", 0, name) for name in PROGRAMS),
        *((name, f"{accepted} --nonsense", 2, "--nonsense") for name, accepted in PROGRAMS.items()),
        ("custom_trainer", "--max_steps many", 2, "many"),
        ("loop", "--num_prompts 0", 2, "error: --num_prompts is 0: it must be"),
        ("loop", "--max_steps -1", 2, "error: --max_steps is -1: it must be"),
        ("own_loop", "--max_steps -1", 2, "error: --max_steps is -1: it must be"),
        ("remax", "--group_size 0", 2, "error: --group_size is 0: it must be"),
        ("rollouts", "many", 2, "error: argument steps: invalid int value: 'many'"),
        ("small_models", "calculator file", 1, "error: [Errno 20] Not a directory"),
        ("smollm2", "file", 1, "error: [Errno 17] File exists"),
    ],
)
def test_an_example_explains_itself_and_a_mistake(
    example: str, arguments: str, code: int, wanted: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{example}.py", *arguments.split()])
    with torch.random.fork_rng(), pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples" / f"{example}.py"), run_name="__main__")
    said = capsys.readouterr()
    text = f"{said.out}{said.err}"
    if isinstance(ended.value.code, str):  # Python prints it and exits with 1
        assert code == 1
        text += ended.value.code
    else:
        assert ended.value.code in ((None, 0) if code == 0 else (code,))
    assert wanted in text


@pytest.mark.slow
class TestReplicatedStrategy(StrategyContract):
    strategy = "examples.custom_strategy:ReplicatedStrategy"
    world_sizes = (2,)
    cwd = ROOT


@pytest.mark.slow
def test_a_strategy_of_ones_own_trains_as_fsdp_does(tmp_path: Path) -> None:
    model, tokenizer = tiny_model()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    own, fsdp = (train(tmp_path, name) for name in ("examples.custom_strategy:ReplicatedStrategy", "fsdp"))
    assert [row["step"] for row in own] == [1, 2, 3]
    for ours, theirs in zip(own, fsdp, strict=True):
        assert ours["reward/mean"] == theirs["reward/mean"]
        for name in ("loss", "grad_norm", "entropy"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-7)


def test_a_strategy_of_ones_own_computes_in_the_type_of_the_options() -> None:
    logits = {}
    for dtype in ("float32", "bfloat16"):
        config = GRPOConfig(strategy="examples.custom_strategy:ReplicatedStrategy", dtype=dtype)
        model = create_strategy(config).prepare_model(tiny_model()[0])
        logits[dtype] = model(torch.tensor([[1, 2, 3]])).logits.dtype
    assert logits == {"float32": torch.float32, "bfloat16": torch.bfloat16}


def train(folder: Path, strategy: str) -> list[dict[str, float]]:
    output_dir = folder / re.sub(r"\W", "-", strategy)
    run_spmd(
        TRAIN, "--strategy", strategy, "--reward", "examples/digit_reward.py:digit_reward",
        "--model", str(folder / "model"), "--max_steps", "3", "--num_prompts", "4", "--group_size", "4",
        "--max_new_tokens", "4", "--micro_batch_size", "3", "--eval.every", "0", "--checkpoint.every", "0",
        "--log.tensorboard", "False", "--distributed.device", "cpu", "--distributed.timeout_s", "60",
        "--output_dir", str(output_dir), world_size=2, timeout_s=120, cwd=ROOT,
    )  # fmt: skip
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
