"""Runs on a simulated CUDA device keep to one device and compute what they compute on the CPU."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from simulated_cuda.simulated_cuda import LIBRARY, build, compiler
from tiny_vlm import IMAGE, checkered, save_tiny_vlm

from lightrl.testing import run_program, run_spmd, strategy_program
from lightrl.testing.tiny_training import adamw, plain_training

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler: g++, or what CXX names"),
]
ROOT = Path(__file__).parents[1]
PLANNED = ROOT / "benchmarks" / "plan_program.py"
FOLDER = ROOT / "tests" / "simulated_cuda"
FEW = "--max_steps 2 --num_prompts 4 --eval.every 0"
GROUPS = f"train_grpo {FEW} --group_size 4"
COMPARED = ("loss", "grad_norm", "reward/mean", "kl", "critic/loss", "critic/grad_norm", "entropy")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build(tmp_path_factory.mktemp("simulated_cuda")))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def compare(there: list[dict[str, Any]], here: list[dict[str, Any]], tolerance: float) -> None:
    """Compares what a run on the device computed with what one on the CPU did."""
    assert len(there) == len(here) == 2
    for one, other in zip(there, here, strict=True):
        assert one["memory/device_gb"] > 0
        found = {name for name in COMPARED if name in other}
        assert "loss" in found
        for name in found:
            assert math.isclose(one[name], other[name], rel_tol=tolerance, abs_tol=1e-5), name


@pytest.mark.parametrize(
    "flags",
    [
        f"{GROUPS} --share_prompts True --temperature 0.7",
        f"{GROUPS} --dtype bfloat16 --lora.rank 4",
        f"{GROUPS} --engine_sleep_level 2 --offload_while_generating True --algorithm.kl_coef 0.1 --ema_decay 0.9",
        f"{GROUPS} --rollout.over_issue 0.5 --rollout.keep_cache True --rollout.max_staleness 1",
        f"{GROUPS} --algorithm.advantage remax --top_p 0.9 --top_k 20 --gradient_checkpointing True",
        f"train_ppo {FEW} --num_minibatches 2 --num_epochs 2 --native.share_weights True",
        "train_sft --max_steps 2 --eval.every 0",
        "train_dpo --max_steps 2 --eval.every 0",
    ],
    ids=lambda flags: flags.replace(f"{FEW} ", ""),
)
def test_a_run_on_the_device_is_that_on_the_cpu(flags: str, library: str, tmp_path: Path) -> None:
    program, *options = flags.split()
    command = [str(ROOT / "scripts" / f"{program}.py"), *options]
    device = [sys.executable, str(FOLDER / "simulated_cuda.py"), library]
    outputs = {name: ["--distributed.device", name, "--output_dir", str(tmp_path / name)] for name in ("cuda", "cpu")}
    run_program([*device, *command, *outputs["cuda"]], timeout_s=120)
    run_program([sys.executable, *command, *outputs["cpu"]], timeout_s=120)
    tolerance = 2e-2 if "bfloat16" in flags else 1e-4
    compare(rows_of(tmp_path / "cuda"), rows_of(tmp_path / "cpu"), tolerance)


@pytest.mark.parametrize(
    "flags",
    [
        "--strategy ddp --native.share_weights True",
        "--strategy fsdp --sp_size 2 --share_prompts True",
        "--strategy fsdp --tp_size 2 --engine_sleep_level 2 --algorithm.kl_coef 0.1",
        "--strategy fsdp --offload_while_generating True --lora.rank 4",
        "--strategy fsdp --fsdp.cpu_offload True",
        "--strategy single --rollout_ranks 1 --rollout.max_staleness 1",
        pytest.param("--strategy deepspeed", marks=pytest.mark.engine),
    ],
)
def test_ranks_with_a_device_each_compute_what_they_do_on_the_cpu(flags: str, library: str, tmp_path: Path) -> None:
    program, *options = GROUPS.split()
    command = [str(ROOT / "scripts" / f"{program}.py"), *options, *flags.split()]
    outputs = {name: ["--distributed.device", name, "--output_dir", str(tmp_path / name)] for name in ("cuda", "cpu")}
    simulated = str(FOLDER / "simulated_cuda.py")
    run_spmd(simulated, library, *command, *outputs["cuda"], world_size=2, timeout_s=180)
    run_spmd(command[0], *command[1:], *outputs["cpu"], world_size=2, timeout_s=180)
    compare(rows_of(tmp_path / "cuda"), rows_of(tmp_path / "cpu"), tolerance=1e-4)


def test_shards_in_pinned_memory_train_like_whole_weights(library: str, tmp_path: Path) -> None:
    """FSDP reads its shards by another name than the optimizer writes them; both must be the pinned memory."""
    flags = ["--only_parity", "--variants", "micro-batches of 1", "--strategy", "fsdp", "--fsdp.cpu_offload", "True"]
    command = [str(strategy_program.__file__), str(tmp_path), *flags]
    run_spmd(str(FOLDER / "simulated_cuda.py"), library, *command, world_size=2, timeout_s=180)
    trained = json.loads((tmp_path / "report.json").read_text())["trained micro-batches of 1"]
    losses, norms, _ = plain_training(adamw, 1.0)
    assert trained["losses"] == pytest.approx(losses, abs=1e-5)
    assert trained["norms"] == pytest.approx(norms, rel=1e-4)


def test_ranks_split_the_tokens_of_images_on_the_device(library: str, tmp_path: Path) -> None:
    save_tiny_vlm(tmp_path / "model", "qwen3_vl")
    checkered(60, 90).save(tmp_path / "image.png")
    lines = [{"prompt": f"what is here {IMAGE}", "images": ["image.png"]}, {"prompt": "no image is here"}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "reward.py").write_text("def letters(sample):\n    return sum(map(str.isalpha, sample.text)) / 8\n")
    flags = "--max_steps 2 --num_prompts 2 --group_size 4 --max_new_tokens 6 --eval.every 0 --strategy fsdp --sp_size 2"
    files = ["--model", str(tmp_path / "model"), "--train_data", str(tmp_path / "train.jsonl")]
    files += ["--reward", f"{tmp_path / 'reward.py'}:letters", "--share_prompts", "True"]
    command = [str(ROOT / "scripts" / "train_grpo.py"), *flags.split(), *files]
    outputs = {name: ["--distributed.device", name, "--output_dir", str(tmp_path / name)] for name in ("cuda", "cpu")}
    run_spmd(str(FOLDER / "simulated_cuda.py"), library, *command, *outputs["cuda"], world_size=2, timeout_s=180)
    run_spmd(command[0], *command[1:], *outputs["cpu"], world_size=2, timeout_s=180)
    compare(rows_of(tmp_path / "cuda"), rows_of(tmp_path / "cpu"), tolerance=1e-4)


FLASH_ATTENTION = """
import os
import torch


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                           softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, deterministic=False):
    assert causal and q.is_cuda and q.dtype == torch.bfloat16 and cu_seqlens_q.dtype == torch.int32
    bounds = cu_seqlens_q.tolist()
    assert bounds == cu_seqlens_k.tolist() and bounds[-1] == len(q) == len(k) == len(v)
    assert max(end - start for start, end in zip(bounds, bounds[1:])) == max_seqlen_q == max_seqlen_k
    assert window_size == (-1, -1) and not softcap and not dropout_p and deterministic
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
    open(os.environ["FLASH_CALLS"], "a").write("x")
    parts = [[part[start:end].transpose(0, 1) for part in (q, k, v)] for start, end in zip(bounds, bounds[1:])]
    attend = torch.nn.functional.scaled_dot_product_attention
    return torch.cat([attend(*part, is_causal=True, scale=softmax_scale).transpose(0, 1) for part in parts])


def flash_attn_func(*_, **__):
    raise AssertionError("only packs are attended to")


flash_attn_with_kvcache = flash_attn_func
"""


def test_packs_in_bfloat16_go_to_flash_attention(library: str, tmp_path: Path) -> None:
    """A package with the functions of flash-attention 2, and the checks of its kernel, gives what torch gives."""
    site, calls = tmp_path / "site", tmp_path / "calls"
    for name, text in (
        ("flash_attn/__init__.py", FLASH_ATTENTION),
        ("flash_attn/bert_padding.py", "pad_input = unpad_input = index_first_axis = None"),
        ("flash_attn-2.8.3.dist-info/METADATA", "Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n"),
        ("flash_attn-2.8.3.dist-info/top_level.txt", "flash_attn\n"),
    ):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    program, *options = GROUPS.split()
    command = [sys.executable, str(FOLDER / "simulated_cuda.py"), library, str(ROOT / "scripts" / f"{program}.py")]
    flags = [*options, "--dtype", "bfloat16", "--share_prompts", "False", "--distributed.deterministic", "True"]
    # Adam turns rounding of small gradients into whole steps, so that after a usual step the entropy differs.
    flags.extend(("--lr", "1e-6", "--output_dir"))
    environment = {"PYTHONPATH": f"{site}:{ROOT}", "FLASH_CALLS": str(calls)}
    run_program([*command, *flags, str(tmp_path / "flash")], timeout_s=120, env=environment)
    run_program([*command, *flags, str(tmp_path / "runs")], timeout_s=120)
    assert calls.stat().st_size >= 2 * 2  # at least two layers, in each step
    compare(rows_of(tmp_path / "flash"), rows_of(tmp_path / "runs"), tolerance=2e-2)


@pytest.mark.parametrize(
    ("file", "wanted", "passed"),
    [
        ("test_gpu_program.py", "sleep_gives or offload_frees or leaves_the_device", "3 passed"),
        ("test_gpu_kernels.py", "", "8 passed"),
    ],
)
def test_tests_of_a_gpu_pass_where_memory_is_counted(file: str, wanted: str, passed: str, library: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "simulated_cuda", "-p", "no:cacheprovider", "-k", wanted]
    environment = {LIBRARY: library, "PYTHONPATH": f"{FOLDER}:{ROOT}"}
    assert passed in run_program([*command, str(ROOT / "tests/gpu" / file)], timeout_s=200, env=environment)


@pytest.mark.parametrize("way", ["False", "True"])
def test_the_device_holds_what_a_plan_predicts(
    way: str, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The most bytes of an update, with prompts computed once and without, by the account of the device."""
    monkeypatch.syspath_prepend(str(PLANNED.parent))
    importlib.import_module(PLANNED.stem).save_model(tmp_path / "model")
    flags = "--num_prompts 8 --group_size 4 --max_new_tokens 64 --max_tokens_per_microbatch 1024 --eval.every 0"
    flags += f" --canary_every 0 --distributed.device cuda --strategy single --share_prompts {way}"
    command = [sys.executable, str(FOLDER / "simulated_cuda.py"), library, str(PLANNED), "grpo", "128", *flags.split()]
    output = run_program(
        [*command, "--model", str(tmp_path / "model"), "--output_dir", str(tmp_path / "run")], timeout_s=200
    )
    predicted, actual = json.loads(output.partition("RESULT ")[2].splitlines()[0])["learn"]
    assert actual > 200e6
    assert 0.95 < predicted / actual < 1.05


def test_mixed_devices_are_an_error(library: str, tmp_path: Path) -> None:
    """What the other tests depend on."""
    program = tmp_path / "mixed.py"
    program.write_text(
        "import torch\n"
        "values = torch.ones(3, device='cuda', requires_grad=True)\n"
        "(values * 2).sum().backward()\n"
        "assert values.grad.device.type == 'cuda' and values.grad.tolist() == [2, 2, 2]\n"
        "calls = [lambda: values + torch.ones(3), lambda: torch.cat([values, torch.ones(3)]), lambda: values.numpy(),\n"
        "         lambda: values.index_select(0, torch.tensor([1])), lambda: torch.ones(3)[torch.tensor([0]).cuda()]]\n"
        "for number, call in enumerate(calls):\n"
        "    try:\n"
        "        call()\n"
        "    except (RuntimeError, TypeError) as error:\n"
        "        print(number, 'refused')\n"
    )
    output = run_program([sys.executable, str(FOLDER / "simulated_cuda.py"), library, str(program)], timeout_s=60)
    assert [line for line in output.splitlines() if "refused" in line] == [f"{number} refused" for number in range(5)]
