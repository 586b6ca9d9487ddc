"""Options under the names of other trainers."""

from argparse import Namespace
from pathlib import Path

import pytest

from lightrl.config import StrategyOptions
from lightrl.config.foreign_options import _NAMES, MODEL_NAMES


def test_names_of_other_trainers_are_read(caplog: pytest.LogCaptureFixture) -> None:
    args = Namespace(
        bf16=True,
        zero_stage=3,
        adam_offload=True,
        engine_mem_util=0.6,
        enable_engine_sleep=False,
        fsdp_cpu_offload=True,
    )
    options = StrategyOptions.from_args(args)
    assert (options.dtype, options.engine_mem_fraction, options.engine_sleep_level) == ("bfloat16", 0.6, 0)
    assert (options.deepspeed.zero_stage, options.deepspeed.offload_optimizer) == (3, True)
    assert options.fsdp.cpu_offload
    assert caplog.text == ""
    other = StrategyOptions.from_args({"bf16": False, "enable_engine_sleep": True})
    assert (other.dtype, other.engine_sleep_level) == ("float32", 1)
    with pytest.raises(ValueError, match="engine_mem_fraction is 1.5"):
        StrategyOptions.from_args({"engine_mem_util": 1.5})


def test_the_optimizer_and_its_schedule_are_read(caplog: pytest.LogCaptureFixture) -> None:
    args = {
        "model_name_or_path": "folder",
        "actor_learning_rate": 3e-6,
        "critic_learning_rate": 9e-6,
        "adam_betas": (0.8, 0.9),
        "l2": 0.25,
        "lr_warmup_ratio": 0.125,
        "lr_warmup_steps": 7,
    }
    options = StrategyOptions.from_args(args)
    assert (options.lr, options.critic_lr) == (3e-6, 9e-6)
    optim = options.optim
    assert (optim.betas, optim.weight_decay, optim.warmup_ratio, optim.warmup_steps) == ((0.8, 0.9), 0.25, 0.125, 7)
    assert caplog.text == ""  # the folder of a model is no option, and not said to be ignored
    assert StrategyOptions.from_args({"bf16": True, "dtype": "float32"}).dtype == "float32"  # our own name wins


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("linear", "linear"),
        ("cosine", "cosine"),
        ("constant_with_warmup", "constant"),
        ("cosine_with_min_lr", "cosine"),
    ],
)
def test_a_schedule_has_the_name_of_transformers(theirs: str, ours: str) -> None:
    assert StrategyOptions.from_args({"lr_scheduler": theirs}).optim.schedule == ours


def test_the_page_lists_every_name_that_is_read() -> None:
    page = (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text()
    assert [name for name in (*_NAMES, *MODEL_NAMES) if f"`{name}`" not in page and f"args.{name}`" not in page] == []
