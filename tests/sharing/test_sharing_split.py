"""Ranks that split the tokens of a tree (--sp_size) compute what one process computes of whole sequences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightrl.builtin.model import tiny_model
from lightrl.testing import run_spmd

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "programs" / "shared_split_program.py"
SCRIPT = ROOT / "scripts" / "train_grpo.py"
SPLIT = ("--strategy", "fsdp", "--sp_size", "2")
EPS = "1e-4"  # at Adam's own 1e-8 the rounding errors of gradients near 0 become whole steps
COMPARED = ("loss", "grad_norm", "entropy", "kl", "ratio/mean")
REWARD = '''
def odd_digits(sample):
    """Learnable by a random model: the share of odd digits."""
    return sum(character in "13579" for character in sample.text) / 8
'''


def test_two_ranks_equal_whole_sequences_on_one() -> None:
    """Outputs and gradients of every model, asked for and by itself, also of micro-batches without a tree."""
    run_spmd(PROGRAM, *SPLIT, world_size=2, timeout_s=200)


@pytest.mark.slow
@pytest.mark.long
def test_four_ranks_of_both_kinds() -> None:
    run_spmd(PROGRAM, *SPLIT, "--tp_size", "2", world_size=4, timeout_s=280)


@pytest.mark.slow
def test_a_run_learns_the_same_with_it_and_without(tmp_path: Path) -> None:
    """Three samples in a micro-batch, so that groups of four are cut and some micro-batches have no tree."""
    for part in tiny_model():
        part.save_pretrained(tmp_path / "model")
    prompts = ["1+2+3+4+5+6+7+8+9+10+11+12=", "12+34+56+78+90+12+34=", "5="]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    (tmp_path / "reward.py").write_text(REWARD)
    flags = [
        *("--model", str(tmp_path / "model"), "--train_data", str(tmp_path / "train.jsonl"), "--lr", "1e-3"),
        *("--reward", f"{tmp_path / 'reward.py'}:odd_digits", "--num_prompts", "3", "--group_size", "4"),
        *("--num_minibatches", "1", "--micro_batch_size", "3", "--algorithm.kl_coef", "0.1", "--optim.eps", EPS),
        *("--max_steps", "2", "--checkpoint.every", "0", "--eval.every", "0"),
    ]
    runs = {}
    for way in ("False", "auto", "True"):
        folder = tmp_path / way
        run_spmd(
            SCRIPT, *flags, *SPLIT, "--share_prompts", way, "--output_dir", str(folder), world_size=2, timeout_s=200
        )
        runs[way] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    whole = runs.pop("False")
    assert len(whole) == 2
    for way, rows in runs.items():
        for mine, wanted in zip(rows, whole, strict=True):
            assert mine["tokens/computed_share"] < 0.9
            assert mine["reward/mean"] == wanted["reward/mean"]
            for metric in COMPARED:
                assert mine[metric] == pytest.approx(wanted[metric], abs=5e-6, rel=5e-6), (way, metric)
