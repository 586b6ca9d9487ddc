"""`lightrl plan` and --dry_run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from lightrl.plan.plan_program import parse_size
from lightrl.programs import main, start


@pytest.fixture
def model(small_config: Any, tmp_path: Path) -> str:
    """A config.json, and no weights."""
    (tmp_path / "config.json").write_text(json.dumps(small_config.to_dict()))
    return str(tmp_path / "config.json")


def test_the_exit_code_says_whether_a_run_fits(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "grpo", "--model", model, "--ranks", "4", "--strategy", "fsdp", "--max_new_tokens", "64"]
    assert main([*asked, "--device_memory", "1GB", "--dtype", "bfloat16"]) == 0
    assert "on 4 rank(s) by fsdp" in capsys.readouterr().out
    assert main([*asked, "--device-memory", "100KB", "--json", "True"]) == 1
    assert json.loads(capsys.readouterr().out)["fits"] is False


@pytest.mark.parametrize("split", [("--tp_size", "2"), ("--fsdp.replicate_size", "2")])
def test_only_the_ranks_that_train_are_split(
    model: str, split: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["plan", "grpo", "--model", model, "--ranks", "3", "--rollout_ranks", "1", "--max_new_tokens", "64"]
    assert main([*asked, *split]) == 0
    assert "on 3 rank(s) by fsdp" in capsys.readouterr().out


def test_fit_prints_flags(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "sft", "--model", model, "--ranks=1", "--response_tokens", "100", "--fit", "True"]
    assert main([*asked, "--device_memory", "9MB"]) == 0
    assert capsys.readouterr().out.startswith("--fit: --max_tokens_per_microbatch ")
    assert main([*asked, "--device_memory", "9MB", "--json", "True"]) == 0
    assert json.loads(capsys.readouterr().out)["chosen"].startswith("--fit: --max_tokens_per_microbatch ")


def test_a_length_left_at_the_default_of_the_built_in_model_is_told(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["plan", "grpo", "--ranks", "1"]
    main([*asked, "--model", model])
    assert "The plan is for responses of 8 tokens, the default of --max_new_tokens" in capsys.readouterr().err
    main([*asked, "--model", model, "--max_new_tokens", "9"])
    main([*asked, "--model", model, "--response_tokens", "8"])
    main(["plan", "sft", "--ranks", "1", "--model", model])
    assert capsys.readouterr().err == ""


def test_a_dry_run_starts_nothing(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asked = ["--model", model, "--output_dir", str(tmp_path / "run"), "--dry_run", "True"]
    for begin in (lambda: main(["train", "dpo", *asked]), lambda: start("dpo", asked)):  # start(): as scripts/ do
        with pytest.raises(SystemExit) as end:
            begin()
        assert end.value.code == 0
        told = capsys.readouterr().out
        assert told.startswith("dpo: ")
        assert "score by reference" in told
        assert told.endswith("give lightrl plan --device_memory, such as 24GB, to see whether that fits\n")
    assert not (tmp_path / "run").exists()


def test_the_least_peak_is_told_where_nothing_fits(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--fit", "True", "--response_tokens", "64", "--max_tokens_per_microbatch", "512"]
    assert main(["plan", "sft", "--model", model, "--ranks", "2", "--device_memory", "1KB", *few]) == 1
    told = capsys.readouterr().out
    assert re.search(r"no choice fits. The least peak is [\d.]+ [KM]B in 'train policy', by --dtype bf", told)
    assert "Use more --ranks, --lora.rank 32, or a smaller model." in told


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["plan", "grop"], "choose one of grpo, ppo, sft, rm, dpo"),
        (
            ["plan", "--model", "x"],
            "lightrl plan --model: choose one of grpo, ppo, sft, rm, dpo, such as",
        ),
        (["plan", "grpo", "--ranks", "3", "--tp_size", "2"], "--tp_size 2 = 2 does not divide 3 ranks"),
        (["plan", "grpo", "--device_memory", "24"], "give a number with a unit"),
        (["plan", "grpo", "--fit", "True"], "--fit True needs the memory of a device: give --device_memory"),
        (["plan", "grpo", "--model", "no/folder/here"], "no such folder. A plan also takes the path of"),
        (["plan", "grpo", "--model", "none.json"], "--model none.json is no config.json of a model"),
        (
            ["plan", "ppo", "--ranks", "3", "--tp_size", "3"],
            "--tp_size 3 does not divide the model's 4 attention heads",
        ),
    ],
)
def test_mistakes_end_with_code_2(words: list[str], wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert wanted in capsys.readouterr().err


def test_a_model_that_a_run_would_refuse_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    phi = AutoConfig.for_model("phi", **small, qk_layernorm=True)
    for changes, options, wanted in (
        ({}, ["--tp_size", "2"], r"how to cut layers\.0\.self_attn\.q_layernorm\.weight, which belongs to a part"),
        (
            {"model_type": "qwen3", "layer_types": ["full_attention"] * 3},
            [],
            r"is no config\.json .*`layer_types` \(3\)",
        ),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**phi.to_dict(), **changes}))
        words = ["plan", "ppo", "--strategy", "fsdp", "--ranks", "2", "--model", str(tmp_path / "config.json")]
        with pytest.raises(SystemExit) as end:
            main([*words, *options])
        assert end.value.code == 2
        assert re.search(wanted, capsys.readouterr().err)


def test_a_model_without_attention_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba2"}))
    with pytest.raises(SystemExit) as end:
        main(["plan", "grpo", "--ranks", "1", "--model", str(tmp_path / "config.json")])
    assert end.value.code == 2
    assert "counts what attention needs, and type 'mamba2' has no attention heads" in capsys.readouterr().err


def test_sizes() -> None:
    assert [parse_size(text) for text in ("24GB", "1.5 MiB", "80gib")] == [24e9, 1.5 * 2**20, 80 * 2**30]
