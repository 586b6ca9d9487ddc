"""Each example of the documents runs: a user's own strategy on two ranks, a user's own reward."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lightrl.builtin.model import tiny_model
from lightrl.records import Prompt, Sample
from lightrl.rewards import load_reward, score
from lightrl.testing import StrategyContract, run_spmd

ROOT = Path(__file__).resolve().parents[1]
TRAIN = ROOT / "scripts" / "train_grpo.py"


@pytest.mark.parametrize(
    ("response", "reward"),
    [("127", 1.0), (" 127\n", 1.0), ("128", 2 / 3), ("271", 0.0), ("1", 1 / 3), ("1270", 3 / 4), ("", 0.0)],
)
def test_digit_reward_counts_characters_in_place(response: str, reward: float) -> None:
    prompt = Prompt(index=0, text="63+64=", token_ids=(1,), answer=127)
    sample = Sample(
        prompt=prompt, position=0, sample_index=0, response_ids=(), sampler_logprobs=(), versions=(),
        finish_reason="stop", text=response,
    )  # fmt: skip
    digit_reward = load_reward(f"{ROOT}/examples/digit_reward.py:digit_reward")
    assert score(digit_reward, [sample]) == pytest.approx([reward], abs=1e-12)


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
