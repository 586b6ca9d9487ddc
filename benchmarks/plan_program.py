"""One rank of benchmarks/plan.py: takes two updates on made-up samples under torch's profiler.

The bytes of live tensors are the sum of the CPU allocator's events since the start of the trainer. On a GPU, its own
allocator reports them.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.distributed.distributed_c10d import Work  # noqa: TID251  (its messages are measured)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from lightrl.builtin.model import builtin_model_path
from lightrl.config import parse_config
from lightrl.plan.peaks import Machine, plan_run
from lightrl.plan.plan_program import models_of
from lightrl.programs import TRAINERS
from lightrl.records import Prompt, Sample, ScoredGroup
from lightrl.trainers.fit import build_trainer

RESPONSE = 64  # tokens
_LET_GO_S = 0.001


def save_model(folder: Path, **changes: Any) -> None:
    """Writes a Qwen3 of 5.2 M weights with the tokenizer of the built-in model."""
    sizes: dict[str, Any] = {
        "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3Config(**{**sizes, **changes})).save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(builtin_model_path())).save_pretrained(folder)


def groups_of_rank(trainer: Any, prompt_tokens: int) -> list[ScoredGroup]:
    """Made-up groups of samples that are all as long as they can be; no two prompts begin alike."""
    config, comm = trainer.config, trainer.strategy.comm
    return [
        ScoredGroup(
            samples=tuple(_sample(position, number, prompt_tokens) for number in range(config.group_size)),
            rewards=tuple(float(number % 2) for number in range(config.group_size)),
            step=trainer.step_index,
        )
        for position in range(comm.rank, config.num_prompts, comm.world)
    ]


def _sample(position: int, number: int, prompt_tokens: int) -> Sample:
    return Sample(
        prompt=Prompt(index=position, text="", token_ids=tuple(range(1 + position, 1 + position + prompt_tokens))),
        position=position,
        sample_index=number,
        response_ids=tuple(1 + (7 * index + number) % 97 for index in range(RESPONSE)),
        sampler_logprobs=(-8.3,) * RESPONSE,
        versions=(0,) * RESPONSE,
        finish_reason="length",
        text="",
    )


def free_on_this_thread() -> None:
    """Keeps the tensors of a message until gloo's own thread has dropped them: the profiler sees no frees there."""
    wait = Work.wait

    def wait_longer(work: Any, *args: Any) -> Any:
        result = wait(work, *args)
        time.sleep(_LET_GO_S)
        return result

    Work.wait = wait_longer


def measured(trainer_class: Any, config: Any, prompt_tokens: int) -> tuple[dict[str, float], int]:
    """Bytes at the worst moment of the second update and of the sync behind it, and the number of ranks."""
    from lightrl.trainers.policy_step import sync_engine

    free_on_this_thread()
    spans: dict[str, tuple[int, int]] = {}
    ends: list[int] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        trainer = build_trainer(trainer_class, config)
        for _ in range(2):
            started = time.time_ns()
            trainer.learn_from(groups_of_rank(trainer, prompt_tokens))
            learned = time.time_ns()
            sync_engine(trainer)
            ends.append(time.time_ns())
            spans = {"learn": (started, learned), "sync": (learned, ends[-1])}
            trainer.step_index += 1
        world = trainer.strategy.comm.world
        trainer.close()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.nbytes())
    first, second = (sum(change for moment, change in changes if moment <= end) for end in ends)
    found = {name: peak_between(changes, *span) for name, span in spans.items()}
    return {**found, "drift": float(second - first)}, world


def measured_on_gpu(trainer_class: Any, config: Any, prompt_tokens: int) -> tuple[dict[str, float], int]:
    """The same by the account of the GPU's allocator."""
    from lightrl.trainers.policy_step import sync_engine

    trainer, found, left = build_trainer(trainer_class, config), {}, []
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        trainer.learn_from(groups_of_rank(trainer, prompt_tokens))
        found["learn"] = float(torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        sync_engine(trainer)
        found["sync"] = float(torch.cuda.max_memory_allocated())
        left.append(torch.cuda.memory_allocated())
        trainer.step_index += 1
    world = trainer.strategy.comm.world
    trainer.close()
    return {**found, "drift": float(left[1] - left[0])}, world


def attention_there(has_gpu: bool) -> AbstractContextManager[None]:
    """Attention as the simulated CUDA device of the tests computes it: it has no kernel for it, only products."""
    is_simulated = has_gpu and torch.cuda.get_device_name() == "simulated"
    return sdpa_kernel(SDPBackend.MATH) if is_simulated else nullcontext()


def peak_between(changes: Sequence[tuple[int, int]], first: int, last: int) -> float:
    """The most bytes at a time between two moments, from (moment, change in bytes)."""
    live = peak = 0
    for moment, change in changes:
        live += change
        if first <= moment <= last:
            peak = max(peak, live, live - change)
    return float(peak)


def main() -> None:
    """Prints predicted and this rank's bytes as JSON; the arguments are a trainer, tokens of a prompt, and options."""
    name, prompt_tokens, *options = sys.argv[1:]
    program = TRAINERS[name]
    config = parse_config(program.config, options)
    module, _, kind = program.trainer.partition(":")
    has_gpu = config.distributed.device != "cpu" and torch.cuda.is_available()
    measure = measured_on_gpu if has_gpu else measured
    found, world = measure(getattr(importlib.import_module(module), kind), config, int(prompt_tokens))
    machine = Machine(
        ranks=world, memory=0, prompt_tokens=int(prompt_tokens), response_tokens=0, is_accelerator=has_gpu
    )
    if "Megatron" in config.strategy:  # the one of the tests, which runs on CPUs
        config = dataclasses.replace(config, strategy="megatron")
    with attention_there(has_gpu):
        phases = plan_run(config, models_of(config), machine).phases
    learning = max((p for p in phases if p.name.startswith(("score", "train"))), key=lambda phase: phase.total)
    sync = next(phase for phase in phases if phase.name == "weight sync")
    result = {
        "learn": [learning.total, found["learn"]],
        "sync": [sync.total, found["sync"]],
        "parts": learning.parts,
        "drift": found["drift"],
    }
    print(f"RESULT {json.dumps(result)}", flush=True)


if __name__ == "__main__":
    main()
