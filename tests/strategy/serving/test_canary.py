"""Weight syncs that are spoilt, over whole strategies; see the program."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrl.config import StrategyOptions
from lightrl.engines.base import Completion, EnginePrompt, WeightSyncError
from lightrl.strategy.serving import colocated_serving
from lightrl.strategy.serving.colocated_serving import Canary, _difference
from lightrl.strategy.torch_native import SingleStrategy
from lightrl.testing import run_program, run_spmd
from lightrl.testing.tiny_training import fresh

PROGRAM = Path(__file__).parents[2] / "programs" / "sabotage_program.py"


def test_every_sabotage_is_caught_in_one_process() -> None:
    assert "all checked" in run_program([sys.executable, str(PROGRAM), "single"], timeout_s=120)


@pytest.mark.slow
@pytest.mark.parametrize("options", ["ddp", "fsdp", "fsdp --engine_sleep_level 2"])  # the last exchanges shards
def test_every_sabotage_is_caught_on_two_ranks(options: str) -> None:
    assert run_spmd(PROGRAM, *options.split(), world_size=2, timeout_s=180).count("all checked") == 2


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed")
def test_every_sabotage_is_caught_where_zero_shards_the_parameters() -> None:
    flags = ["--deepspeed.zero_stage", "3", "--deepspeed.param_persistence_threshold", "0"]
    assert run_spmd(PROGRAM, "deepspeed", *flags, world_size=2, timeout_s=180).count("all checked") == 2


def completion(*logprobs: float) -> Completion:
    return Completion(
        request_id=0,
        sample_index=0,
        prompt_token_ids=(1,),
        output_token_ids=(2,) * len(logprobs),
        logprobs=logprobs,
        versions=(0,) * len(logprobs),
        finish_reason="length",
    )


def test_prompts_with_images_are_kept_first() -> None:
    no_trainer: Any = None
    canary = Canary(no_trainer)
    texts = [EnginePrompt(token_ids=(place,)) for place in range(3)]
    picture = EnginePrompt(token_ids=(9,), images=("image",))
    canary.keep([*texts, picture])
    assert canary._prompts == [picture, texts[0]]
    canary.keep([])  # a rank that had none this time
    assert canary._prompts == [picture, texts[0]]


def test_float32_is_judged_by_its_worst_token_and_bfloat16_by_the_mean() -> None:
    completions = [completion(-1.0, -2.0, -3.0), completion(-1.0), completion()]
    theirs = [torch.tensor([-1.0, -2.5, -3.0]), torch.tensor([-1.3]), torch.zeros(0)]
    assert _difference(theirs, completions, torch.float32) == pytest.approx(0.5, abs=1e-6)
    assert _difference(theirs, completions, torch.bfloat16) == pytest.approx(0.2, abs=1e-6)  # (0 + 0.5 + 0 + 0.3) / 4
    assert _difference([torch.zeros(0)], completions[2:], torch.float32) == 0.0
    theirs[0][0] = torch.nan
    assert [_difference(theirs, completions, dtype) for dtype in (torch.float32, torch.bfloat16)] == [torch.inf] * 2


@pytest.mark.slow
def test_the_built_in_model_runs_in_bfloat16(tmp_path: Path) -> None:
    """Its logits are large, so that single tokens differ by more than half."""
    script = str(PROGRAM.parents[2] / "scripts" / "train_grpo.py")
    options = ["--dtype", "bfloat16", "--max_steps", "2", "--canary_every", "1", "--eval.every", "0"]
    run_program([sys.executable, script, *options, "--output_dir", str(tmp_path / "run")], timeout_s=120)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [0 < row["sync/canary_max_abs"] < 0.25 for row in rows] == [True] * 2


def test_a_nan_is_the_largest_difference() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert _difference([torch.tensor([-1.0, float("nan")])], [completion(-1.0, -2.0)], dtype) == float("inf")


def test_weights_that_the_canary_refuses_are_sent_again_before_they_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = SingleStrategy(0, 1.0, 1, 1, StrategyOptions(exact_batches=True, canary_every=1))
    strategy.setup_distributed()
    policy, _ = fresh(strategy)
    strategy.setup_inference_engine(None, "native", actor=policy)
    with monkeypatch.context() as patch:
        patch.setattr(colocated_serving, "_difference", lambda *given: 1.0)
        for call in (lambda: strategy.sync_weights(policy), lambda: strategy.generate([], [])):
            with pytest.raises(WeightSyncError, match="differs from the trainer's by 1 "):
                call()
    assert strategy.generate([], []) == []
    assert strategy.engine is not None
    assert not strategy.engine.needs_weights
    strategy.close()
